"""benchmarks/ring: the sum that is encoded again at every hop, against its bound; the check of all rings."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from benchmarks.ring import rank as ring_rank
from benchmarks.ring.__main__ import GOALS, draw, rows_of, tables
from gradzip.collectives import RingSum, ring_segments

BUCKETS = 40


def on_ranks(size, folder, function):
    """The results of function(group) on ranks in threads of this process."""

    def run(rank):
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return function(dist.ProcessGroupGloo(dist.FileStore(str(folder / "store"), size), rank, size, options))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def vector(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_encoding_at_every_hop_is_within_its_bound(tmp_path, monkeypatch, size, pipelined):
    monkeypatch.setattr("gradzip.collectives.requests.SEGMENT_NBYTES", 1024)  # several segments for each rank

    def summed(group):
        x = vector(group.rank(), 512 * BUCKETS)
        ring = ring_rank.requantized(x, group.rank(), size, pipelined, norm="max")
        ring_rank.RequantizingRing(group).run(ring)
        return x, len(ring.numels)

    results = on_ranks(size, tmp_path, summed)
    got, count = results[0]
    assert all(torch.equal(x, got) for x, _ in results)
    assert count % size == 0 and (count > size) is pipelined
    xs = [vector(rank, 512 * BUCKETS).double().view(-1, 512) for rank in range(size)]
    for i, s in enumerate(ring_segments(BUCKETS, size, 260 if pipelined else 0)):
        # In the order of the ring. Each encoding has an error below one level: 1/7 of the bucket's largest magnitude.
        exact, bound = torch.zeros(s.stop - s.start, 512), torch.zeros(s.stop - s.start, 1)
        for hop in range(size):
            exact = exact + xs[(i + hop) % size][s]
            bound = bound + (exact.abs().amax(1, keepdim=True) + bound) / 7
        error = (got.view(-1, 512)[s] - exact).abs()
        assert (error <= bound * (1 + 1e-5)).all()
        assert error.max() > 0.3 / 7  # it is lossy


def test_all_rings_are_checked_timed_and_traced(tmp_path, monkeypatch):
    numel = 12 * 1536
    monkeypatch.setattr(ring_rank, "gradients", lambda rank: vector(rank, numel))

    def run(group):
        bench = ring_rank.Bench(group)
        return bench.check(), bench.time(1), {name: bench.trace(name) for name in ring_rank.DRAWN}

    results = on_ranks(2, tmp_path, run)
    sent, times, _ = results[0]
    assert sent["uncompressed"] == 4 * numel and 8 * sent["subspace"] == sent["uncompressed"]
    assert 0.125 < sent["QSGD"] / sent["uncompressed"] < 0.14  # 4 bits, norms and headers
    spans = {name: [span for _, _, traced in results for span in traced[name]] for name in ring_rank.DRAWN}
    for name, merges in zip(ring_rank.DRAWN, ({"merge"}, set())):
        assert {span.what for span in spans[name]} == {"compress", "decompress", "download", "send"} | merges
    rows, overlap = rows_of("1gbit", {"sent": sent, "times": times})
    assert [row["ring"] for row in rows] == list(sent) and rows[-1]["goal"] == GOALS["1gbit"]
    assert "| 1gbit | subspace | " in tables(rows, [overlap])
    pytest.importorskip("matplotlib")
    draw("1gbit", spans, tmp_path / "ring.png")
    assert (tmp_path / "ring.png").stat().st_size > 5000


def test_a_wrong_sum_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_rank, "gradients", lambda rank: vector(rank, 1536))
    monkeypatch.setattr(
        ring_rank, "uncompressed", lambda x, size: RingSum((1536,), lambda i: x, lambda i, total: x.copy_(2 * total))
    )

    def check(group):
        with pytest.raises(SystemExit, match="uncompressed: off by .* the sum is wrong"):
            ring_rank.Bench(group).check()

    on_ranks(1, tmp_path, check)

"""Tensor fusion: several routines share one collective per round and kind."""

import time

import pytest
import torch

import gradzip
from gradzip import ops
from gradzip.collectives import Broadcast, Gather, Mean, ToHost, cost
from gradzip.collectives.fusion import adjacent, fused
from gradzip.collectives.traffic import sent_nbytes
from gradzip.engines.local import drive
from gradzip.methods.base.group import averaged


def mean(x):
    return (yield Mean(x))


@pytest.mark.parametrize("size", [3, 66])
def test_float16_is_divided_before_it_is_added(size):
    """No partial sum overflows. Numbers are divided once: 64 times the smallest number has an average of 64 ranks."""
    large, small = torch.full((8,), 60000.0).half(), torch.full((8,), 64 * 2**-24).half()
    for average in drive([mean(large.clone()) for _ in range(size)]):
        torch.testing.assert_close(average, large, rtol=size * 2**-11, atol=0)
    assert torch.equal(drive([mean(small.clone()) for _ in range(64)])[0], small)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        values = torch.randn(size, 100).to(dtype)
        assert torch.equal(drive([mean(x.clone()) for x in values])[0], sum(values[1:], values[0]) / size)


def two_rounds(x):
    """As in a power iteration, the second collective depends on the result of the first."""
    first = yield Mean(x)
    second = yield Mean(first * x)
    return second


def without_communication(x):
    return x
    yield  # makes this a generator


def collectives_by_round(routine):
    """The collectives of each round in a group of one rank, and the results."""
    answer, seen = None, []
    while True:
        try:
            collectives = routine.send(answer)
        except StopIteration as done:
            return seen, done.value
        seen.append([(type(c), c.tensor.numel()) for c in collectives])
        answer = [[c.tensor] if isinstance(c, Gather) else c.tensor for c in collectives]


def test_one_collective_per_round_for_all_members():
    routines = [mean(torch.ones(2, 3)), two_rounds(torch.full((4,), 2.0)), mean(torch.ones(()))]
    seen, results = collectives_by_round(fused(routines))
    assert seen == [[(Mean, 6 + 4 + 1)], [(Mean, 4)]]
    assert [tuple(r.shape) for r in results] == [(2, 3), (4,), ()]
    assert torch.equal(results[1], torch.full((4,), 4.0))


def test_dtypes_and_kinds_are_not_mixed():
    codec = gradzip.FFTRange()
    x = torch.randn(64, 64)
    members = [
        mean(torch.ones(3)),
        averaged(codec, x.clone(), "a"),
        mean(torch.ones(5, dtype=torch.float64)),
        averaged(codec, x.clone(), "b"),
    ]
    seen, results = collectives_by_round(fused(members))
    payload = gradzip.roundtrip(codec, x)[1]
    assert seen == [[(Mean, 3), (Gather, 2 * payload), (Mean, 5)]]  # in one round, so they may run concurrently
    assert torch.equal(results[1], results[3])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_broadcast_gives_the_tensor_of_rank_0(size):
    def routine(rank, numel):
        return (yield Broadcast(torch.full((numel,), float(rank))))

    alone = drive([routine(rank, 5) for rank in range(size)])
    assert all(torch.equal(answer, torch.zeros(5)) for answer in alone)
    joined = drive(
        [fused([routine(rank, 2), mean(torch.full((3,), float(rank))), routine(rank, 4)]) for rank in range(size)]
    )
    for first, average, second in joined:
        assert torch.equal(first, torch.zeros(2)) and torch.equal(second, torch.zeros(4))
        assert torch.equal(average, torch.full((3,), (size - 1) / 2))


def test_tensors_for_the_host_are_joined_and_cost_no_bytes():
    def routine(rank, numel):
        return (yield ToHost(torch.full((numel,), float(rank))))

    for rank, parts in enumerate(drive([fused([routine(rank, n) for n in (2, 3)]) for rank in range(2)])):
        assert [part.tolist() for part in parts] == [[rank] * 2, [rank] * 3]
    assert sent_nbytes(ToHost(torch.ones(4))) == 0


@pytest.mark.parametrize("alike", [True, False])
def test_payloads_of_one_length_are_split_without_looking_at_them(alike):
    payloads = [ops.new_payload(16 * (i + 1)) for i in range(2)]

    def routine(payload):
        received = yield Gather(payload, same_length=alike)
        return [part.numel() for part in received]

    joined = fused([routine(payload) for payload in payloads])
    (gather,) = next(joined)
    assert (gather.count, gather.same_length) == (2, alike)
    if not alike:
        for payload in payloads:
            ops.seal_payloads([ops.Seal(payload, 1)], method=1, digest=0)
        gather = Gather(torch.cat(payloads), 2)
    received = torch.cat([gather.tensor] * 3)
    with pytest.raises(StopIteration) as done:
        joined.send([gather.split_by_rank(received, 3)])
    assert done.value.value == [[64] * 3, [80] * 3]
    if alike:
        with pytest.raises(gradzip.PayloadError, match="got 300 bytes from 3 ranks, expected 144 from each"):
            gather.split_by_rank(received[:300], 3)


def test_averages_in_place_are_written_to_their_tensors():
    def routine(x, in_place):
        return (yield Mean(x, in_place))

    tensors = [[torch.full((4, 6), 1.0 + rank)[:, ::2], torch.full((5,), 3.0 + rank)] for rank in range(2)]
    for own, (first, second) in zip(tensors, drive([fused([routine(a, True), routine(b, False)]) for a, b in tensors])):
        assert first is own[0] and torch.equal(first, torch.full((4, 3), 1.5))
        assert second is not own[1] and torch.equal(second, torch.full((5,), 3.5))


def test_no_routines_and_routines_without_collectives():
    assert collectives_by_round(fused([])) == ([], [])
    x = torch.ones(2)
    assert collectives_by_round(fused([without_communication(x)])) == ([], [x])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_fused_equals_separate(size):
    torch.manual_seed(size)
    shapes = {"big": (64, 64), "odd": (33, 129), "bias": (7,), "conv": (16, 16, 3, 3)}
    grads = {name: [torch.randn(shape) for _ in range(size)] for name, shape in shapes.items()}
    compressors = [gradzip.FFTRange(theta=0.6) for _ in range(size)]
    fused_results = drive(
        [fused([averaged(c, grads[n][r].clone(), n, r) for n in shapes]) for r, c in enumerate(compressors)]
    )
    group = gradzip.LocalGroup(gradzip.FFTRange(theta=0.6), size)
    for i, name in enumerate(shapes):
        alone = group.average(grads[name], name)
        for rank in range(size):
            assert torch.equal(fused_results[rank][i], alone[0])


def test_different_collectives_on_ranks_are_an_error():
    with pytest.raises(RuntimeError, match="different collectives"):
        drive([mean(torch.ones(3)), averaged(gradzip.FFTRange(), torch.ones(64, 64), "a")])
    with pytest.raises(RuntimeError, match="1 of 2 ranks are done"):
        drive([mean(torch.ones(3)), without_communication(torch.ones(3))])


def test_adjacent_tensors_are_not_copied():
    buffer = torch.arange(30.0)
    a, b, c = buffer[2:8].view(2, 3), buffer[8:9], buffer[9:29].view(4, 5)
    joined = adjacent([a, b, c])
    assert joined.data_ptr() == a.data_ptr() and torch.equal(joined, buffer[2:29])
    (collective,) = next(fused([mean(a), mean(b), mean(c)]))
    assert collective.tensor.data_ptr() == a.data_ptr()
    for tensors in ([a, c], [b, a, c], [a, b, c.t()], [a, b.clone(), c], [c, torch.ones(2)]):
        assert adjacent(tensors) is None
        (collective,) = next(fused([mean(t) for t in tensors]))
        assert torch.equal(collective.tensor, torch.cat([t.reshape(-1) for t in tensors]))


def in_place(tensors):
    yield Mean(tensors[0], tensors=tensors)
    return tensors


def test_a_large_mean_is_sent_alone_without_a_copy(monkeypatch):
    monkeypatch.setattr(cost, "ALONE_NBYTES", 4 * 40)
    large, (left, right) = torch.ones(40), torch.arange(41.0).split([30, 11])
    alone, joined, pair = next(fused([mean(large), mean(torch.ones(39)), in_place([left, right]), mean(torch.ones(3))]))
    assert alone.tensor is large
    assert joined.tensor.numel() == 42
    assert (pair.tensor.data_ptr(), pair.tensor.numel()) == (left.data_ptr(), 41)


def test_where_tensors_are_in_memory_does_not_change_what_is_sent(monkeypatch):
    """It may differ between ranks."""
    monkeypatch.setattr(cost, "ALONE_NBYTES", 4 * 40)
    values = [torch.arange(53.0), torch.arange(53.0).square()]
    adjacent_ones, apart = (
        list(values[0].clone().split([30, 11, 12])),
        [x.clone() for x in values[1].split([30, 11, 12])],
    )
    expected = (values[0] + values[1]) / 2
    for a, b, c in (adjacent_ones, apart):
        seen, _ = collectives_by_round(fused([in_place([a, b]), mean(c), mean(torch.ones(2))]))
        assert seen == [[(Mean, 41), (Mean, 14)]]
    for (a, b), c in drive([fused([in_place([a, b]), mean(c)]) for a, b, c in (adjacent_ones, apart)]):
        assert torch.equal(torch.cat([a, b, c]), expected)


def test_time_of_compression_is_counted_without_the_waiting():
    def routine():
        time.sleep(0.02)
        answer = yield Mean(torch.ones(1))
        time.sleep(0.02)
        return answer

    traffic = gradzip.Traffic()
    running = fused([routine()], traffic)
    start = time.perf_counter()
    (collective,) = next(running)
    assert isinstance(collective, Mean)
    time.sleep(0.05)  # the collective
    with pytest.raises(StopIteration) as stop:
        running.send(["average"])
    assert stop.value.value == ["average"]
    assert 0.04 <= traffic.seconds <= time.perf_counter() - start - 0.05

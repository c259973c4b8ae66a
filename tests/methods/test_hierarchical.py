"""Collectives among the ranks of a node and among peers, and `Hierarchical`, which is made of them."""

import contextlib
import copy
import dataclasses
import warnings

import pytest
import torch

import gradzip
import kinds
from contract import assert_equal_states
from gradzip.averaging.local import Worker
from gradzip.collectives import AllToAll, Broadcast, Gather, Mean, RingSum
from gradzip.collectives.fusion import fused
from gradzip.engines.local import drive
from hierarchical_reference import Reference
from hierarchical_worker import NODES, PLACES, gradients

SIZE = NODES * PLACES


def value(rank):
    return torch.full((3,), float(rank))


@pytest.mark.parametrize("scope, groups", [
    ("all", [[0, 1, 2, 3, 4, 5]]), ("node", [[0, 1, 2], [3, 4, 5]]), ("peers", [[0, 3], [1, 4], [2, 5]]),
])  # fmt: skip
def test_collectives_run_among_the_ranks_of_their_scope(scope, groups):
    def routine(rank):
        size = len(groups[0])
        mean = yield Mean(value(rank), scope=scope)
        gathered = yield Gather(torch.full((2,), rank, dtype=torch.uint8), same_length=True, scope=scope)
        payload = torch.tensor([10 * rank + i for i in range(size)], dtype=torch.uint8)
        received = yield AllToAll(payload, (1,) * size, same_length=True, scope=scope)
        first = yield Broadcast(value(rank), scope=scope)
        total = []
        yield RingSum((3,), lambda i: value(rank), lambda i, x: total.append(x.clone()), scope=scope)
        return mean, gathered, received, first, total[0]

    results = drive([routine(rank) for rank in range(6)], node_size=3)
    for group in groups:
        for place, rank in enumerate(group):
            mean, gathered, received, first, total = results[rank]
            assert torch.equal(mean, torch.full((3,), sum(group) / len(group)))
            assert [int(part[0]) for part in gathered] == group
            assert [int(part) for part in received] == [10 * other + place for other in group]
            assert torch.equal(first, value(group[0]))
            assert torch.equal(total, torch.full((3,), float(sum(group))))


def test_scopes_are_not_joined():
    def routine(scope, numel):
        return (yield Mean(torch.ones(numel), scope=scope))

    scopes = ["all", "node", "peers", "node"]
    collectives = next(fused([routine(scope, 2 + i) for i, scope in enumerate(scopes)]))
    assert [(c.scope, c.tensor.numel()) for c in collectives] == [("all", 2), ("node", 3 + 5), ("peers", 4)]
    with pytest.raises(RuntimeError, match="different collectives"):
        drive([routine("all", 2), routine("node", 2)])


def is_inner(compressor):
    with contextlib.suppress(ValueError):
        return not gradzip.Hierarchical(compressor).inner.bypasses(torch.empty(64, 48, device="meta"))


INNER = kinds.examples(is_inner)
every_inner_method = pytest.mark.parametrize("spec", kinds.params(INNER))


@every_inner_method
@pytest.mark.parametrize("dtype, shape", [(torch.float32, (37, 40, 3)), (torch.bfloat16, (64, 48))])
def test_average_is_the_inner_methods_of_the_node_means_chunks(spec, shape, dtype):
    inner, nodes, places = dataclasses.replace(gradzip.parse(spec), min_numel=64), 2, 3
    group, reference = gradzip.LocalGroup(gradzip.Hierarchical(inner), (nodes, places)), Reference(inner, nodes, places)
    for step in range(3):
        grads = [g.to(dtype) for g in gradients("w", step, nodes * places, shape)]
        wanted = reference.average(grads, "w")
        assert all(torch.equal(average, wanted) for average in group.average(grads, "w"))
    assert group.bytes_sent == reference.bytes_sent


@pytest.mark.parametrize("shape", [(48,), (2, 4000), (30, 40)])
def test_gradients_whose_shards_would_be_uncompressed_are_averaged_by_all_ranks(shape):
    """Vectors; pieces of rows, because there are fewer rows than ranks of a node; and chunks of few elements."""
    group = gradzip.LocalGroup(gradzip.Hierarchical(gradzip.TopK()), (2, 3))
    grads = gradients("w", 0, 6, shape)
    wanted = gradzip.simulate(gradzip.NoCompression(), grads)[0]
    assert all(torch.equal(average, wanted) for average in group.average(grads, "w"))
    assert group.bytes_sent == wanted.nbytes and not group.compressors[0].traffic.bytes_in_node


def test_one_node_is_a_full_precision_mean():
    group = gradzip.LocalGroup(gradzip.Hierarchical(gradzip.TopK(theta=0.99)), (1, 3))
    grads = gradients("w", 0, 3, (64, 48))
    assert torch.equal(group.average(grads, "w")[0], (grads[0] + grads[1] + grads[2]) / 3)


@every_inner_method
def test_one_rank_on_each_node_is_the_inner_method(spec):
    inner = gradzip.parse(spec)
    groups = gradzip.LocalGroup(gradzip.Hierarchical(inner), 3), gradzip.LocalGroup(inner, 3)
    for step in range(3):
        grads = gradients("w", step, 3, (64, 48))
        a, b = (group.average(grads, "w") for group in groups)
        assert all(torch.equal(x, y) for x, y in zip(a, b))
    assert groups[0].bytes_sent == groups[1].bytes_sent


def test_traffic_counts_the_bytes_between_nodes_and_within_them():
    inner = gradzip.ACPSGD(rank=2, min_numel=64)
    group = gradzip.LocalGroup(gradzip.Hierarchical(inner), (2, 4))
    group.average(gradients("w", 0, 8, (64, 48)), "w")
    traffic = group.compressors[3].traffic
    # A factor of the 16 rows of a chunk; the gradient for the reduce-scatter, and a chunk and a flag for the gather.
    assert traffic.bytes_sent == 4 * 2 * 16
    assert traffic.bytes_in_node == 4 * 64 * 48 + 4 * (16 * 48 + 1)
    assert traffic.bytes_dense == 4 * 64 * 48


@pytest.mark.parametrize("spec", kinds.params(INNER, kinds.FIRST))
@pytest.mark.parametrize("bad", ["infinite", "overflow"])
def test_non_finite_chunk_of_one_rank_changes_no_state(spec, bad):
    """Only one place's chunk is not finite: that of an infinite element, or one whose average overflows float16."""
    dtype = torch.float16 if bad == "overflow" else torch.float32
    compressor = gradzip.Hierarchical(gradzip.parse(spec))
    group, spared = (gradzip.LocalGroup(compressor, (2, 2)) for _ in range(2))
    for step in range(3):
        grads = [g.to(dtype) for g in gradients("w", step, SIZE)]
        if step == 1:
            before = copy.deepcopy([c.state_dict() for c in group.compressors])
            spoilt = [g.clone() for g in grads]
            if bad == "infinite":
                spoilt[3][0, 0] = float("inf")
            else:
                for g in spoilt:
                    g[:4] = 60000.0  # with the residual, the average of three such steps exceeds 65504
                for _ in range(3):
                    averages = group.average(spoilt, "w")
                    assert all(torch.equal(a.isnan(), averages[0].isnan()) for a in averages)
                group = gradzip.LocalGroup(compressor, (2, 2))
                for own, saved in zip(group.compressors, before):
                    own.load_state_dict(saved)
                spoilt[0][:4] = float("nan")
            for average in group.average(spoilt, "w"):
                assert not average.isfinite().any()
            assert_equal_states([c.state_dict() for c in group.compressors], before)
        averages, wanted = group.average(grads, "w"), spared.average(grads, "w")
        assert all(torch.equal(average, wanted[0]) for average in averages)


@pytest.mark.parametrize("how", ["each", "again", "merged"])
@every_inner_method
def test_checkpoints_continue_bit_for_bit(spec, how):
    compressor = gradzip.Hierarchical(gradzip.parse(spec))
    through, stopped, resumed = (gradzip.LocalGroup(compressor, (2, 2)) for _ in range(3))
    for step in range(3):
        through.average(gradients("w", step, SIZE), "w"), stopped.average(gradients("w", step, SIZE), "w")
    saved = [c.state_dict() for c in stopped.compressors]
    if how == "again":  # before the group is known
        for rank, state_dict in enumerate(saved):
            fresh = compressor.clone()
            fresh.load_state_dict(state_dict)
            saved[rank] = fresh.state_dict()
    if how == "merged":
        merged = gradzip.checkpoint.merge(saved)
        assert set(merged["common"]["parts"][0]["states"]["w"]) <= {"step", "rank", "size"}
        saved = [gradzip.checkpoint.shard(merged, rank, SIZE) for rank in range(SIZE)]
    for own, state_dict in zip(resumed.compressors, saved):
        own.load_state_dict(state_dict)
    for step in range(3, 6):
        wanted = through.average(gradients("w", step, SIZE), "w")[0]
        for average in resumed.average(gradients("w", step, SIZE), "w"):
            assert torch.equal(average, wanted)


@every_inner_method
@pytest.mark.parametrize("shape", [(3, 2), (4, 1), (1, 4), (2, 3)])
def test_checkpoints_of_other_nodes_keep_the_step_alone(spec, shape):
    compressor = gradzip.Hierarchical(gradzip.parse(spec))
    group, other = gradzip.LocalGroup(compressor, (2, 2)), gradzip.LocalGroup(compressor, shape)
    for step in range(2):
        group.average(gradients("w", step, SIZE), "w")
    merged, size = gradzip.checkpoint.merge([c.state_dict() for c in group.compressors]), len(other.compressors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rank, own in enumerate(other.compressors):
            own.load_state_dict(gradzip.checkpoint.shard(merged, rank, size))
        averages = other.average(gradients("w", 2, size), "w")
    assert all(torch.equal(average, averages[0]) for average in averages)
    if shape[0] > 1:
        assert all(c.inner.states["w"].step == 3 for c in other.compressors)


def test_state_of_another_place_is_dropped_with_a_warning():
    compressor = gradzip.Hierarchical(gradzip.ACPSGD())
    group, other = (gradzip.LocalGroup(compressor, (2, 2)) for _ in range(2))
    group.average(gradients("w", 0, SIZE), "w")
    with pytest.warns(UserWarning, match=r"states of place 0 of 2 on a node were loaded at place"):
        other.compressors[1].load_state_dict(group.compressors[0].state_dict())
    kept = other.compressors[1].inner.memory.fields("w")
    assert kept["step"] == 1 and "residual" not in kept and "next_p" not in kept


def test_elastic_jobs_begin_anew():
    """What `gradzip.horovod.elastic_state` does when workers change, with three of four ranks and a new one."""
    compressor = gradzip.Hierarchical(gradzip.ACPSGD())
    group, fresh = (gradzip.LocalGroup(compressor, (2, 2)) for _ in range(2))
    group.average(gradients("w", 0, SIZE), "w")
    group.compressors[2] = compressor.clone()  # of the worker that joins
    for rank, own in enumerate(group.compressors):
        own.change_group(rank, SIZE)
    common, _ = gradzip.checkpoint.split(group.compressors[0].state_dict())
    for rank, own in enumerate(group.compressors):
        _, of_rank = gradzip.checkpoint.split(own.state_dict())
        own.load_state_dict(gradzip.checkpoint.join(common, of_rank, rank, SIZE))
        own.join_group(Worker(rank, SIZE, 2))
    for step in range(3):
        averages, wanted = (g.average(gradients("w", step, SIZE), "w") for g in (group, fresh))
        assert all(torch.equal(average, wanted[0]) for average in averages)


def test_states_follow_the_loss_scale():
    compressor = gradzip.Hierarchical(gradzip.TopK(theta=0.9))
    group, plain = (gradzip.LocalGroup(compressor, (2, 2)) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.zeros(()))
    for own in group.compressors:
        own.follow(scaler)
    for step, scale in enumerate([2.0**16, 2.0**15, 2.0**15, 2.0**17]):
        scaler.update(scale)
        grads = gradients("w", step, SIZE)
        assert torch.equal(group.average([g * scale for g in grads], "w")[0] / scale, plain.average(grads, "w")[0])


def test_monitor_reports_totals_only():
    reports = []
    group = gradzip.LocalGroup(gradzip.Hierarchical(gradzip.TopK(theta=0.9)), (2, 2))
    gradzip.Monitor(lambda tag, value, step: reports.append(tag), every=1).watch(group.compressors[0])
    for step in range(3):
        group.average(gradients("w", step, SIZE), "w")
    assert reports and all(tag.count("/") == 1 for tag in reports)


@pytest.mark.parametrize("make, message", [
    (lambda: gradzip.Hierarchical(gradzip.GradiVeQ()), "expected a method whose collectives do not depend on the data"),
    (lambda: gradzip.Hierarchical(gradzip.TopK(exchange="auto")), "expected a method whose collectives do not depend"),
    (lambda: gradzip.Hierarchical(gradzip.TopK(), local_size=0), "got local_size = 0, expected None or an int"),
    (lambda: gradzip.Hierarchical("topk"), "got 'topk', expected a compressor other than PerLayer, Auto, Phases"),
    (lambda: gradzip.Hierarchical(gradzip.Hierarchical(gradzip.TopK())), "got Hierarchical, expected a compressor"),
    (lambda: gradzip.LocalGroup(gradzip.Hierarchical(gradzip.TopK(), local_size=2), 3),
     "got 3 ranks with local_size = 2, expected a multiple of it; start as many ranks on each node, or pass another"),
    (lambda: gradzip.LocalGroup(gradzip.TopK(), (2, 0)), r"got size = \(2, 0\), expected an integer >= 1, or a pair"),
    (lambda: gradzip.parse("hierarchical"), "got no arguments, expected hierarchical:inner=method"),
    (lambda: gradzip.parse("hierarchical:local_size=2"), "local_size=2"),
])  # fmt: skip
def test_errors(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_unequal_nodes_are_an_error_on_all_ranks():
    """Two ranks on the first node, and one on the second."""
    from gradzip.collectives.engine import Engine

    class Places(Engine):
        rank, size = 0, 3

        def launch(self, collective, slot):
            raise AssertionError

        def place(self):
            return 0, 2

        def allgather_bytes(self, data, slot):
            assert data == b"[0, 2]\n"
            return [b"[0, 2]\n", b"[1, 2]\n", b"[0, 1]\n"]

    with pytest.raises(ValueError, match="rank 2 is number 0 of 1 on its node, expected number 0 of 2: start as many"):
        gradzip.Hierarchical(gradzip.TopK()).join_group(Places())


def test_specs():
    compressor = gradzip.parse("hierarchical:inner=fft-range(theta=0.9,bits=8),local_size=4")
    assert compressor == gradzip.Hierarchical(gradzip.FFTRange(theta=0.9, bits=8), local_size=4)
    assert gradzip.parse("hierarchical:inner=topk") == gradzip.Hierarchical(gradzip.TopK())

"""The DDP front end in real `torchrun` jobs, against the same method in a LocalGroup."""

import os
import socket
import subprocess

import pytest
import torch
import torch.distributed as dist

import gradzip
from contract import Expected
from gradzip.averaging import averaged
from gradzip.engines.local import drive
from gradzip.fusion import fused
from launch import HERE, python, scenarios, torchrun
from reference import MomentumSGD

if not dist.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)
from ddp_worker import (
    CONVOLUTIONS,
    DECAY_STEPS,
    DECAYED,
    DECAYS,
    DTYPES,
    METHODS,
    OPTIONS,
    OVERFLOWS,
    RINGS,
    SHAPES,
    STEPS,
    THETAS,
    gradient,
    table_gradient,
)

WORLDS = [2, 3]
ALL = range(len(SHAPES))
COMPRESSED = [i for i, s in enumerate(SHAPES) if len(s) > 1 and torch.Size(s).numel() >= 1024]


@pytest.fixture(scope="module", params=WORLDS)
def world(request, tmp_path_factory):
    size = request.param
    return size, scenarios(size, "ddp_worker.py", tmp_path_factory.mktemp(f"world{size}"), run=torchrun)


def gradients(ranks, step, index, dtype=torch.float32):
    return [gradient(r, step, index, *SHAPES[index], dtype=dtype) for r in ranks]


class InGroups:
    """Reference: LocalGroups, one for each parameter, or for those of a bucket that the method joins."""

    def __init__(self, compressor, size, prefix="layers."):
        self.groups = Expected(compressor, prefix, size)

    def average(self, grads, buckets):
        """grads: {index: list of all ranks' gradients}."""
        named = [[str(i) for i in bucket if i in grads] for bucket in buckets]
        averages = self.groups.average({str(i): per_rank for i, per_rank in grads.items()}, named)
        return {i: averages[str(i)] for i in grads}


class PerBucket:
    """Reference: a stateless method compresses each bucket as one vector."""

    def __init__(self, compressor, size):
        self.compressor = compressor

    def average(self, grads, buckets):
        averages = {}
        for members in ([i for i in bucket if i in grads] for bucket in buckets):
            if members:
                joined = [
                    torch.cat([g.reshape(1, -1) for g in rank_grads], 1) for rank_grads in zip(*map(grads.get, members))
                ]
                parts = gradzip.simulate(self.compressor, joined)[0].split([grads[i][0].numel() for i in members], 1)
                averages |= {i: part.view(grads[i][0].shape) for i, part in zip(members, parts)}
        return averages


class TopK:
    """Reference: Top-k with error feedback in plain torch; a residual per parameter, one selection per bucket."""

    def __init__(self, theta, size):
        self.theta = theta
        self.step = 0
        self.residuals = [{} for _ in range(size)]

    def average(self, grads, buckets):
        theta = self.theta(self.step) if callable(self.theta) else self.theta
        self.step += 1
        averages = {i: torch.zeros(per_rank[0].shape) for i, per_rank in grads.items()}
        for members in ([i for i in bucket if i in grads] for bucket in buckets):
            for rank, residuals in enumerate(self.residuals if members else []):
                corrected = torch.cat([(grads[i][rank] + residuals.get(i, 0.0)).view(-1) for i in members])
                kept = corrected.abs().argsort(descending=True)[: max(1, round((1 - theta) * corrected.numel()))]
                sent = torch.zeros_like(corrected).index_copy(0, kept, corrected[kept])
                numels = [grads[i][rank].numel() for i in members]
                for i, s, left in zip(members, sent.split(numels), (corrected - sent).split(numels)):
                    averages[i] += s.view(averages[i].shape) / len(self.residuals)
                    residuals[i] = left.view(averages[i].shape)
        return averages


def reference(spec, size):
    """[(indices, their reference)] of a method. Parameters without a reference are averaged uncompressed."""
    if spec.startswith(("fft-range", "block-float")):
        return [(COMPRESSED, PerBucket(gradzip.parse(spec), size))]
    if spec.startswith("topk"):
        return [(COMPRESSED, TopK(0.9, size))]
    if spec.startswith("per-layer"):
        rest = [i for i in ALL if i not in (2, 3, 5)]
        return [
            ([2, 3], TopK(0.9, size)),
            ([5], InGroups(gradzip.QSGD(exchange="scatter_reduce"), size)),
            (rest, InGroups(gradzip.DGC(), size)),
        ]
    return [(ALL, InGroups(gradzip.parse(spec), size))]


def expected(references, ranks, buckets, steps=STEPS, dtypes=None, indices=ALL):
    """Averages of each step, by index: plain means where there is no reference."""
    results = []
    for step in range(steps):
        dtypes = dtypes or [torch.float32] * len(SHAPES)
        grads = {i: gradients(ranks, step, i, dtypes[i]) for i in indices}
        averages = {i: sum(per_rank) / len(ranks) for i, per_rank in grads.items()}
        for members, method in references:
            averages |= method.average({i: grads[i] for i in members if i in grads}, buckets[step])
        results.append(averages)
    return results


def assert_equal(per_rank, wanted, exact=COMPRESSED, ulps=4):
    """All ranks have the same bits in all steps. Averages in `exact` equal the wanted ones bit for bit; others up to
    rounding, because gloo or the reference adds in a different order."""
    for run in per_rank:
        assert len(run) == len(wanted)
        for averages, first, want in zip(run, per_rank[0], wanted):
            for i, average in want.items():
                assert torch.equal(averages[i], first[i])
                if i in exact:
                    assert torch.equal(averages[i], average), i
                else:
                    rounding = ulps * torch.finfo(average.dtype).eps
                    torch.testing.assert_close(averages[i], average, rtol=rounding, atol=rounding)


def bypassed(spec, index):
    return gradzip.parse(spec).bypasses(torch.empty(SHAPES[index]))


def runs(per_rank, *keys):
    for key in keys:
        per_rank = [result[key] for result in per_rank]
    assert all(result["buckets"] == per_rank[0]["buckets"] for result in per_rank)
    return [result["averages"] for result in per_rank], per_rank[0]["buckets"]


@pytest.mark.parametrize("spec", METHODS)
def test_methods(world, spec):
    size, results = world
    averages, buckets = runs(results["methods"], spec)
    assert [len(step) for step in buckets] == [1, 3, 3, 3]
    references = reference(spec, size)
    wanted = expected(references, range(size), buckets)
    summed = spec.startswith(("none", "fp16", "randomk", "powersgd", "acpsgd"))
    inexact = summed or spec.startswith("topk")
    if spec.startswith("fp16"):  # with three ranks, gloo may round in a different order
        for steps in averages:
            assert all(torch.equal(a, b) for s, t in zip(steps, averages[0]) for a, b in zip(s, t))
            eps = torch.finfo(gradzip.parse(spec).dtype).eps
            torch.testing.assert_close(steps[-1], [*wanted[-1].values()], rtol=size * eps, atol=size * eps)
    else:
        exact = [0, 5, 6, 7] if spec.startswith("per-layer") else [i for i in COMPRESSED if not bypassed(spec, i)]
        # In low-rank averages, rounding differences grow in products and the orthogonalization.
        assert_equal(averages, wanted, [] if inexact else exact, ulps=64 if spec in ("powersgd", "acpsgd") else 4)


def test_shards_are_gathered_while_the_next_ones_are_exchanged(world):
    """Of three buckets. Shards of other lengths wait for all buckets, because their lengths may not be known yet."""
    for of_rank in world[1]["order"]:
        even, uneven = of_rank.values()
        assert even == ["AllToAll", "AllToAll", "Gather", "AllToAll", "Gather", "Gather"]
        assert uneven == ["AllToAll"] * 3 + ["Gather"]


@pytest.mark.parametrize("spec", METHODS)
def test_bytes_sent(world, spec):
    """Payloads, 16 bytes for each exchange, padding if lengths vary, and the handshake of the first step."""
    size, results = world
    _, buckets = runs(results["methods"], spec)
    method = InGroups(gradzip.parse(spec), size)
    expected([(ALL, method)], range(size), buckets)
    for run in results["methods"]:
        configuration = 600 + len(repr(gradzip.parse(spec)))
        spare = run[spec]["sent"] - method.groups.bytes_sent
        assert run[spec]["dense"] == STEPS * sum(4 * torch.Size(s).numel() for s in SHAPES)
        if spec in ("none", "fp16", "randomk:theta=0.9"):
            assert 0 < spare < configuration
        elif spec in ("signsgd", "onebit"):  # fixed length: one gather in the first step, three in the others
            assert 0 < spare - 16 * (1 + 3 * 3) < configuration
        else:
            parts = size if "scatter" in spec else 1
            gathers = 1 + 3 * 3
            varying = 0.5 if spec == "atomo" else 0.1  # lengths differ between steps and ranks
            assert 0 < spare < configuration + 16 * gathers * (parts + 1) + varying * method.groups.bytes_sent


@pytest.mark.parametrize("spec", RINGS)
def test_one_ring_for_each_bucket(world, spec, one_thread):
    """Equals a LocalGroup with the gradients of a bucket in one fused routine."""
    size, results = world
    per_rank, buckets = runs(results["rings"], spec)
    assert len(buckets[0]) == 1 < len(buckets[-1])
    compressors = [gradzip.parse(spec) for _ in range(size)]
    wanted, phases = [], []
    for step, of_step in enumerate(buckets):
        wanted.append({})
        for bucket in of_step:
            routines = [
                fused([averaged(c, gradient(r, step, i, *CONVOLUTIONS[i]), f"layers.{i}", r, size) for i in bucket])
                for r, c in enumerate(compressors)
            ]
            wanted[-1] |= zip(bucket, drive(routines)[0])
        parts = {i: compressors[0].method_for(f"layers.{i}", torch.Size(CONVOLUTIONS[i])) for i in (0, 1)}
        phases.append([part.phase(part.states[f"layers.{i}"]) for i, part in parts.items()])
    assert_equal(per_rank, wanted, [i for i, shape in enumerate(CONVOLUTIONS) if len(shape) == 4])
    # Both layers compress in some step; with different schedules, one samples while the other compresses.
    assert ["compressing"] * 2 in phases if spec == RINGS[0] else ["compressing", "sampling"] in phases


@pytest.mark.parametrize("which", range(len(OPTIONS)), ids=str)
def test_options_of_ddp(world, which):
    size, results = world
    averages, buckets = runs(results["options"], which)
    references = [([2, 3], TopK(0.9, size)), (ALL, InGroups(gradzip.TernGrad(), size))]
    wanted = expected(references[::-1], range(size), buckets)
    assert_equal(averages, wanted, [i for i in COMPRESSED if i not in (2, 3)])


def test_error_feedback_loses_nothing(world):
    """Averages plus mean residual equal the mean gradients, with rebuilt buckets, checkpoints and shards."""
    size, results = world
    for spec in results["feedback"][0]:
        averages, residuals, buckets = zip(*[result[spec] for result in results["feedback"]])
        assert buckets[0] == 3
        for i in COMPRESSED:
            assert all(torch.equal(a[i], b[i]) for run in averages for a, b in zip(run, averages[0]))
            total = sum(step[i] for step in averages[0]) + sum(r[f"layers.{i}"] for r in residuals) / size
            # STEPS more steps were taken from the checkpoint.
            want = sum(sum(gradients(range(size), step, i)) for step in range(2 * STEPS)) / size
            torch.testing.assert_close(total, want, rtol=1e-5, atol=2e-5)
            assert residuals[0][f"layers.{i}"].norm() > 0.1 * want.norm()


def test_checkpoint_without_names_continues_training(world):
    _, results = world
    for without, with_, names in results["resumed"]:
        for i in ALL:  # the first bucket after a start is the whole model: gloo adds in a different order
            rounding = 0 if i in COMPRESSED else 1e-6
            torch.testing.assert_close(without[i], with_[i], rtol=rounding, atol=rounding)
        assert names == [str(i) for i in ALL]


def test_rewrapped_model_without_names_finds_its_state(world):
    size, results = world
    wanted = expected([(ALL, InGroups(gradzip.DGC(theta=0.9), size))], range(size), [[ALL]] * 4)
    assert_equal([averages for averages, _ in results["rewrapped"]], wanted)
    assert all(names == [str(i) for i in ALL] for _, names in results["rewrapped"])


def test_sparse_gradients_are_averaged_as_without_compression(world):
    size, results = world
    for averages, dense_nbytes in results["sparse"]:
        for step, average in enumerate(averages):
            want = sum(torch.zeros(200, 16).index_add_(0, *table_gradient(r, step)) for r in range(size)) / size
            torch.testing.assert_close(average, want, rtol=1e-6, atol=1e-6)
        # Four rows of the table, and the matrix.
        assert dense_nbytes == len(averages) * (4 * 8 + 4 * 16 * 4 + 40 * 40 * 4)


def test_loss_scale_needs_no_memory_between_steps(world):
    _, results = world
    for without, with_ in results["memory_between_steps"]:
        assert without > 0 and with_ - without < 1000  # the scaler's numbers; a residual has at least 8 kB


def test_recreated_process_group_is_used(world):
    size, results = world
    averages, buckets = runs(results["recreated_group"])
    assert [len(step) for step in buckets] == [1, 3, 1, 3]
    assert_equal(averages, expected([(COMPRESSED, TopK(0.9, size))], range(size), buckets), [])
    assert all(result["is_new"] for result in results["recreated_group"])


def test_unused_parameters(world):
    size, results = world
    per_rank, buckets = runs(results["unused"])
    groups = InGroups(gradzip.QSGD(), size)
    wanted = []
    for step in range(2):
        grads = {i: gradients(range(size), step, i) for i in ALL}
        grads[3][0].zero_()
        grads[5] = [torch.zeros_like(unused) for unused in grads[5]]
        wanted.append(groups.average(grads, buckets[step]))
        del wanted[-1][5]
    assert_equal(per_rank, wanted)
    assert all(averages[5] is None for run in per_rank for averages in run)


def test_frozen_parameters(world):
    size, results = world
    averages, buckets = runs(results["frozen"])
    trained = [i for i in ALL if i not in (0, 4)]
    compressed = [i for i in trained if i in COMPRESSED]
    assert_equal(averages, expected([(compressed, TopK(0.9, size))], range(size), buckets, indices=trained), [])
    assert all(step[i] is None for run in averages for step in run for i in (0, 4))


def test_mixed_dtypes(world):
    size, results = world
    averages, buckets = runs(results["mixed"])
    assert len(buckets[-1]) >= 4
    references = [(ALL, InGroups(gradzip.QSGD(), size))]
    assert_equal(averages, expected(references, range(size), buckets, dtypes=DTYPES))


def test_strides_are_kept(world):
    size, results = world
    shapes = [(32, 16, 3, 3), (50, 60), (64, 64)]
    for which, compressor in enumerate((gradzip.FFTRange(theta=0.5), gradzip.NoCompression())):
        averages, buckets = runs(results["strides"], which)
        wanted = []
        for step in range(STEPS):
            grads = {i: [gradient(r, step, i, *s) for r in range(size)] for i, s in enumerate(shapes)}
            wanted.append(PerBucket(compressor, size).average(grads, buckets[step] if which == 0 else [[0], [1], [2]]))
        assert_equal(averages, wanted, range(3) if which == 0 else [])
        assert all(all(result[which]["strides"]) for result in results["strides"])


def test_group_of_one(world):
    size, results = world
    for spec in results["alone"][0]:
        for rank in range(size):
            (averages,), buckets = runs(results["alone"][rank : rank + 1], spec)
            wanted = expected(reference(spec, 1), [rank], buckets)
            assert_equal([averages], wanted, ALL)


def test_group_of_some_ranks(world):
    size, results = world
    assert results["subset"][0] is None
    averages, buckets = runs(results["subset"][1:])
    references = [(ALL, InGroups(gradzip.QSGD(exchange="scatter_reduce"), size - 1))]
    assert_equal(averages, expected(references, range(1, size), buckets))


def test_two_models_in_one_backward_pass(world):
    size, results = world
    for model, prefix in enumerate(("", "model1.")):
        wanted = expected([(ALL, InGroups(gradzip.TernGrad(), size, prefix))], range(size), [[ALL]] * STEPS)
        assert_equal([[step[model] for step in run] for run in results["two_models"]], wanted)


def test_join_with_uneven_data(world):
    size, results = world
    for rank, run in enumerate(results["joined"]):
        assert len(run) == 3 + rank
        for step, averages in enumerate(run):
            for i, average in enumerate(averages):
                active = [r for r in range(size) if step < 3 + r]
                want = sum(gradients(active, step, i)) / size
                assert torch.equal(average, results["joined"][-1][step][i])
                torch.testing.assert_close(average, want, rtol=1e-6, atol=1e-6)


def test_payloads_longer_than_in_the_step_before(world):
    size, results = world
    averages, buckets = runs(results["growing"])
    theta = gradzip.StepSchedule(THETAS)
    assert_equal(averages, expected([(COMPRESSED, TopK(theta, size))], range(size), buckets, steps=8), [])


def test_non_finite_gradient_of_one_rank(world):
    _, results = world
    names = {f"layers.{i}" for i in COMPRESSED}
    for result in results["non_finite"]:
        for spec, (before, during, after) in result.items():
            # TopK compresses a bucket as one vector: all parameters of that bucket are affected.
            bad = {3, 5} if spec.startswith("topk") else {3}
            assert during["finite"] == [i not in bad for i in ALL]
            assert before["finite"] == after["finite"] == [True] * len(SHAPES)
            assert after["steps"] == {name: 2 if int(name[-1]) in bad else 3 for name in names}
            if spec != "terngrad":
                for name in names:
                    same = torch.equal(before["residuals"][name], during["residuals"][name])
                    assert same is (int(name[-1]) in bad)
                    assert not torch.equal(during["residuals"][name], after["residuals"][name])


@pytest.mark.parametrize("case", DECAYED)
def test_weight_decay_has_momentum_next_to_dgc(world, case):
    """Parameters that bypass compression equal those of SGD with momentum on the gradient plus decay."""
    size, results = world
    momenta = (0.0, 0.9) if case in ("compressed", "per layer") else (0.9, 0.9)
    start = {str(i): gradient(99, 0, i, *shape) for i, shape in enumerate([(40, 40), (30,)])}
    reference = MomentumSGD(start, {"0": momenta, "1": (0.0, 0.0) if case == "per layer" else (0.9, 0.9)})
    factor = (2 if case == "accumulated" else 1) / size
    for step in range(DECAY_STEPS):
        totals = {
            name: sum(gradient(r, step, i, *p.shape).double() for r in range(size))
            for i, (name, p) in enumerate(start.items())
        }
        if not (case == "loss scaled" and step == OVERFLOWS):
            reference.step({name: factor * total for name, total in totals.items()}, 0.1, dict(zip(start, DECAYS)))
    for parameters in results["weight_decay"]:
        for got, first, want in zip(parameters[case], results["weight_decay"][0][case], reference.parameters.values()):
            assert torch.equal(got, first)
            torch.testing.assert_close(got.double(), torch.from_numpy(want), rtol=1e-4, atol=1e-4)


def test_errors_are_raised_by_backward(world):
    size, results = world
    for result in results["errors"]:
        corrupt = f"PayloadError: Damaging, parameter 'layers.3': from rank 1 of {size}: corrupt payload: its checksum"
        assert result["damaged"][:2] == ["no error"] * 2 and result["damaged"][2].startswith(corrupt)
        for static in (False, True):
            assert result[f"first step, static_graph={static}"].startswith(corrupt)
        assert "got torch.complex64, expected a real floating-point type" in result["complex"]
        assert (
            "hook: got TopK(" in result["no hook state"]
            and "expected one as of gradzip.ddp.HookState(" in result["no hook state"]
        )
        assert "of an unknown parameter" in result["shared"] and "HookState of its own" in result["shared"]
        assert result["foreign state"].startswith("ValueError: ") and "parameter 'layers.0'" in result["foreign state"]


def test_different_configurations_raise_in_the_first_step(world):
    _, results = world
    for result in results["errors"]:
        for what, words in {
            "methods": ("rank 1 compresses with TopK(", "rank 0 with QSGD("),
            "arguments": ("rank 1", "theta=0.8", "rank 0", "theta=0.9"),
            "exchanges": ("rank 1", "exchange='scatter_reduce'", "rank 0", "exchange='gather'"),
            "names": ("parameter 'layers.0': rank 1 has no such parameter, rank 0 has float32[64, 64]",),
        }.items():
            assert result[what].startswith("RuntimeError: ") and all(w in result[what] for w in words)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((gradzip.TopK,), TypeError, "HookState: got <class .*, expected a compressor, such as gradzip.TopK()"),
        ((gradzip.TopK(), None, torch.nn.Linear(2, 2)), ValueError, "got Linear, expected .* model.named_parameters()"),
        ((gradzip.TopK(), None, torch.nn.Linear(2, 2).parameters()), ValueError, "got named_parameters of Parameter,"),
        ((gradzip.TopK(), None, [("w", torch.ones(2))] * 2), ValueError, "got named_parameters with equal names"),
        (
            (gradzip.parse("per-layer:^fc=none"),),
            ValueError,
            "got no names of parameters, .*: rules of PerLayer match names",
        ),
    ],
)
def test_invalid_arguments_of_hook_state(arguments, error, message):
    with pytest.raises(error, match=message):
        gradzip.ddp.HookState(*arguments)


def test_killed_rank_is_an_error_on_the_others(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = dict(
        os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    command = [*python(), str(HERE / "ddp_worker.py"), str(tmp_path), "die"]
    ranks = [
        subprocess.Popen(command, env=dict(environment, RANK=str(r), WORLD_SIZE="3"), stderr=subprocess.DEVNULL)
        for r in range(3)
    ]
    try:
        for process in ranks:
            process.wait(timeout=100)
    finally:
        for process in ranks:
            process.kill()
    assert ranks[1].returncode == -9 and not (tmp_path / "survivor1").exists()
    for rank in (0, 2):
        seconds, error = (tmp_path / f"survivor{rank}").read_text().split(" ", 1)
        assert "Error: " in error and float(seconds) < 60  # the group's timeout


def test_hook_state_refuses_other_objects_and_equal_names():
    with pytest.raises(TypeError, match="HookState: got 4, expected a compressor"):
        gradzip.ddp.HookState(4)
    weights = [("w", torch.zeros(2)), ("w", torch.zeros(2))]
    with pytest.raises(ValueError, match="equal names"):
        gradzip.ddp.HookState(gradzip.TopK(), named_parameters=weights)


def test_capacity_follows_the_longest_payload():
    from gradzip.engines.torch import next_capacity

    assert next_capacity(0, 1600) == 1600  # nothing is known yet about how lengths vary
    assert next_capacity(1600, 1600) == 1600
    assert next_capacity(1600, 1632) == 1664 and next_capacity(1600, 16000) == 17008
    capacity = 16000
    for _ in range(40):
        smaller = next_capacity(capacity, 1600)
        assert 1600 <= smaller <= capacity and smaller % 16 == 0
        capacity = smaller
    assert capacity < 1.1 * 1600

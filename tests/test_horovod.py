"""The Horovod front end in real `horovodrun` jobs, against the same method in a LocalGroup."""

import pytest
import torch

import gradzip
from gradzip.averaging import averaged
from gradzip.engines.local import drive
from gradzip.fusion import fused
from launch import horovodrun, scenarios

pytest.importorskip("horovod.torch")
from horovod_worker import (
    CONVOLUTIONS,
    FFT,
    METHOD_STEPS,
    METHODS,
    PHASES,
    RING_STEPS,
    RINGS,
    SHAPES,
    SPOILT,
    PowerIteration,
    gradient,
)

WORLDS = [2, 3]


@pytest.fixture(scope="module", params=WORLDS)
def world(request, tmp_path_factory):
    size = request.param
    return size, scenarios(size, "horovod_worker.py", tmp_path_factory.mktemp(f"world{size}"))


def expected(size, shapes=SHAPES, compressor=None, steps=1, scale=1.0, prefix="layer"):
    """Averages that a LocalGroup of as many workers makes of the same gradients, in the last of some equal steps."""
    group = gradzip.LocalGroup(compressor or gradzip.FFTRange(**FFT), size)
    for _ in range(steps):
        averages = [
            group.average([scale * gradient(r, *s, index=i) for r in range(size)], f"{prefix}{i}")[0]
            for i, s in enumerate(shapes)
        ]
    return averages


def assert_same(of_ranks, wanted):
    """Every rank has the same bits; those of the wanted averages, or, for uncompressed small tensors, whose sum
    Horovod forms in an order of its own, the same to rounding."""
    for averages in of_ranks:
        assert len(averages) == len(wanted)
        for got, first, want in zip(averages, of_ranks[0], wanted):
            assert torch.equal(got, first)
            if want.dim() >= 2 and want.numel() >= 1024:
                assert torch.equal(got, want)
            else:
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def assert_close_everywhere(of_ranks, wanted):
    for averages in of_ranks:
        for got, first, want in zip(averages, of_ranks[0], wanted):
            assert torch.equal(got, first)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_average(world):
    size, results = world
    assert_same(results["average"], expected(size))


@pytest.mark.parametrize("name", ["grouped", "listed_groups", "nameless", "predivided"])
def test_options_that_change_nothing(world, name):
    size, results = world
    shapes = [(64, 64), (300,)] if name == "nameless" else SHAPES
    # The default names are Horovod's; with nearest rounding they do not enter the result.
    assert_same(results[name], expected(size, shapes))


def test_sum_is_the_average_times_the_number_of_ranks(world):
    size, results = world
    assert_same(results["total"], [size * x for x in expected(size)])


def test_backward_passes_accumulate_before_compression(world):
    size, results = world
    assert_same(results["accumulated"], expected(size, scale=2.0))


def test_process_set_of_some_ranks(world):
    size, results = world
    members, rest = results["subset"][:-1], results["subset"][-1]
    assert_same(members, expected(size - 1, [(64, 64), (300,)]))
    for i, untouched in enumerate(rest):
        assert torch.equal(untouched, gradient(size - 1, *untouched.shape, index=i))


def test_no_compression_is_stock_horovod_to_the_bit(world):
    _, results = world
    for flags in results["lossless_is_stock"]:
        assert all(flags)


def test_shapes_types_and_strides_are_kept(world):
    size, results = world
    local = gradzip.LocalGroup(gradzip.FFTRange(**FFT), size)
    for index, (name, (first, strides, parameter_strides)) in enumerate(results["odd_tensors"][0].items()):
        assert strides == parameter_strides
        grads = [gradient(r, *first.shape, dtype=first.dtype, index=index) for r in range(size)]
        want = local.average(grads, name)[0]
        assert first.shape == want.shape and first.dtype == want.dtype
        for rank in range(size):
            assert torch.equal(results["odd_tensors"][rank][name][0], first)
        # Uncompressed bfloat16 travels as float32 and is rounded once, not at every addition.
        tolerance = 2e-2 if first.dtype == torch.bfloat16 else 1e-3 if first.dtype == torch.float16 else 1e-6
        torch.testing.assert_close(first, want, rtol=tolerance, atol=tolerance)
        if first.dim() == 2 and first.numel() > 1024:
            assert torch.equal(first, want)


def test_channels_last_model_trains(world):
    _, results = world
    for parameters in results["channels_last_backward"]:
        for got, first in zip(parameters, results["channels_last_backward"][0]):
            assert torch.equal(got, first) and got.isfinite().all() and not torch.all(got == 0.1)


def test_sparse_embeddings(world):
    size, results = world
    want = torch.zeros(200, 16)
    for rank in range(size):
        for row in (rank, 5, 199):
            want[row] -= 1.0 / size
    for tables in results["sparse"]:
        torch.testing.assert_close(tables[False], want)
        torch.testing.assert_close(tables[True], want, rtol=0, atol=2e-4)  # 16-bit frequencies


def test_clipping_between_synchronize_and_step(world):
    size, results = world
    averages = expected(size, [(64, 64), (300,)])
    norm = torch.stack([a.norm() for a in averages]).norm()
    for got_norm, parameters in results["clipped"]:
        torch.testing.assert_close(got_norm, norm)
        for got, average in zip(parameters, averages):
            torch.testing.assert_close(got, -average / norm, rtol=1e-4, atol=1e-6)


def test_hooks_in_another_order_on_every_rank(world):
    size, results = world
    wanted = expected(size)
    grads = [gradient(r, *SHAPES[3], index=3) for r in range(size)]
    grads[0].zero_()  # the rank that did not use it
    wanted[3] = gradzip.simulate(gradzip.FFTRange(**FFT), grads)[0]
    assert_same(results["order_shuffled"], wanted)


@pytest.mark.parametrize("spec", METHODS)
def test_methods(world, spec):
    size, results = world
    group = gradzip.LocalGroup(gradzip.parse(spec), size)
    for _ in range(METHOD_STEPS):
        wanted = [
            group.average([gradient(r, *shape, index=i) for r in range(size)], f"layer{i}")[0]
            for i, shape in enumerate(SHAPES)
        ]
    of_ranks = [averages[spec][0] for averages in results["methods"]]
    if any(
        name in spec for name in ("randomk", "none", "powersgd", "acpsgd")
    ):  # Horovod adds them up, in an order of its own
        assert_close_everywhere(of_ranks, wanted)
    else:
        assert_same(of_ranks, wanted)
    # Besides, a number of 4 bytes per gradient that Horovod is given to all-reduce.
    sent = [of_rank[spec][1] for of_rank in results["methods"]]
    assert 0 <= max(sent) - group.bytes_sent <= 4 * METHOD_STEPS * len(SHAPES)


@pytest.mark.parametrize("spec", PHASES)
def test_methods_that_go_through_phases(world, spec):
    """Horovod adds in an order of its own: samples, and with them everything, are the same to rounding."""
    size, results = world
    group = gradzip.LocalGroup(gradzip.parse(spec), size)
    for step in range(PHASES[spec]):
        wanted = [
            group.average([gradient(r, *shape, index=10 * step + i) for r in range(size)], f"layer{i}")[0]
            for i, shape in enumerate(SHAPES)
        ]
        of_ranks = [of_rank[spec][step] for of_rank in results["phases"]]
        phase = group.compressors[0].phase(group.compressors[0].states["layer2"])
        assert [seen for _, _, seen in of_ranks] == [phase] * size
        for averages, _, _ in of_ranks:
            for got, first, want in zip(averages, of_ranks[0][0], wanted):
                assert torch.equal(got, first)
                assert (got - want).abs().max() <= 1e-4 * want.abs().max()
        # layer2 alone is compressed; Horovod itself averages a number for it.
        sent = [of_rank[spec][step][1] for of_rank in results["phases"]]
        assert max(sent) - group.bytes_sent == 4 * (step + 1)


@pytest.mark.parametrize("spec", RINGS)
def test_one_ring_for_all_gradients(world, spec, one_thread):
    """The bits of a LocalGroup whose gradients go together, in the order of their names."""
    size, results = world
    compressors = [gradzip.parse(spec) for _ in range(size)]
    phases = []
    for step in range(RING_STEPS):
        routines = []
        for rank, compressor in enumerate(compressors):
            grads = [gradient(rank, *shape, index=10 * step + i) for i, shape in enumerate(CONVOLUTIONS)]
            routines.append(fused([averaged(compressor, g, f"layer{i}", rank, size) for i, g in enumerate(grads)]))
        wanted = drive(routines)[0]
        parts = [compressors[0].method_for(f"layer{i}", torch.Size(CONVOLUTIONS[i])) for i in (0, 1, 3)]
        states = [part.states[f"layer{i}"] for part, i in zip(parts, (0, 1, 3))]
        phases.append([part.phase(state) for part, state in zip(parts, states)])
        of_ranks = [of_rank[spec][step] for of_rank in results["rings"]]
        for averages, _ in of_ranks:
            for got, first, want in zip(averages, of_ranks[0][0], wanted):
                assert torch.equal(got, first)
                if want.dim() == 4:
                    assert torch.equal(got, want)
        if spec == RINGS[0] and step == 5:
            # Coordinates and votes travel 2 (n - 1) hops each; beside them Horovod has a number for each gradient,
            # and those that go uncompressed.
            slices = [-(-torch.Size(CONVOLUTIONS[i]).numel() // 200) for i in (0, 1, 3)]
            on_ring = sum(len(s.bases[0]) * m + min(m, size) for s, m in zip(states, slices))
            uncompressed = 64 * 64 + 300 + len(states)
            assert sum(sent for _, sent in of_ranks) == 4 * (2 * (size - 1) * on_ring + size * uncompressed)
    # Some sample while others compress, unless all do the same.
    assert ["compressing", "compressing" if spec == RINGS[0] else "sampling", "compressing"] in phases


def test_a_rank_that_restarts_in_another_phase_is_refused(world):
    _, results = world
    for text in results["restarted_apart"]:
        assert text.startswith("RuntimeError: parameter 'layer0': rank 1 has compressed it 0 times, rank 0 5 times;")


def test_process_set_of_some_ranks_scatters(world):
    size, results = world
    group = gradzip.LocalGroup(gradzip.TopK(theta=0.9, exchange="scatter_reduce"), size - 1)
    wanted = [
        group.average([gradient(r, *shape, index=i) for r in range(size - 1)], f"layer{i}")[0]
        for i, shape in enumerate([(64, 64), (300,)])
    ]
    assert_same(results["subset_scatters"][:-1], wanted)


def test_later_rounds_do_not_wait_for_the_order_of_hooks(world):
    size, results = world
    assert_close_everywhere(results["two_rounds"], expected(size, compressor=PowerIteration()))


def test_a_non_finite_gradient_ends_a_step_of_two_rounds_after_the_first(world):
    size, results = world
    spec = "terngrad"
    group, shapes = gradzip.LocalGroup(gradzip.parse(spec), size), SPOILT[spec][0]
    for _ in range(2):  # the step that was spoilt for the first did not count
        first = group.average([gradient(r, *shapes[0], index=0) for r in range(size)], "layer0")[0]
    for _ in range(3):
        second = group.average([gradient(r, *shapes[1], index=1) for r in range(size)], "layer1")[0]
    for steps in (of_rank[spec] for of_rank in results["non_finite"]):
        finite = [[bool(x.isfinite().all()) for x in averages] for averages, _ in steps]
        assert finite == [[True, True], [False, True], [True, True]]
        averages, states = steps[-1]
        assert [states[f"layer{i}"]["step"] for i in range(2)] == [2, 3]
        assert torch.equal(averages[0], first) and torch.equal(averages[1], second)


def test_two_optimizers_share_a_compressor(world):
    size, results = world
    wanted = []
    for shape in ((64, 64), (80, 40)):
        group = gradzip.LocalGroup(gradzip.FFTRange(**FFT, error_feedback=True), size)
        parameter = torch.zeros(shape)
        for _ in range(3):
            parameter -= group.average([gradient(r, *shape) for r in range(size)], "layer0")[0]
        wanted.append(parameter)
    assert_same(results["two_optimizers"], wanted)


def test_error_feedback_and_schedule_over_steps(world):
    size, results = world
    compressor = gradzip.FFTRange(theta=gradzip.StepSchedule({0: 0.5, 5: 0.9}), error_feedback=True)
    group = gradzip.LocalGroup(compressor, size)
    for _ in range(10):
        averages = [
            group.average([gradient(r, *s, index=i) for r in range(size)], f"layer{i}")[0]
            for i, s in enumerate([(64, 64), (300,)])
        ]
    for got, sent, dense in results["feedback_steps"]:
        assert_same([got], averages)
        # One number more per compressed tensor and step: what Horovod itself averages.
        assert sent == group.bytes_sent + 10 * 4
        assert dense == 10 * 4 * (64 * 64 + 300)


def test_non_finite_gradient_of_one_rank(world):
    _, results = world
    for of_rank in results["non_finite"]:
        (first, before), ((big, small), spoilt), (last, after) = of_rank[next(iter(SPOILT))]
        # All of a compressed tensor is spoilt, one element of an uncompressed one.
        assert not big.isfinite().any() and small[1:].isfinite().all() and not small[0].isfinite()
        assert all(bool(x.isfinite().all()) for x in first + last)
        states = [states["layer0"] for states in (before, spoilt, after)]
        assert [state["step"] for state in states] == [1, 1, 2]
        assert torch.equal(states[0]["residual"], states[1]["residual"])
        assert not torch.equal(states[1]["residual"], states[2]["residual"])


def test_compression_class_is_a_subclass_of_horovods(world):
    _, results = world
    for flags in results["compression_class"]:
        assert all(flags)


def test_errors_before_any_communication(world):
    _, results = world
    for messages in results["refused"]:
        assert messages["stranger"].startswith("RuntimeError: a gradient of shape (64, 64) belongs to no parameter")
        assert "gradzip.roundtrip" in messages["nobody"]
        assert messages["adasum"].startswith("ValueError: FFTRange with op=Adasum")


def test_ranks_that_disagree_are_told_so_at_the_first_step(world):
    size, results = world
    last, same = f"rank {size - 1}", "give all ranks the same method and the same arguments"
    expected = {
        "arguments": (f"{last} compresses with FFTRange(", "theta=0.9", ", rank 0 with FFTRange(", "theta=0.5", same),
        "methods": (f"{last} compresses with TopK(", ", rank 0 with ACPSGD(", same),
        "shapes": (f"parameter 'layer1': {last} has float32[65, 64], rank 0 has float32[64, 64]; build the same",),
        "parameters": (f"parameter 'layer2': {last} has float32[64, 64], rank 0 has no such parameter",),
        "versions": (f"{last} runs gradzip 9.9, rank 0 gradzip {gradzip.__version__}; install the same version",),
    }
    for messages in results["disagreement"]:
        for kind, parts in expected.items():
            assert messages[kind].startswith("RuntimeError: ")
            for part in parts:
                assert part in messages[kind]


def test_one_process_alone(tmp_path):
    job = horovodrun(1, "horovod_worker.py", tmp_path, "average")
    assert job.returncode == 0, job.stderr
    averages = torch.load(tmp_path / "0.pt", weights_only=True)["average"]
    for i, (got, shape) in enumerate(zip(averages, SHAPES)):
        assert torch.equal(got, gradient(0, *shape, index=i))  # Horovod calls no compression in a world of one

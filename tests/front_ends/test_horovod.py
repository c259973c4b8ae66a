"""The Horovod front end in real `horovodrun` jobs, against the same method in a LocalGroup."""

import functools

import pytest
import torch

import gradzip
import kinds
from contract import Expected, assert_averages
from gradzip.collectives.fusion import fused
from gradzip.engines.local import drive
from gradzip.methods.base.group import averaged
from launch import Jobs, horovodrun, scenarios
from reference import MomentumSGD

pytest.importorskip("horovod.torch")
from horovod_worker import (
    CONVOLUTIONS,
    DECAY_STEPS,
    DECAYED,
    DECAYS,
    FFT,
    METHOD_STEPS,
    NON_FINITE,
    OVERFLOWS,
    PHASES,
    RING_STEPS,
    RINGS,
    SHAPES,
    PowerIteration,
    gradient,
)

SPECS = [*kinds.ALL, *kinds.exchanged()]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """The jobs by number of ranks."""

    def run(size, names):
        return scenarios(size, "horovod_worker.py", tmp_path_factory.mktemp(f"world{size}"), *names)

    return {size: Jobs(functools.partial(run, size), kinds.batches(SPECS)) for size in (2, 3)}


@pytest.fixture(params=[3, pytest.param(2, marks=pytest.mark.long)])
def world(request, jobs):
    return request.param, jobs[request.param]


def of_method(results, spec):
    return [result[spec] for result in results["methods"]] if spec in kinds.SAMPLE else results[spec]


def gradients(size, shapes=SHAPES, scale=1.0):
    """The gradients of all ranks in one step, by name."""
    return {f"layer{i}": [scale * gradient(r, *s, index=i) for r in range(size)] for i, s in enumerate(shapes)}


def expected(size, shapes=SHAPES, compressor=None, steps=1, scale=1.0):
    """Averages of the same gradients in LocalGroups of the same size, in the last of `steps` equal steps."""
    reference = Expected(compressor or gradzip.FFTRange(**FFT), size=size)
    return list(reference.averages([gradients(size, shapes, scale)] * steps)[-1].values())


def assert_same(per_rank, wanted):
    """All ranks have the same bits. Compressed averages equal the wanted ones bit for bit; uncompressed ones up to
    rounding, because Horovod adds in an order of its own."""
    for averages in per_rank:
        assert len(averages) == len(wanted)
        for got, first, want in zip(averages, per_rank[0], wanted):
            assert torch.equal(got, first)
            if want.dim() >= 2 and want.numel() >= 1024:
                assert torch.equal(got, want)
            else:
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def assert_close_everywhere(per_rank, wanted):
    for averages in per_rank:
        for got, first, want in zip(averages, per_rank[0], wanted):
            assert torch.equal(got, first)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_average(world):
    size, results = world
    assert_same(results["average"], expected(size))


@pytest.mark.parametrize("name", ["grouped", "listed_groups", "without_names", "predivided"])
def test_options_that_change_nothing(world, name):
    size, results = world
    shapes = [(64, 64), (300,)] if name == "without_names" else SHAPES
    # Without names, Horovod makes some up. With rounding to nearest, the result does not depend on them.
    assert_same(results[name], expected(size, shapes))


def test_sum_is_the_average_times_the_world_size(world):
    size, results = world
    assert_same(results["summed"], [size * x for x in expected(size)])


def test_backward_passes_accumulate_before_compression(world):
    size, results = world
    assert_same(results["accumulated"], expected(size, scale=2.0))


def test_process_set(world):
    size, results = world
    members, rest = results["process_set"][:-1], results["process_set"][-1]
    assert_same(members, expected(size - 1, [(64, 64), (300,)]))
    for i, untouched in enumerate(rest):
        assert torch.equal(untouched, gradient(size - 1, *untouched.shape, index=i))


def test_no_compression_equals_stock_horovod(world):
    _, results = world
    for flags in results["lossless_is_stock"]:
        assert all(flags)


def test_float16_averages_do_not_overflow_as_their_sums_do(world):
    size, results = world
    for of_rank in results["large_halves"]:
        for case, ratios in of_rank.items():
            for ratio in ratios:
                assert (ratio / (size if "op" in case else 1) - 1).abs().max() < 4 * 2**-10, case


def test_shapes_dtypes_and_strides_are_kept(world):
    size, results = world
    tensors, buckets, grads = results["odd_tensors"][0], {}, {}
    for index, (name, (first, _, _)) in enumerate(tensors.items()):
        buckets.setdefault(first.dtype, []).append(name)
        grads[name] = [gradient(r, *first.shape, dtype=first.dtype, index=index) for r in range(size)]
    wanted = Expected(gradzip.FFTRange(**FFT), size=size).average(grads, list(buckets.values()))
    for name, (first, strides, parameter_strides) in tensors.items():
        assert strides == parameter_strides
        want = wanted[name]
        assert first.shape == want.shape and first.dtype == want.dtype
        for rank in range(size):
            assert torch.equal(results["odd_tensors"][rank][name][0], first)
        # Uncompressed bfloat16 is sent as float32 and rounded once, not at every addition.
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


def test_hooks_in_a_different_order_on_each_rank(world):
    size, results = world
    grads = gradients(size)
    grads["layer3"][0].zero_()  # rank 0 did not use the parameter
    wanted = Expected(gradzip.FFTRange(**FFT), size=size).average(grads)
    assert_same(results["shuffled_hooks"], list(wanted.values()))


@pytest.mark.parametrize(("size", "spec"), kinds.jobs(SPECS))
def test_methods(jobs, size, spec):
    results = jobs[size]
    reference = Expected(spec, size=size)
    wanted = reference.averages([gradients(size)] * METHOD_STEPS)[-1]
    averages, sent = zip(*of_method(results, spec))
    assert_averages(gradzip.parse(spec), [dict(zip(wanted, of_rank)) for of_rank in averages], wanted)
    nbytes = reference.bytes_sent
    if getattr(reference.compressor, "dtype", None) == torch.bfloat16:  # Horovod cannot average it: sent as float32
        nbytes = 4 * METHOD_STEPS * sum(want.numel() for want in wanted.values())
    # Horovod also all-reduces one number of 4 bytes for each gradient. Segments of a ring differ in size.
    segments = 4 * METHOD_STEPS * size if spec.startswith("gradiveq") else 0
    assert 0 <= max(sent) - nbytes <= 4 * METHOD_STEPS * len(SHAPES) + segments


@pytest.mark.parametrize("spec", PHASES)
def test_methods_with_phases(world, spec):
    """Equal up to rounding, because Horovod adds the samples in an order of its own."""
    size, results = world
    group = gradzip.LocalGroup(gradzip.parse(spec), size)
    for step in range(PHASES[spec]):
        wanted = [
            group.average([gradient(r, *shape, index=10 * step + i) for r in range(size)], f"layer{i}")[0]
            for i, shape in enumerate(SHAPES)
        ]
        per_rank = [result[spec][step] for result in results["phases"]]
        phase = group.compressors[0].phase(group.compressors[0].states["layer2"])
        assert [seen for _, _, seen in per_rank] == [phase] * size
        for averages, _, _ in per_rank:
            for got, first, want in zip(averages, per_rank[0][0], wanted):
                assert torch.equal(got, first)
                assert (got - want).abs().max() <= 1e-4 * want.abs().max()
        # Horovod also all-reduces one number for each gradient.
        sent = [result[spec][step][1] for result in results["phases"]]
        assert max(sent) - group.bytes_sent == 4 * (step + 1) * len(SHAPES)


@pytest.mark.parametrize("spec", RINGS)
def test_one_ring_for_all_gradients(world, spec, one_thread):
    """Equals a LocalGroup with all gradients in one fused routine, in the order of their names."""
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
        per_rank = [result[spec][step] for result in results["rings"]]
        for averages, _ in per_rank:
            for got, first, want in zip(averages, per_rank[0][0], wanted):
                assert torch.equal(got, first)
                if want.dim() == 4:
                    assert torch.equal(got, want)
        if spec == RINGS[0] and step == 5:
            # Coordinates, and a vote for each segment. Horovod all-reduces one number for each gradient, and the
            # uncompressed gradients.
            slices = [-(-torch.Size(CONVOLUTIONS[i]).numel() // 200) for i in (0, 1, 3)]
            on_ring = sum(len(s.bases[0]) * m + min(m, size) for s, m in zip(states, slices))
            uncompressed = 64 * 64 + 300 + len(CONVOLUTIONS)
            assert sum(sent for _, sent in per_rank) == 4 * size * (on_ring + uncompressed)
    # Both layers compress in some step; with different schedules, one samples while the other compresses.
    assert ["compressing", "compressing" if spec == RINGS[0] else "sampling", "compressing"] in phases


def test_ranks_with_different_step_counts_are_refused(world):
    _, results = world
    for text in results["restarted_on_one_rank"]:
        assert text.startswith("RuntimeError: parameter 'layer0': rank 1 has compressed it 0 times, rank 0 5 times;")


def test_process_set_with_scatter_reduce(world):
    size, results = world
    group = gradzip.LocalGroup(gradzip.TopK(theta=0.9, exchange="scatter_reduce"), size - 1)
    wanted = [
        group.average([gradient(r, *shape, index=i) for r in range(size - 1)], f"layer{i}")[0]
        for i, shape in enumerate([(64, 64), (300,)])
    ]
    assert_same(results["process_set_scatter_reduce"][:-1], wanted)


def test_later_rounds_do_not_depend_on_hook_order(world):
    size, results = world
    assert_close_everywhere(results["two_rounds"], expected(size, compressor=PowerIteration()))


def test_non_finite_gradient_in_a_step_of_two_rounds(world):
    size, results = world
    spec = "terngrad"
    # The non-finite step does not count, for any parameter.
    averages = expected(size, NON_FINITE[spec][0], gradzip.parse(spec), steps=2)
    for steps in (result[spec] for result in results["non_finite"]):
        finite = [[bool(x.isfinite().all()) for x in averages] for averages, _ in steps]
        assert finite == [[True, True], [False, False], [True, True]]  # they are one group
        last, states = steps[-1]
        assert [states[f"layer{i}"]["step"] for i in range(2)] == [2, 2]
        assert all(map(torch.equal, last, averages))


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
    for got, sent, dense, on_the_wire in results["feedback_steps"]:
        assert_same([got], averages)
        # Horovod also all-reduces one number for each gradient and step.
        assert sent == group.bytes_sent + 10 * 2 * 4
        assert on_the_wire == pytest.approx(group.bytes_wire + 10 * 2 * 4 * 2 * (size - 1) / size)
        assert dense == 10 * 4 * (64 * 64 + 300)


@pytest.mark.parametrize("case", DECAYED)
def test_weight_decay_has_momentum_next_to_dgc(world, case):
    """Parameters that bypass compression equal those of SGD with momentum on the gradient plus decay."""
    size, results = world
    momenta = (0.0, 0.9) if case in ("compressed", "per layer") else (0.9, 0.9)
    start = {f"layer{i}": gradient(99, *shape, index=i) for i, shape in enumerate([(40, 40), (30,)])}
    reference = MomentumSGD(start, {"layer0": momenta, "layer1": (0.0, 0.0) if case == "per layer" else (0.9, 0.9)})
    factor = {"accumulated": 2, "summed": size}.get(case, 1)
    for step in range(DECAY_STEPS):
        means = {
            name: sum(gradient(r, *p.shape, index=10 * step + i).double() for r in range(size)) / size
            for i, (name, p) in enumerate(start.items())
        }
        if not (case == "loss scaled" and step == OVERFLOWS):
            reference.step({n: factor * mean for n, mean in means.items()}, 0.1, dict(zip(start, DECAYS)))
    for parameters in results["weight_decay"]:
        for got, first, want in zip(parameters[case], results["weight_decay"][0][case], reference.parameters.values()):
            assert torch.equal(got, first)
            torch.testing.assert_close(got.double(), torch.from_numpy(want), rtol=1e-4, atol=1e-4)


def test_weight_decay_with_a_closure(world):
    _, results = world
    reference = MomentumSGD({"p": torch.ones(1)}, {"p": (0.9, 0.9)})
    for _ in range(DECAY_STEPS):
        reference.step({"p": 0.0}, 0.1, {"p": 0.1})
    for parameters, losses in results["closure_with_weight_decay"]:
        assert losses == [1.5] * DECAY_STEPS
        for p in parameters:
            torch.testing.assert_close(p.double(), torch.full_like(p, reference.parameters["p"][0]).double())


def test_non_finite_gradient_of_one_rank(world):
    _, results = world
    for result in results["non_finite"]:
        (first, before), ((big, small), during), (last, after) = result[next(iter(NON_FINITE))]
        # All elements of a compressed tensor are NaN, but one element of an uncompressed one.
        assert not big.isfinite().any() and small[1:].isfinite().all() and not small[0].isfinite()
        assert all(bool(x.isfinite().all()) for x in first + last)
        states = [states["layer0"] for states in (before, during, after)]
        assert [state["step"] for state in states] == [1, 1, 2]
        assert torch.equal(states[0]["residual"], states[1]["residual"])
        assert not torch.equal(states[1]["residual"], states[2]["residual"])


def test_compression_class_is_a_subclass_of_horovods(world):
    _, results = world
    for flags in results["compression_class"]:
        assert all(flags)


def test_errors_before_a_step(world):
    _, results = world
    for messages in results["refused"]:
        assert messages["unknown parameter"].startswith(
            "RuntimeError: a gradient of shape (64, 64) belongs to no parameter"
        )
        assert "gradzip.roundtrip" in messages["no optimizer"]
        assert messages["adasum"].startswith("ValueError: FFTRange with op=Adasum")
        assert messages["exempt"].startswith(
            "ValueError: compression: got exemptions of all parameters that the method"
        )
        error, norm = messages["weight decay"]
        assert (
            error.startswith("ValueError: SGD: got weight_decay = 0.5 for a parameter to which DGC applies")
            and norm == 0
        )


def test_different_configurations_raise_in_the_first_step(world):
    size, results = world
    last, same = f"rank {size - 1}", "give all ranks the same method and the same arguments"
    expected = {
        "arguments": (f"{last} compresses with FFTRange(", "theta=0.9", ", rank 0 with FFTRange(", "theta=0.5", same),
        "methods": (f"{last} compresses with TopK(", ", rank 0 with ACPSGD(", same),
        "shapes": (f"parameter 'layer1': {last} has float32[65, 64], rank 0 has float32[64, 64]; build the same",),
        "parameters": (f"parameter 'layer2': {last} has float32[64, 64], rank 0 has no such parameter",),
        "versions": (f"{last} runs gradzip 9.9, rank 0 gradzip {gradzip.__version__}; install the same version",),
    }
    for messages in results["different_configurations"]:
        for kind, parts in expected.items():
            assert messages[kind].startswith("RuntimeError: ")
            for part in parts:
                assert part in messages[kind]


def test_single_process(tmp_path):
    job = horovodrun(1, "horovod_worker.py", tmp_path, "average")
    assert job.returncode == 0, job.stderr
    averages = torch.load(tmp_path / "0.pt", weights_only=True)["average"]
    for i, (got, shape) in enumerate(zip(averages, SHAPES)):
        assert torch.equal(got, gradient(0, *shape, index=i))  # Horovod calls no compression in a world of one

"""DDP's options and the habits of training mean what they mean without compression, with every registered method:
against the same method in LocalGroups, which know no DDP."""

import pytest
import torch
import torch.distributed as dist

import gradzip
from contract import AMP_SCALES, OVERFLOWS, SPECS, STEPS, TIMEOUT, assert_equal_states, each, gradient
from launch import scenarios, torchrun

if not dist.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)
from ddp_contract_worker import SECOND, SHAPES

SIZE = 2
GOOD = [step for step in range(len(AMP_SCALES)) if step != OVERFLOWS]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contract")
    return scenarios(SIZE, "ddp_contract_worker.py", folder, run=torchrun, timeout=TIMEOUT)


class Expected:
    """What a method makes of gradients in DDP's buckets: LocalGroups, one for each parameter, or for those of a bucket
    that a flat method sees as one vector. When others are together than before, every parameter takes along what was
    left of it, in plain torch."""

    def __init__(self, spec, prefix=""):
        self.spec, self.prefix, self.step = spec, prefix, 0
        self.groups = {}  # by names

    def averages(self, steps, buckets, anew=()):
        """Of all steps; anew: before which of them all are taken apart, as a checkpoint does it."""
        assert len(steps) == len(buckets)
        return [self.average(grads, of_step, i in anew) for i, (grads, of_step) in enumerate(zip(steps, buckets))]

    def average(self, grads, buckets, anew=False):
        units = [unit for bucket in buckets for unit in self.units(bucket, grads)]
        left = [{} for _ in range(SIZE)]
        for unit in [u for u in self.groups if u not in units or (anew and len(u) > 1)]:
            for rank, parts in enumerate(self.take_apart(unit, grads)):
                left[rank] |= parts
        averages = {}
        for unit in units:
            if unit not in self.groups:
                self.groups[unit] = self.group(unit, left, grads)
            of_ranks = [grads[unit[0]][r] for r in range(SIZE)]
            if len(unit) > 1:
                of_ranks = [torch.cat([grads[name][r].reshape(-1) for name in unit]).view(1, -1) for r in range(SIZE)]
            average = self.groups[unit].average(of_ranks, self.name(unit))[0]
            parts = average.view(-1).split([grads[name][0].numel() for name in unit])
            averages |= {name: part.view(grads[name][0].shape) for name, part in zip(unit, parts)}
        self.step += 1
        return averages

    def units(self, bucket, grads):
        """Names that are averaged together."""
        units = {}
        compressor = gradzip.parse(self.spec)
        for name in bucket:
            part = compressor.method_for(name, grads[name][0].shape)
            flat = part.per_bucket and not part.bypasses(grads[name][0])
            units.setdefault(id(part) if flat else name, []).append(name)
        return [tuple(names) for names in units.values()]

    def name(self, unit):
        first, *others = (self.prefix + name for name in unit)
        return f"{first} and {len(others)} more" if others else first

    def group(self, unit, left, grads):
        """One that goes on from what is left of these parameters, if anything."""
        method = gradzip.parse(self.spec).method_for(unit[0], grads[unit[0]][0].shape)  # rules see no prefix
        group = gradzip.LocalGroup(method, SIZE)
        if unit[0] in left[0]:
            for rank, compressor in enumerate(group.compressors):
                parts = [left[rank][name] for name in unit]
                residual = torch.cat([p.reshape(-1) for p in parts]).view(1, -1) if len(unit) > 1 else parts[0]
                state = {"step": self.step, "rank": rank, "size": SIZE, "residual": residual}
                compressor.load_state_dict({"method": type(compressor).__name__, "states": {self.name(unit): state}})
        return group

    def take_apart(self, unit, grads):
        """{name: what each rank has not sent}, with what it owes as the owner of a shard of the average."""
        numels = [grads[name][0].numel() for name in unit]
        for rank, compressor in enumerate(self.groups.pop(unit).compressors):
            (state,) = compressor.states.values()
            residual = state.residual.view(-1).clone()
            if (owed := getattr(state, "owner_residual", None)) is not None:
                residual.tensor_split(SIZE)[rank].add_(owed.view(-1), alpha=SIZE)
            parts = residual.split(numels)
            yield {name: part.view(grads[name][0].shape) for name, part in zip(unit, parts)}


def expected(spec, gradients, buckets, prefix="", anew=()):
    return Expected(spec, prefix).averages(gradients, buckets, anew)


def of_shapes(name, rank, step, shapes=SHAPES):
    return gradient(name, rank, step, shapes[name])


def assert_same(of_ranks, wanted):
    """(averages of each step, ...) of all ranks have the wanted bits: a sum of two has them in either order."""
    for averages, *_ in of_ranks:
        for got, want in zip(averages, wanted, strict=True):
            assert got.keys() == want.keys()
            for name in want:
                assert got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]), name


def buckets_of(of_ranks):
    (first, *others) = (buckets for _, buckets, *_ in of_ranks)
    assert all(buckets == first for buckets in others)
    return first


every_method = pytest.mark.parametrize("spec", SPECS)


@pytest.fixture(autouse=True)
def _as_under_torchrun(one_thread):
    pass


@every_method
def test_averages_over_rebuilt_buckets(results, spec):
    of_ranks = [r[spec][0] for r in results["checkpointed"]]
    buckets = buckets_of(of_ranks)
    assert [len(step) for step in buckets] == [1] + [2] * 9
    assert_same(of_ranks, expected(spec, each(range(10), of_shapes, SHAPES), buckets))


@every_method
@pytest.mark.parametrize("how", [1, 2], ids=["of_each_rank", "merged"])
def test_ten_steps_are_five_a_file_and_five(results, spec, how):
    straight, of_ranks = ([r[spec][i] for r in results["checkpointed"]] for i in (0, how))
    buckets = buckets_of(of_ranks)
    assert [len(step) for step in buckets] == [1, 2, 2, 2, 2] * 2
    wanted = expected(spec, each(range(10), of_shapes, SHAPES), buckets, anew=[5])
    assert_same(of_ranks, wanted)
    flat = any(len(unit) > 1 for step in buckets for bucket in step for unit in units_of(spec, bucket))
    if not flat:  # they see other vectors in the first step of a new DDP model
        assert_same(straight, wanted)


def units_of(spec, bucket):
    return Expected(spec).units(bucket, each([0], of_shapes, SHAPES)[0])


@every_method
@pytest.mark.parametrize("which", [0, 1], ids=["bfloat16", "float16"])
def test_parameters_of_16_bits(results, spec, which):
    of_ranks = [r[spec][which] for r in results["in_half_precision"]]
    dtype = [torch.bfloat16, torch.float16][which]
    gradients = each(range(STEPS), lambda *key: of_shapes(*key).to(dtype), SHAPES)
    assert_same(of_ranks, expected(spec, gradients, buckets_of(of_ranks)))


@every_method
def test_no_sync_accumulates_before_compression(results, spec):
    of_ranks = [r[spec] for r in results["accumulated"]]
    gradients = each(range(STEPS), lambda n, r, s: of_shapes(n, r, 2 * s) + of_shapes(n, r, 2 * s + 1), SHAPES)
    assert_same(of_ranks, expected(spec, gradients, buckets_of(of_ranks)))


@every_method
def test_clipping_after_backward(results, spec):
    of_ranks = [r[spec] for r in results["clipped"]]
    wanted = expected(spec, each([0], of_shapes, SHAPES), buckets_of(of_ranks))
    assert_same(of_ranks, wanted)
    total = torch.stack([a.norm() for a in wanted[0].values()]).norm()
    for _, _, norm, after in of_ranks:
        torch.testing.assert_close(norm, total, rtol=1e-5, atol=0)
        for name, average in wanted[0].items():
            torch.testing.assert_close(after[name], -0.5 * average / total, rtol=1e-4, atol=1e-7)


@every_method
def test_two_models_with_equal_names(results, spec):
    first, second = ([r[spec][i] for r in results["two_models"]] for i in range(2))
    assert_same(first, expected(spec, each(range(STEPS), of_shapes, SHAPES), buckets_of(first)))
    gradients = each(range(100, 100 + STEPS), lambda *key: of_shapes(*key, SECOND), SECOND)
    assert_same(second, expected(spec, gradients, buckets_of(second), prefix="model1."))


@every_method
@pytest.mark.parametrize("which", [0, 1], ids=["another_state", "the_same_state"])
def test_a_model_wrapped_anew_finds_what_was_kept(results, spec, which):
    of_ranks = [r[spec][which] for r in results["wrapped_anew"]]
    buckets = buckets_of(of_ranks)
    assert [len(step) for step in buckets] == [1, 2, 1, 2]
    assert_same(of_ranks, expected(spec, each(range(4), of_shapes, SHAPES), buckets))


@every_method
def test_autocast_around_the_backward_pass_changes_nothing(results, spec):
    of_ranks = [r[spec] for r in results["backward_within_autocast"]]
    assert_same(of_ranks, expected(spec, each(range(STEPS), of_shapes, SHAPES), buckets_of(of_ranks)))


def assert_skipped(spec, of_ranks, gradients):
    """The overflow on one rank: the step is nobody's, and the others are as if it had not been. gradients: of those."""
    buckets = [of_rank[2] for of_rank in of_ranks]
    assert buckets[0] == buckets[1] and len(buckets[0][-1]) == 2
    wanted = expected_of_good(spec, gradients, [buckets[0][step] for step in GOOD])
    assert_same([([averages[step] for step in GOOD],) for _, averages, *_ in of_ranks], wanted)
    before, after = OVERFLOWS - 1, OVERFLOWS
    for scales, averages, _, parameters, states in of_ranks:
        assert scales == AMP_SCALES
        assert not all(bool(a.isfinite().all()) for a in averages[OVERFLOWS].values())
        assert_equal_states(states[after], states[before])
        for name in parameters[0]:
            assert torch.equal(parameters[after][name], parameters[before][name])
            assert not torch.equal(parameters[-1][name], parameters[after][name])
            assert torch.equal(parameters[-1][name], of_ranks[0][3][-1][name])


def expected_of_good(spec, gradients, buckets):
    """The averages of the steps that are not skipped, from gradients without a loss scale."""
    if spec == "fp16":  # which is about magnitudes: what is cast is what comes
        scaled = [
            {name: [g * AMP_SCALES[step] for g in grads] for name, grads in of_step.items()}
            for step, of_step in zip(GOOD, gradients, strict=True)
        ]
        averages = expected(spec, scaled, buckets)
        return [{n: a / AMP_SCALES[step] for n, a in of_step.items()} for step, of_step in zip(GOOD, averages)]
    return expected(spec, gradients, buckets)


@every_method
@pytest.mark.parametrize("which", [0, 1], ids=["float32", "bfloat16"])
def test_an_overflow_on_one_rank_skips_the_step_and_changes_no_state(results, spec, which):
    of_ranks = [r[spec][which] for r in results["loss_scaled"]]
    dtype = [torch.float32, torch.bfloat16][which]
    assert_skipped(spec, of_ranks, each(GOOD, lambda *key: of_shapes(*key).to(dtype), SHAPES))


@every_method
@pytest.mark.parametrize("which", [0, 1], ids=["float16", "bfloat16"])
def test_autocast_with_a_loss_scale(results, spec, which):
    own, of_ranks = zip(*[r[spec][which] for r in results["autocast"]])
    overflowing = [not all(bool(g.isfinite().all()) for g in of_rank[OVERFLOWS].values()) for of_rank in own]
    assert overflowing == [False, True]
    gradients = [{name: [of_rank[step][name] for of_rank in own] for name in own[0][0]} for step in GOOD]
    assert any(not torch.equal(*grads) for grads in gradients[0].values())
    assert_skipped(spec, of_ranks, gradients)

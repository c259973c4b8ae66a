"""DDP's options and common training practices behave as without compression, with methods of every kind.

Results are compared with those of the same method in LocalGroups, without DDP.
"""

import pytest
import torch
import torch.distributed as dist

import kinds
from contract import (
    AMP_SCALES,
    OVERFLOWS,
    STEPS,
    TIMEOUT,
    Expected,
    assert_equal_states,
    each,
    expected_of_scaled,
    gradient,
)
from gradzip.methods.low_rank import LowRank
from launch import Jobs, scenarios, torchrun

if not dist.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)
from ddp_contract_worker import SECOND_SHAPES, SHAPES

SIZE = 2
SPECS = kinds.shared(1)
DEFAULT = kinds.SAMPLE[1::2]  # test_contract.py has the others
FINITE_STEPS = [step for step in range(len(AMP_SCALES)) if step != OVERFLOWS]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    def run(specs):
        folder = tmp_path_factory.mktemp("contract")
        return scenarios(SIZE, "ddp_contract_worker.py", folder, *specs, run=torchrun, timeout=TIMEOUT)

    return Jobs(run, kinds.batches(SPECS, DEFAULT))


def expected(spec, gradients, buckets, prefix=""):
    return Expected(spec, prefix).averages(gradients, buckets)


def gradient_of(name, rank, step, shapes=SHAPES):
    return gradient(name, rank, step, shapes[name])


def assert_same(per_rank, wanted):
    """Assert that the averages of each step have the wanted bits. A sum of two does not depend on the order."""
    for averages, *_ in per_rank:
        for got, want in zip(averages, wanted, strict=True):
            assert got.keys() == want.keys()
            for name in want:
                assert got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]), name


def common_buckets(per_rank):
    (first, *others) = (buckets for _, buckets, *_ in per_rank)
    assert all(buckets == first for buckets in others)
    return first


every_method = pytest.mark.parametrize("spec", kinds.params(SPECS, DEFAULT))


@pytest.fixture(autouse=True)
def _as_under_torchrun(one_thread):
    pass


@every_method
def test_averages_over_rebuilt_buckets(results, spec):
    per_rank = [r["checkpointed"][0] for r in results[spec]]
    buckets = common_buckets(per_rank)
    assert [len(step) for step in buckets] == [1] + [2] * 9
    assert_same(per_rank, expected(spec, each(range(10), gradient_of, SHAPES), buckets))


@every_method
@pytest.mark.parametrize("how", [1, 2], ids=["of_each_rank", "merged"])
def test_ten_steps_equal_five_a_checkpoint_and_five(results, spec, how):
    straight, per_rank = ([r["checkpointed"][i] for r in results[spec]] for i in (0, how))
    buckets = common_buckets(per_rank)
    assert [len(step) for step in buckets] == [1, 2, 2, 2, 2] * 2
    wanted = expected(spec, each(range(10), gradient_of, SHAPES), buckets)
    assert_same(per_rank, wanted)
    # Most methods see other groups in the first step of a new DDP model: other vectors, or other random numbers.
    if not any(depends_on_group(spec, bucket) for step in buckets for bucket in step):
        assert_same(straight, wanted)


def depends_on_group(spec, bucket):
    reference = Expected(spec)
    reference.shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    methods = [reference.method(unit) for unit in reference.units(bucket) if len(unit) > 1]
    return any(not isinstance(method, LowRank) for method in methods)


@every_method
@pytest.mark.parametrize("which", [0, 1], ids=["bfloat16", "float16"])
def test_parameters_of_16_bits(results, spec, which):
    per_rank = [r["half_precision"][which] for r in results[spec]]
    dtype = [torch.bfloat16, torch.float16][which]
    gradients = each(range(STEPS), lambda *key: gradient_of(*key).to(dtype), SHAPES)
    assert_same(per_rank, expected(spec, gradients, common_buckets(per_rank)))


@every_method
def test_no_sync_accumulates_before_compression(results, spec):
    per_rank = [r["accumulated"] for r in results[spec]]
    gradients = each(range(STEPS), lambda n, r, s: gradient_of(n, r, 2 * s) + gradient_of(n, r, 2 * s + 1), SHAPES)
    assert_same(per_rank, expected(spec, gradients, common_buckets(per_rank)))


@every_method
def test_clipping_after_backward(results, spec):
    per_rank = [r["clipped"] for r in results[spec]]
    wanted = expected(spec, each([0], gradient_of, SHAPES), common_buckets(per_rank))
    assert_same(per_rank, wanted)
    total = torch.stack([a.norm() for a in wanted[0].values()]).norm()
    for _, _, norm, after in per_rank:
        torch.testing.assert_close(norm, total, rtol=1e-5, atol=0)
        for name, average in wanted[0].items():
            torch.testing.assert_close(after[name], -0.5 * average / total, rtol=1e-4, atol=1e-7)


@every_method
def test_two_models_with_equal_names(results, spec):
    first, second = ([r["two_models"][i] for r in results[spec]] for i in range(2))
    assert_same(first, expected(spec, each(range(STEPS), gradient_of, SHAPES), common_buckets(first)))
    gradients = each(range(100, 100 + STEPS), lambda *key: gradient_of(*key, SECOND_SHAPES), SECOND_SHAPES)
    assert_same(second, expected(spec, gradients, common_buckets(second), prefix="model1."))


@every_method
def test_nothing_comes_back_of_averages_that_are_announced_to_be_thrown_away(results, spec):
    per_rank = [r["discarded"] for r in results[spec]]
    assert_same(per_rank, expected(spec, each(range(STEPS), gradient_of, SHAPES), common_buckets(per_rank)))


@every_method
@pytest.mark.parametrize("which", [0, 1], ids=["another_state", "the_same_state"])
def test_rewrapped_model_finds_its_state(results, spec, which):
    per_rank = [r["rewrapped"][which] for r in results[spec]]
    buckets = common_buckets(per_rank)
    assert [len(step) for step in buckets] == [1, 2, 1, 2]
    assert_same(per_rank, expected(spec, each(range(4), gradient_of, SHAPES), buckets))


@every_method
def test_autocast_around_the_backward_pass_changes_nothing(results, spec):
    per_rank = [r["backward_within_autocast"] for r in results[spec]]
    assert_same(per_rank, expected(spec, each(range(STEPS), gradient_of, SHAPES), common_buckets(per_rank)))


def assert_skipped(spec, per_rank, gradients):
    """Assert that all ranks skip the step with an overflow, and that it does not affect the other steps.

    Args:
        gradients: gradients of the other steps.
    """
    buckets = [of_rank[2] for of_rank in per_rank]
    assert buckets[0] == buckets[1] and len(buckets[0][-1]) == 2
    scales = [AMP_SCALES[step] for step in FINITE_STEPS]
    wanted = expected_of_scaled(spec, gradients, scales, [buckets[0][step] for step in FINITE_STEPS])
    assert_same([([averages[step] for step in FINITE_STEPS],) for _, averages, *_ in per_rank], wanted)
    previous, skipped = OVERFLOWS - 1, OVERFLOWS
    for scales, averages, _, parameters, states in per_rank:
        assert scales == AMP_SCALES
        assert not all(bool(a.isfinite().all()) for a in averages[OVERFLOWS].values())
        assert_equal_states(states[skipped], states[previous])
        for name in parameters[0]:
            assert torch.equal(parameters[skipped][name], parameters[previous][name])
            assert not torch.equal(parameters[-1][name], parameters[skipped][name])
            assert torch.equal(parameters[-1][name], per_rank[0][3][-1][name])


@every_method
@pytest.mark.parametrize("which", [0, 1], ids=["float32", "bfloat16"])
def test_overflow_on_one_rank_skips_the_step_and_changes_no_state(results, spec, which):
    per_rank = [r["loss_scaled"][which] for r in results[spec]]
    dtype = [torch.float32, torch.bfloat16][which]
    assert_skipped(spec, per_rank, each(FINITE_STEPS, lambda *key: gradient_of(*key).to(dtype), SHAPES))


@every_method
@pytest.mark.parametrize("which", [0, 1], ids=["float16", "bfloat16"])
def test_autocast_with_a_loss_scale(results, spec, which):
    own_gradients, per_rank = zip(*[r["autocast"][which] for r in results[spec]])
    overflowing = [not all(bool(g.isfinite().all()) for g in of_rank[OVERFLOWS].values()) for of_rank in own_gradients]
    assert overflowing == [False, True]
    gradients = [
        {name: [of_rank[step][name] for of_rank in own_gradients] for name in own_gradients[0][0]}
        for step in FINITE_STEPS
    ]
    assert any(not torch.equal(*grads) for grads in gradients[0].values())
    assert_skipped(spec, per_rank, gradients)

"""Horovod's options and common training practices behave as without compression, with methods of every kind.

Results are compared with those of the same method in LocalGroups, without Horovod. All gradients are in one bucket.
"""

import pytest
import torch

import gradzip
import kinds
from contract import (
    AMP_SCALES,
    OVERFLOWS,
    SHAPES,
    STEPS,
    TIMEOUT,
    Expected,
    assert_averages,
    assert_equal_states,
    each,
    expected,
    expected_of_scaled,
    gradient,
)
from launch import Jobs, scenarios

pytest.importorskip("horovod.torch")
from contract_worker import HOROVOD_NAMES, table_gradient

SIZE = 2
SPECS = kinds.shared(0)
DEFAULT = kinds.SAMPLE[0::2]  # test_ddp_contract.py has the others


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    def run(specs):
        return scenarios(SIZE, "contract_worker.py", tmp_path_factory.mktemp("contract"), *specs, timeout=TIMEOUT)

    return Jobs(run, kinds.batches(SPECS, DEFAULT))


def assert_same(spec, per_rank, wanted):
    assert_averages(gradzip.parse(spec), per_rank, wanted)


every_method = pytest.mark.parametrize("spec", kinds.params(SPECS, DEFAULT))


@every_method
@pytest.mark.parametrize(
    "name",
    [
        "average_op",
        "discarded",
        "written",
        "predivided",
        "number_of_groups",
        "listed_groups",
        "backward_in_threads",
        "loaded_on_one_rank",
        "step_dropped",
        "deep_copied",
    ],
)
def test_averages_equal_those_without_horovod(results, spec, name):
    assert_same(spec, [r[name] for r in results[spec]], expected(spec, each(range(STEPS), gradient)))


@every_method
def test_sum_is_the_average_times_the_number_of_ranks(results, spec):
    wanted = expected(spec, each(range(STEPS), gradient))
    assert_same(spec, [r["sum_op"] for r in results[spec]], {name: SIZE * x for name, x in wanted.items()})


@every_method
def test_backward_passes_accumulate_before_compression(results, spec):
    gradients = each(range(STEPS), lambda n, r, s: gradient(n, r, 2 * s) + gradient(n, r, 2 * s + 1))
    assert_same(spec, [r["accumulated"] for r in results[spec]], expected(spec, gradients))


@every_method
def test_step_before_all_backward_passes(results, spec):
    accumulated = lambda n, r, s: gradient(n, r, 1) + gradient(n, r, 2) if s else gradient(n, r, 0)  # noqa: E731
    assert_same(spec, [r["early_step"] for r in results[spec]], expected(spec, each(range(2), accumulated)))


@every_method
def test_closure(results, spec):
    """Before it calls the closure, Horovod synchronizes gradients that no rank has computed: first, zeros."""
    zero_gradient = lambda n, r, s: torch.zeros(SHAPES[n])  # noqa: E731
    wanted = expected(spec, [*each([0], zero_gradient), *each(range(2), gradient)])
    assert_same(spec, [r["closure_step"] for r in results[spec]], wanted)


@every_method
def test_a_pass_changes_nothing_of_parameters_that_no_rank_uses(results, spec):
    for found, moved, found_again in (r["unused_with_a_gradient"] for r in results[spec]):
        assert found == [] and moved and found_again == []


@every_method
def test_averages_are_written_into_the_gradients_memory(results, spec):
    per_rank = [r["gradients_in_one_buffer"] for r in results[spec]]
    assert_same(spec, [averages for averages, _ in per_rank], expected(spec, each(range(STEPS), gradient)))
    assert all(same for _, same in per_rank)


@every_method
def test_state_of_deleted_parameters_is_freed(results, spec):
    for counts in (r["recreated_models"] for r in results[spec]):
        assert len(set(counts)) == 1 and counts[0] <= len(SHAPES)


@every_method
def test_horovods_own_errors(results, spec):
    for got, (messages, after) in (r["misuse"] for r in results[spec]):
        assert all(text.startswith("AssertionError: ") for text in messages)
        assert got[0] == messages
        assert got[1].keys() == after.keys()


@every_method
def test_a_class_is_refused_in_the_backward_pass(results, spec):
    for error in (r["class_as_compressor"] for r in results[spec]):
        assert error.startswith("TypeError: compression: got a class, expected an instance of it")


@every_method
def test_horovods_names_are_used_without_names(results, spec):
    gradients = [dict(zip(HOROVOD_NAMES, step.values())) for step in each(range(STEPS), gradient)]
    per_rank = [dict(zip(HOROVOD_NAMES, r["no_names"].values())) for r in results[spec]]
    assert_same(spec, per_rank, expected(spec, gradients))


@every_method
def test_process_set(results, spec):
    (first, other) = (r["process_set"] for r in results[spec])
    assert_same(spec, [first], expected(spec, first_rank_only(range(STEPS)), prefix="process_set1."))
    for name, untouched in other.items():
        assert torch.equal(untouched, gradient(name, 1, STEPS - 1))


def first_rank_only(steps):
    """Return rank 0's gradients, as those of a group of one rank."""
    return [{name: grads[:1] for name, grads in step.items()} for step in each(steps, gradient)]


@every_method
def test_two_process_sets_share_a_compressor(results, spec):
    ((own, first), (_, other)) = (r["two_process_sets"] for r in results[spec])
    assert_same(spec, [own], expected(spec, first_rank_only(range(STEPS)), prefix="process_set1."))
    assert_same(spec, [first, other], expected(spec, each(range(100, 100 + STEPS), gradient)))


@every_method
def test_parameters_unused_on_one_rank(results, spec):
    unused = lambda n, r, s: gradient(n, r, s) * (0.0 if (n, r) == ("w", 0) else 1.0)  # noqa: E731
    assert_same(spec, [r["unused_on_one_rank"] for r in results[spec]], expected(spec, each(range(STEPS), unused)))


@every_method
def test_freezing_parameters_keeps_their_state(results, spec):
    per_rank = [r["frozen_in_one_step"] for r in results[spec]]
    steps = [{n: g for n, g in step.items() if s != 1 or n == "v"} for s, step in enumerate(each(range(3), gradient))]
    wanted = {}
    for averages in Expected(spec).averages(steps):
        wanted |= averages
    assert_same(spec, [averages for _, averages in per_rank], wanted)
    for after, _ in per_rank:
        for name in SHAPES:
            assert torch.equal(after[0][name], after[1][name]) == (name != "v"), name
            # A method that sends a few elements of a bucket may send none of a parameter.
            assert torch.equal(after[1][name], after[2][name]) == (not wanted[name].any()), name


@every_method
def test_clipping_between_synchronize_and_step(results, spec):
    per_rank = [r["clipped"] for r in results[spec]]
    averages = expected(spec, each(range(1), gradient))
    norm = torch.stack([a.norm() for a in averages.values()]).norm()
    for got_norm, after in per_rank:
        torch.testing.assert_close(got_norm, norm, rtol=1e-4, atol=0)
        for name, average in averages.items():
            torch.testing.assert_close(after[name], -0.5 * average / norm, rtol=1e-3, atol=1e-6)


@every_method
def test_two_optimizers_with_equal_names(results, spec):
    per_rank = [r["two_optimizers"] for r in results[spec]]
    assert_same(spec, [first for first, _ in per_rank], expected(spec, each(range(STEPS), gradient)))
    shapes = {"w": (50, 60), "v": SHAPES["v"]}
    second = each(range(100, 100 + STEPS), lambda n, r, s: gradient(n, r, s, shapes[n]), shapes)
    assert_same(spec, [second for _, second in per_rank], expected(spec, second, prefix="optimizer1."))


@every_method
def test_recreated_optimizer_finds_the_state(results, spec):
    wanted = expected(spec, each(range(STEPS), gradient))
    assert_same(spec, [r["recreated_optimizer"] for r in results[spec]], wanted)


@every_method
def test_sparse_gradients(results, spec):
    def dense(name, rank, step):
        if name != "table":
            return gradient(name, rank, step)
        indices, factors = table_gradient(rank, step)
        return torch.zeros(200, 16).index_add_(0, indices, factors)

    gradients = each(range(STEPS), dense, ["table", "w"])
    wanted = expected(spec, gradients)
    per_rank = [r["sparse"] for r in results[spec]]
    assert_same(spec, [as_dense[0] for as_dense, _ in per_rank], wanted)
    table = sum(gradients[-1]["table"]) / SIZE
    for (_, sparse, nbytes), (averages, still_sparse, fewer_nbytes) in per_rank:
        assert sparse and still_sparse
        # Horovod gathers sparse gradients itself, without compression.
        torch.testing.assert_close(averages["table"], table)
        assert (nbytes, fewer_nbytes) == (4 * STEPS * (200 * 16 + 64 * 48), 4 * STEPS * 64 * 48)
    alone = expected(spec, [{"w": of_step["w"]} for of_step in gradients])  # the table is in no bucket
    assert_same(spec, [{"w": averages["w"]} for _, (averages, *_) in per_rank], alone)


@every_method
def test_overflow_on_one_rank_skips_the_step_and_changes_no_state(results, spec):
    finite_steps = [step for step in range(len(AMP_SCALES)) if step != OVERFLOWS]
    scales = [AMP_SCALES[step] for step in finite_steps]
    *_, wanted = expected_of_scaled(spec, each(finite_steps, gradient), scales)
    per_rank = [r["loss_scaled"] for r in results[spec]]
    for scales, after, states, averages in per_rank:
        assert scales == AMP_SCALES
        for name in SHAPES:
            assert torch.equal(after[OVERFLOWS][name], after[OVERFLOWS - 1][name])
            assert torch.equal(after[-1][name], per_rank[0][1][-1][name])
            # Scales are powers of two, so only library routines (FFT, SVD) may round differently.
            torch.testing.assert_close(averages[name], wanted[name], rtol=1e-3, atol=1e-5)
        assert_equal_states(states[OVERFLOWS], states[OVERFLOWS - 1])


@every_method
def test_autocast(results, spec):
    per_rank = [r["autocast"] for r in results[spec]]
    gradients = [{name: [own[step][name] for own, _ in per_rank] for name in per_rank[0][1]} for step in range(STEPS)]
    assert any(not torch.equal(*grads) for grads in gradients[0].values())
    assert_same(spec, [averages for _, averages in per_rank], expected(spec, gradients))

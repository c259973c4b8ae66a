"""Horovod's options and the habits of training mean what they mean without compression, with every registered method:
against the same method in a LocalGroup, which knows no Horovod."""

import pytest
import torch

import gradzip
from contract import AMP_SCALES, OVERFLOWS, SHAPES, SPECS, STEPS, TIMEOUT, assert_equal_states, each, expected, gradient
from gradzip.gather import GatherCompressor
from launch import scenarios

pytest.importorskip("horovod.torch")
from contract_worker import NAMELESS, table_gradient

SIZE = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return scenarios(SIZE, "contract_worker.py", tmp_path_factory.mktemp("contract"), timeout=TIMEOUT)


def assert_same(spec, of_ranks, wanted):
    """Ranks have the same bits: the wanted ones, but for rounding where Horovod adds up in an order of its own."""
    for got in of_ranks:
        assert got.keys() == wanted.keys()
        for name, want in wanted.items():
            assert torch.equal(got[name], of_ranks[0][name]), name
            part = gradzip.parse(spec).method_for(name, want.shape)
            if isinstance(part, GatherCompressor) and not part.bypasses(want):
                assert torch.equal(got[name], want), name
            elif isinstance(part, gradzip.Cast):  # one rounding to 11 bits more or less
                torch.testing.assert_close(got[name], want, rtol=2**-10, atol=2**-20)
            else:
                torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-6)


every_method = pytest.mark.parametrize("spec", SPECS)


@every_method
@pytest.mark.parametrize(
    "name",
    [
        "averaged",
        "predivided",
        "in_groups",
        "in_listed_groups",
        "a_thread_for_each_device",
        "loaded_on_one_rank",
        "dropped_in_mid_step",
        "copied",
    ],
)
def test_what_changes_nothing(results, spec, name):
    assert_same(spec, [r[spec] for r in results[name]], expected(spec, each(range(STEPS), gradient)))


@every_method
def test_sum_is_the_average_times_the_number_of_ranks(results, spec):
    wanted = expected(spec, each(range(STEPS), gradient))
    assert_same(spec, [r[spec] for r in results["summed"]], {name: SIZE * x for name, x in wanted.items()})


@every_method
def test_backward_passes_accumulate_before_compression(results, spec):
    gradients = each(range(STEPS), lambda n, r, s: gradient(n, r, 2 * s) + gradient(n, r, 2 * s + 1))
    assert_same(spec, [r[spec] for r in results["accumulated"]], expected(spec, gradients))


@every_method
def test_a_step_before_all_backward_passes(results, spec):
    both = lambda n, r, s: gradient(n, r, 1) + gradient(n, r, 2) if s else gradient(n, r, 0)  # noqa: E731
    assert_same(spec, [r[spec] for r in results["stepped_early"]], expected(spec, each(range(2), both)))


@every_method
def test_a_closure(results, spec):
    """Horovod averages what there is before it calls the closure: zeros, and then the last averages."""
    group, zeros = gradzip.LocalGroup(gradzip.parse(spec), SIZE), lambda n, r, s: torch.zeros(SHAPES[n])
    before = each([0], zeros)[0]
    for step in each(range(2), gradient):
        for grads in (before, step):
            averages = {n: group.average([g.clone() for g in of_ranks], n)[0] for n, of_ranks in grads.items()}
        before = {name: [average] * SIZE for name, average in averages.items()}
    assert_same(spec, [r[spec] for r in results["in_a_closure"]], averages)


@every_method
def test_averages_are_where_the_gradients_were(results, spec):
    of_ranks = [r[spec] for r in results["in_one_buffer"]]
    assert_same(spec, [averages for averages, _ in of_ranks], expected(spec, each(range(STEPS), gradient)))
    assert all(same for _, same in of_ranks)


@every_method
def test_what_is_kept_of_parameters_goes_with_them(results, spec):
    for kept in (r[spec] for r in results["one_after_the_other"]):
        assert len(set(kept)) == 1 and kept[0] <= len(SHAPES)


@every_method
def test_horovods_own_complaints(results, spec):
    for got, (messages, after) in zip(results["misused"], results["stock_misused"]):
        assert all(text.startswith("AssertionError: ") for text in messages)
        assert got[spec][0] == messages
        assert got[spec][1].keys() == after.keys()


@every_method
def test_what_can_not_be_compressed_is_refused_in_the_backward_pass(results, spec):
    for of_class, of_complex in (r[spec] for r in results["refused"]):
        assert of_class.startswith("TypeError: compression: got a class, expected an instance of it")
        assert (
            of_complex
            == "ValueError: gradient of 'z': got torch.strided torch.complex64, expected a dense float tensor"
        )


@every_method
def test_without_names_they_are_horovods(results, spec):
    gradients = [dict(zip(NAMELESS, step.values())) for step in each(range(STEPS), gradient)]
    of_ranks = [dict(zip(NAMELESS, r[spec].values())) for r in results["nameless"]]
    assert_same(spec, of_ranks, expected(spec, gradients))


@every_method
def test_a_process_set_is_a_group_of_its_own(results, spec):
    (first, other) = (r[spec] for r in results["in_a_process_set"])
    assert_same(spec, [first], expected(spec, alone(range(STEPS)), prefix="process_set1."))
    for name, untouched in other.items():
        assert torch.equal(untouched, gradient(name, 1, STEPS - 1))


def alone(steps):
    """Rank 0's gradients, without the others."""
    return [{name: grads[:1] for name, grads in step.items()} for step in each(steps, gradient)]


@every_method
def test_two_process_sets_share_a_compressor(results, spec):
    ((own, first), (_, other)) = (r[spec] for r in results["two_process_sets"])
    assert_same(spec, [own], expected(spec, alone(range(STEPS)), prefix="process_set1."))
    assert_same(spec, [first, other], expected(spec, each(range(100, 100 + STEPS), gradient)))


@every_method
def test_parameters_that_one_rank_does_not_use(results, spec):
    unused = lambda n, r, s: gradient(n, r, s) * (0.0 if (n, r) == ("w", 0) else 1.0)  # noqa: E731
    assert_same(spec, [r[spec] for r in results["unused_on_one_rank"]], expected(spec, each(range(STEPS), unused)))


@every_method
def test_frozen_parameters_stay_and_go_on_as_if_they_had_never_been(results, spec):
    of_ranks = [r[spec] for r in results["frozen_and_thawed"]]
    thawed = [{n: g for n, g in step.items() if s != 1 or n == "v"} for s, step in enumerate(each(range(3), gradient))]
    group = gradzip.LocalGroup(gradzip.parse(spec), SIZE)
    wanted = {}
    for step in thawed:
        wanted |= {name: group.average(grads, name)[0] for name, grads in step.items()}
    assert_same(spec, [averages for _, averages in of_ranks], wanted)
    for after, _ in of_ranks:
        for name in SHAPES:
            assert torch.equal(after[0][name], after[1][name]) == (name != "v"), name
            assert not torch.equal(after[1][name], after[2][name]), name


@every_method
def test_clipping_between_synchronize_and_step(results, spec):
    of_ranks = [r[spec] for r in results["clipped"]]
    averages = expected(spec, each(range(1), gradient))
    norm = torch.stack([a.norm() for a in averages.values()]).norm()
    for got_norm, after in of_ranks:
        torch.testing.assert_close(got_norm, norm, rtol=1e-4, atol=0)
        for name, average in averages.items():
            torch.testing.assert_close(after[name], -0.5 * average / norm, rtol=1e-3, atol=1e-6)


@every_method
def test_two_optimizers_with_equal_names(results, spec):
    of_ranks = [r[spec] for r in results["two_optimizers"]]
    assert_same(spec, [first for first, _ in of_ranks], expected(spec, each(range(STEPS), gradient)))
    shapes = {"w": (50, 60), "v": SHAPES["v"]}
    second = each(range(100, 100 + STEPS), lambda n, r, s: gradient(n, r, s, shapes[n]), shapes)
    assert_same(spec, [second for _, second in of_ranks], expected(spec, second, prefix="optimizer1."))


@every_method
def test_an_optimizer_made_anew_finds_what_was_kept(results, spec):
    wanted = expected(spec, each(range(STEPS), gradient))
    assert_same(spec, [r[spec] for r in results["an_optimizer_made_anew"]], wanted)


@every_method
def test_sparse_gradients(results, spec):
    def dense(name, rank, step):
        if name != "table":
            return gradient(name, rank, step)
        indices, factors = table_gradient(rank, step)
        return torch.zeros(200, 16).index_add_(0, indices, factors)

    gradients = each(range(STEPS), dense, ["table", "w"])
    wanted = expected(spec, gradients)
    of_ranks = [r[spec] for r in results["sparse"]]
    assert_same(spec, [as_dense[0] for as_dense, _ in of_ranks], wanted)
    table = sum(gradients[-1]["table"]) / SIZE
    for (_, sparse, nbytes), (averages, still_sparse, fewer_nbytes) in of_ranks:
        assert sparse and still_sparse
        # Horovod gathers sparse gradients itself, and all of them.
        torch.testing.assert_close(averages["table"], table)
        assert (nbytes, fewer_nbytes) == (4 * STEPS * (200 * 16 + 64 * 48), 4 * STEPS * 64 * 48)
    assert_same(spec, [{"w": averages["w"]} for _, (averages, *_) in of_ranks], {"w": wanted["w"]})


@every_method
def test_an_overflow_on_one_rank_skips_the_step_and_changes_no_state(results, spec):
    good = [step for step in range(len(AMP_SCALES)) if step != OVERFLOWS]
    wanted = expected(spec, each(good, gradient))
    of_ranks = [r[spec] for r in results["loss_scaled"]]
    for scales, after, states, averages in of_ranks:
        assert scales == AMP_SCALES
        for name in SHAPES:
            assert torch.equal(after[OVERFLOWS][name], after[OVERFLOWS - 1][name])
            assert torch.equal(after[-1][name], of_ranks[0][1][-1][name])
            # Scales are powers of two, and change no bit of what is rounded to, but where a library's routine is used.
            torch.testing.assert_close(averages[name], wanted[name], rtol=1e-3, atol=1e-5)
        assert_equal_states(states[OVERFLOWS], states[OVERFLOWS - 1])


@every_method
def test_autocast(results, spec):
    of_ranks = [r[spec] for r in results["autocast"]]
    gradients = [{name: [own[step][name] for own, _ in of_ranks] for name in of_ranks[0][1]} for step in range(STEPS)]
    assert any(not torch.equal(*grads) for grads in gradients[0].values())
    assert_same(spec, [averages for _, averages in of_ranks], expected(spec, gradients))

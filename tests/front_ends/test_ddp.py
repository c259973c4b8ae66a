"""The DDP front end in real `torchrun` jobs, against the same method in a LocalGroup."""

import functools

import pytest
import torch
import torch.distributed as dist

import gradzip
import kinds
from contract import Expected, assert_averages, assert_equal_states
from gradzip.averaging.handshake import describe
from gradzip.collectives.fusion import fused
from gradzip.engines.local import drive
from gradzip.methods.base.group import averaged
from launch import Jobs, processes, scenarios, torchrun
from observed import collectives, observed
from reference import MomentumSGD

if not dist.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)
from ddp_worker import (
    CONVOLUTIONS,
    DECAY_STEPS,
    DECAYED,
    DECAYS,
    DIVIDED,
    DTYPES,
    OPTIONS,
    OVERFLOWS,
    RINGS,
    SHAPES,
    STEPS,
    TAKEN_BACK,
    THETAS,
    ZEROING,
    gradient,
    table_gradient,
)

SPECS = [*kinds.ALL, *kinds.exchanged()]
ALL = range(len(SHAPES))
COMPRESSED = [i for i, s in enumerate(SHAPES) if len(s) > 1 and torch.Size(s).numel() >= 1024]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """The jobs by number of ranks."""

    def run(size, names):
        return scenarios(size, "ddp_worker.py", tmp_path_factory.mktemp(f"world{size}"), *names, run=torchrun)

    return {size: Jobs(functools.partial(run, size), [["toggled_others"], *kinds.batches(SPECS)]) for size in (2, 3)}


@pytest.fixture(params=[3, pytest.param(2, marks=pytest.mark.long)])
def world(request, jobs):
    return request.param, jobs[request.param]


def gradients(ranks, step, index, dtype=torch.float32):
    return [gradient(r, step, index, *SHAPES[index], dtype=dtype) for r in ranks]


class InGroups:
    """Reference: LocalGroups, one for each parameter, or for those of a bucket that the method joins."""

    def __init__(self, compressor, size, prefix="layers.", **arguments):
        self.groups = Expected(compressor, prefix, size, **arguments)

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


def runs(per_rank, *keys):
    for key in keys:
        per_rank = [result[key] for result in per_rank]
    assert all(result["buckets"] == per_rank[0]["buckets"] for result in per_rank)
    return [result["averages"] for result in per_rank], per_rank[0]["buckets"]


def of_method(results, spec):
    return [result[spec] for result in results["methods"]] if spec in kinds.SAMPLE else results[spec]


@pytest.mark.parametrize(("size", "spec"), kinds.jobs(SPECS))
def test_methods(jobs, size, spec):
    results = jobs[size]
    averages, buckets = runs(of_method(results, spec))
    assert [len(step) for step in buckets] == [1, 3, 3, 3]
    wanted = expected([(ALL, InGroups(gradzip.parse(spec), size))], range(size), buckets)
    for step, want in enumerate(wanted):
        of_ranks = [{f"layers.{i}": average for i, average in enumerate(run[step])} for run in averages]
        assert_averages(gradzip.parse(spec), of_ranks, {f"layers.{i}": average for i, average in want.items()})


def test_groups_are_smaller_than_buckets(world):
    size, results = world
    averages, buckets = runs(results["divided"])
    spec, limit = DIVIDED
    reference = InGroups(gradzip.parse(spec), size, most_numel=limit)
    assert_equal(averages, expected([(COMPRESSED, reference)], range(size), buckets))
    assert len(reference.groups.groups) > 3 == len(buckets[-1])


def test_shards_are_gathered_while_the_next_ones_are_exchanged(world):
    """Of three buckets. Shards of other lengths wait for all buckets, because their lengths may not be known yet."""
    for of_rank in world[1]["order"]:
        even, uneven = of_rank.values()
        assert even == ["AllToAll", "AllToAll", "Gather", "AllToAll", "Gather", "Gather"]
        assert uneven == ["AllToAll"] * 3 + ["Gather"]


def test_a_changed_exchange_does_not_pad_to_the_lengths_of_the_former(world):
    """With three ranks, "auto" scatters from the second step on."""
    size, results = world
    if size == 3:
        for of_rank in results["switch"]:
            assert of_rank["auto"] == pytest.approx(of_rank["scatter_reduce"], rel=0.01)


@pytest.mark.parametrize(("size", "spec"), kinds.jobs(SPECS))
def test_bytes_sent(jobs, size, spec):
    """Payloads, 16 bytes for each exchange, padding if lengths vary, and the handshake of the first step."""
    results = jobs[size]
    _, buckets = runs(of_method(results, spec))
    method = InGroups(gradzip.parse(spec), size)
    expected([(ALL, method)], range(size), buckets)
    named = [(f"layers.{i}", torch.empty(shape)) for i, shape in enumerate(SHAPES)]
    handshake = len(describe(gradzip.parse(spec), named))
    gathers = 1 + 3 * 3  # of one bucket in the first step, and three in the others
    used, (steps, lengths, _) = collectives(gradzip.parse(spec)), observed(spec)
    parts = size if "AllToAll" in used else 1
    varying = 0.1 if sum(min(lengths)) > 0.9 * sum(max(lengths)) else 0.5  # between steps and ranks
    for run in of_method(results, spec):
        assert run["dense"] == STEPS * sum(4 * torch.Size(s).numel() for s in SHAPES)
        extra = run["sent"] - method.groups.bytes_sent - handshake
        if used == {"Mean"}:
            assert 0 <= extra <= 32
        elif {*steps} == {("Gather",)} and len(lengths) == 1:
            assert 0 <= extra <= 2 * 16 * gathers  # lengths of coded bitmaps may differ by an alignment
        else:
            assert 0 <= extra <= 16 * gathers * (parts + 1) + varying * method.groups.bytes_sent


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
    others = [i for i in ALL if i not in (2, 3)]
    wanted = expected([(others, InGroups(gradzip.TernGrad(), size)), ([2, 3], TopK(0.9, size))], range(size), buckets)
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


def test_copies_of_a_ddp_model_continue_with_its_state(world):
    """The first bucket after a start is the whole model: gloo adds in a different order."""
    for result in world[1]["copied"]:
        for named in (False, True):
            original, *copies = result[named]
            for averages in copies:
                for i in ALL:
                    rounding = 0 if i in COMPRESSED else 1e-6
                    torch.testing.assert_close(averages[i], original[i], rtol=rounding, atol=rounding)
        assert "of an unknown parameter" in result["error"] and "HookState(state.compressor, " in result["error"]


def test_rewrapped_model_without_names_finds_its_state(world):
    size, results = world
    averages, buckets, names = zip(*results["rewrapped"])
    wanted = expected([(ALL, InGroups(gradzip.DGC(theta=0.9), size))], range(size), buckets[0])
    assert_equal(averages, wanted)
    assert all(of_rank == [str(i) for i in ALL] for of_rank in names)


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
    for step in range(3):
        grads = {i: gradients(range(size), step, i) for i in ALL}
        for unused in (grads[3][0], *(grads[5] if step < 2 else grads[5][:1])):
            unused.zero_()
        wanted.append(groups.average(grads, buckets[step]))
        if step < 2:
            del wanted[-1][5]
    assert_equal(per_rank, wanted)
    assert all(averages[5] is None for run in per_rank for averages in run[:2])


@pytest.mark.parametrize("spec", TAKEN_BACK)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("zeroing", ZEROING)
def test_nothing_of_a_residual_is_lost_in_averages_that_ddp_discards(world, spec, views, zeroing):
    size, results = world
    (sums, _), *_ = per_rank = [result[f"{spec} {views} {zeroing}"] for result in results["taken_back"]]
    for i, total in enumerate(sums):
        wanted = sum(sum(gradients(range(size), step, i)) for step in range(STEPS if i not in (3, 5) else 2)) / size
        kept = [residuals.get(f"layers.{i}", torch.zeros(SHAPES[i])) for _, residuals in per_rank]
        torch.testing.assert_close(total + sum(kept) / size, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("methods", ["toggled", pytest.param("toggled_others", marks=pytest.mark.long)])
def test_a_pass_changes_nothing_of_parameters_that_no_rank_uses(world, methods):
    """Neither their gradients, which another pass of the step has averaged, nor residuals, velocities and momenta."""
    _, results = world
    for of_rank in results[methods]:
        assert {case: found for case, (found, _) in of_rank.items() if found} == {}
        assert all(moved for _, moved in of_rank.values())


def test_static_graphs_with_several_buckets_in_the_first_pass(world):
    """DDP gives all of them the number 0: parameters of two dtypes and a sparse gradient."""
    for of_rank in world[1]["static_graphs"]:
        for plain, static in zip(of_rank[:3], of_rank[3:]):
            assert all(torch.equal(a, b) and a.any() for a, b in zip(plain, static))


def test_an_overflow_that_a_scaler_does_not_see_is_a_warning(world):
    """It keeps its scale, so that all steps are skipped. From the second one on, the parameter is named."""
    for of_rank in world[1]["outside"]:
        assert len(of_rank[3]) == 2 and all("'layers.3'" in text for text in of_rank[3])
        assert of_rank[0] == []


def test_exempt_modules_are_averaged_uncompressed(world):
    size, results = world
    for rank, ((_, averages), error, kept, lines, alone, other, everything) in enumerate(results["exempted"]):
        assert error == "" and kept == ["0.weight"]
        for name, average in averages.items():
            mean = sum(gradients[name] for (gradients, _), *_ in results["exempted"]) / size
            (torch.testing.assert_close if name != "0.weight" else assert_differs)(average, mean)
        logged = ["1 of 4 parameters, 65.5 % of the elements, by topk:theta=0.9"]
        assert lines == (logged if rank == 0 else [])
        assert "parameter '1.bias' is not on rank 1, is exempt on rank 0; call exempt_modules on all ranks" in alone
        assert "HookState: got the exempt parameter 'layers.1', expected names such as '0.bias': give" in other
        assert everything.startswith(
            "ValueError: HookState: got exemptions of all parameters that the method compresses"
        )


def assert_differs(a, b):
    assert (a == 0).sum() > 0.5 * a.numel() and not torch.allclose(a, b)


def test_announcements_that_are_wrong_are_errors_on_all_ranks(world):
    """And none of them changes a state."""
    size, results = world
    wanted = {
        "late": "got a first call of discarding() after the first step, expected it before that, on all ranks",
        "not everywhere": "rank 0 has called compressor.discarding(), rank 1 has not; call it on all ranks",
        "some": f"got a backward pass within discarding() on {1 / size:.0%} of the ranks, expected it on all or none",
        "shared": "got discarding() of a compressor that another HookState has, too, expected one of its own",
    }
    reference = results["methods"][0]["powersgd"]["averages"][1]
    for found, averages in results["announcements"]:
        assert all(text in found[case] and "\n" not in found[case] for case, text in wanted.items())
        torch.testing.assert_close(averages, reference)  # buckets differ, and so does the order of sums


def test_loaded_states_are_claimed_where_names_differ_by_a_prefix(world):
    for found in world[1]["other_names"]:
        for how in ("_orig_mod", "module", "model.net"):
            assert found[how][:2] == ("", []) and all(map(torch.equal, found[how][2], found["own"][2]))


def test_loaded_states_that_no_parameter_claims_are_a_warning_or_an_error(world):
    for found in world[1]["other_names"]:
        error, (text,), averages = found["one"]
        assert "got states of 'net.layers." in text and "expected names such as 'layers.0'" in text and not error
        assert not all(map(torch.equal, averages, found["own"][2]))
        error, texts, _ = found["none"]
        assert "rank 0 has loaded states of 'layers.0.weight' and others, which no parameter has" in error and not texts


def test_a_state_belongs_to_a_parameter_and_not_to_the_order_of_models(world):
    """Second models, resumed and compiled ones have the bits of the first. Ranks that have other models agree."""
    _, results = world
    for spec, first in results["one_after_another"][0].items():
        for of_rank in results["one_after_another"]:
            for how in ("first", "second", "compiled"):
                for averages, wanted in zip(of_rank[spec][how], first["first"], strict=True):
                    assert all(map(torch.equal, averages, wanted)), (spec, how)
            for averages, wanted in zip(of_rank[spec]["other"], first["other"], strict=True):
                assert all(map(torch.equal, averages, wanted)), spec


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


def test_float16_averages_do_not_overflow_as_their_sums_do(world):
    for averages in world[1]["large_halves"]:
        for i, average in enumerate(averages):
            assert (average / (60000 - 1000 * i) - 1).abs().max() < 4 * 2**-11


def test_strides_are_kept(world):
    size, results = world
    shapes = [(32, 16, 3, 3), (50, 60), (64, 64)]
    for which, compressor in enumerate((gradzip.FFTRange(theta=0.5, error_feedback=False), gradzip.NoCompression())):
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
            method = TopK(0.9, 1) if spec.startswith("topk") else InGroups(gradzip.parse(spec), 1)
            wanted = expected([(COMPRESSED, method)], [rank], buckets)
            assert_equal([averages], wanted, ALL)


def test_register_is_the_hook_with_names_and_group(world):
    for result in world[1]["registered"]:
        averages, state = result["register"]
        expected, expected_state = result["by hand"]
        assert all(map(torch.equal, averages, expected))
        assert set(state["states"]) == {f"layers.{i}" for i in COMPRESSED}
        assert_equal_states(state, expected_state)
        assert result["group"] and "can only be called once" in result["twice"]
        assert result["alone"] is None and result["hooks"] == 0
        assert result["plain"] is None
        assert result["warnings"] == [
            "register: got a Linear, expected a DistributedDataParallel: nothing is compressed"
        ]


def test_register_without_a_group():
    assert gradzip.ddp.register(torch.nn.Linear(2, 2), gradzip.TopK()) is None
    with pytest.raises(TypeError, match="register: got 4, expected a compressor"):
        gradzip.ddp.register(torch.nn.Linear(2, 2), 4)


def test_group_of_some_ranks(world):
    size, results = world
    assert results["subset"][0] is None
    averages, buckets = runs(results["subset"][1:])
    references = [(ALL, InGroups(gradzip.QSGD(exchange="scatter_reduce"), size - 1))]
    assert_equal(averages, expected(references, range(1, size), buckets))


def test_two_models_in_one_backward_pass(world):
    size, results = world
    for model, prefix in enumerate(("", "model1.")):
        buckets = results["two_models"][0][1][model]
        wanted = expected([(ALL, InGroups(gradzip.TernGrad(), size, prefix))], range(size), buckets)
        assert_equal([[step[model] for step in run] for run, _ in results["two_models"]], wanted)


@pytest.mark.parametrize("unused", [False, True], ids=["", "find_unused_parameters"])
def test_join_with_uneven_data(world, unused):
    size, results = world
    runs = [result[unused] for result in results["joined"]]
    for rank, run in enumerate(runs):
        assert len(run) == 3 + rank
        for step, averages in enumerate(run):
            for i, average in enumerate(averages):
                active = [r for r in range(size) if step < 3 + r]
                want = sum(gradients(active, step, i)) / size
                assert torch.equal(average, runs[-1][step][i])
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
            # All compressed parameters of the bucket are affected: they are one group.
            bad = {3, 5}
            assert during["finite"] == [i not in bad for i in ALL]
            assert before["finite"] == after["finite"] == [True] * len(SHAPES)
            # The step is skipped, so the states of all parameters are rolled back.
            assert after["steps"] == dict.fromkeys(names, 2)
            if spec != "terngrad":
                for name in names:
                    assert torch.equal(before["residuals"][name], during["residuals"][name])
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


def test_lengths_that_no_peer_can_have_are_refused_before_memory_is_taken(world):
    size, results = world
    for error, numel in zip(results["claims"][0], (64 * 64, -(-64 * 64 // size)), strict=True):
        expected = f"got 10 bytes of at most {1 << 50}, expected at most {16 * numel + 4096}"
        assert error == f"PayloadError: from rank 1 of {size}: corrupt message: {expected}"


def test_errors_are_raised_by_backward(world):
    size, results = world
    for result in results["errors"]:
        corrupt = f"PayloadError: Damaging, parameter 'layers.3': from rank 1 of {size}: corrupt payload: its checksum"
        assert result["damaged"][:2] == [""] * 2 and result["damaged"][2].startswith(corrupt)
        for static in (False, True):
            assert result[f"first step, static_graph={static}"].startswith(corrupt)
        assert (
            "hook: got TopK(" in result["no hook state"]
            and "expected one as of gradzip.ddp.HookState(" in result["no hook state"]
        )
        assert "of an unknown parameter" in result["shared"] and "HookState of its own" in result["shared"]
        for how in ("after backward", "closure"):
            decay = result[f"weight decay, {how}"]
            assert decay.startswith("ValueError: SGD: got weight_decay = 0.5 for a parameter to which DGC applies")
        assert result["foreign state"].startswith("ValueError: ") and "parameter 'layers.0'" in result["foreign state"]


def test_backward_pass_that_fails_at_the_end_changes_no_state(world):
    """DDP has called all hooks, and has written no gradient."""
    _, results = world
    for result in results["failed_at_the_end"]:
        expected = result.pop("not")
        assert expected["failed"] == "" and len(expected["residuals"]) == len(COMPRESSED)
        for how in ("new state", "same state"):
            assert result[how].pop("failed") == "ArithmeticError: at the end"
            assert_equal_states(result[how], {name: expected[name] for name in result[how]})


def test_backward_pass_that_fails_at_the_end_on_one_rank_is_an_error_of_the_next_step(world):
    size, results = world
    for rank, result in enumerate(results["failed_at_the_end"]):
        failed, error = result["one rank"]
        assert failed == ("ArithmeticError: at the end" if rank == size - 1 else "")
        assert error.startswith("RuntimeError: parameter 'layers.")
        assert f"': rank {size - 1} has compressed it 1 times, rank 0 2 times; " in error


def test_different_configurations_raise_in_the_first_step(world):
    _, results = world
    for result in results["errors"]:
        for what, words in {
            "methods": ("rank 1 compresses with TopK(", "rank 0 with QSGD("),
            "arguments": ("rank 1", "theta=0.8", "rank 0", "theta=0.9"),
            "exchanges": ("rank 1", "exchange='scatter_reduce'", "rank 0", "exchange='gather'"),
            "names": ("parameter 'layers.0': rank 1 has no such parameter, rank 0 has float32[64, 64]",),
            "scalers": ("the compressor of rank 1 follows a GradScaler, that of rank 0 does not; call",),
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
    results, statuses = processes(3, "ddp_worker.py", tmp_path, "killed")
    assert statuses == [0, -9, 0]
    for rank in (0, 2):
        seconds, error = results["killed"][rank]
        assert "Error: " in error and seconds < 60  # the group's timeout


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

"""Buckets: how they are cut, the states of their parameters, and Horovod's in real `horovodrun` jobs."""

import contextlib
import copy
import math
from itertools import pairwise

import pytest
import torch

import gradzip
import kinds
from contract import Expected, each, gradient, through_file
from gradzip import LocalGroup
from gradzip.advice.cost import SMALL_BUCKET_NBYTES
from gradzip.averaging.buckets import Plan, cut
from gradzip.collectives.cost import ALONE_NBYTES
from gradzip.collectives.fusion import fused
from gradzip.engines.local import drive
from gradzip.horovod import bucketed
from gradzip.methods.base import group as groups_of_buckets
from launch import scenarios

SIZE = 2


def sizes(buckets):
    return [[p.numel() for p in bucket] for bucket in buckets]


# --- cutting


def test_buckets_are_full_at_their_size():
    parameters = [torch.empty(n) for n in (100, 200, 50, 700, 10, 10, 300)]
    assert sizes(cut(parameters, 4 * 300)) == [[100, 200], [50], [700], [10, 10], [300]]
    assert sizes(cut(parameters, 4 * 301)) == [[100, 200, 50], [700], [10, 10, 300]]  # only 700 is large
    assert sizes(cut(parameters, 0)) == [[p.numel()] for p in parameters]
    assert sizes(cut(parameters, math.inf)) == [[p.numel() for p in parameters]]
    assert cut([], 100) == []


def test_the_bucket_that_comes_last_is_small():
    numel = SMALL_BUCKET_NBYTES // 8
    parameters = [torch.empty(numel) for _ in range(13)]
    assert [len(bucket) for bucket in cut(parameters, 4 * SMALL_BUCKET_NBYTES)] == [2, 8, 3]
    assert [len(bucket) for bucket in cut(parameters, math.inf)] == [2, 11]


def test_a_bucket_has_one_dtype_and_device():
    kinds = [(torch.float32, "cpu"), (torch.float16, "cpu"), (torch.float32, "meta"), (torch.bfloat16, "cpu")]
    parameters = [torch.empty(100, dtype=dtype, device=device) for _ in range(3) for dtype, device in kinds]
    buckets = cut(parameters, 800)
    assert sorted(id(p) for bucket in buckets for p in bucket) == sorted(map(id, parameters))
    for bucket in buckets:
        assert len({(p.dtype, p.device) for p in bucket}) == 1
    assert [len(bucket) for bucket in buckets if bucket[0].dtype == torch.float32] == [2, 2, 1, 1]
    assert [len(bucket) for bucket in buckets if bucket[0].dtype == torch.float16] == [3]


@pytest.mark.parametrize("size", [-1, math.nan, None, "25", True])
def test_bad_sizes_are_refused(size):
    with pytest.raises(ValueError, match=r"bucketed: got bucket_cap_mb = .*, expected a number >= 0"):
        bucketed(gradzip.TopK(), size)


def test_size_of_buckets():
    with pytest.raises(TypeError, match="bucketed: got <class .*TopK.*>, expected a compressor"):
        bucketed(gradzip.TopK, 10)
    compressor = gradzip.TopK()
    assert compressor.bucket_cap_mb is None
    assert bucketed(compressor, 10) is compressor
    assert compressor.bucket_cap_mb == 10
    assert copy.deepcopy(compressor).bucket_cap_mb == 10


# --- states

STATE_SHAPES = {"u": (40, 50), "v": (30, 8, 3, 3), "w": (64, 32), "x": (20, 12, 1, 3, 3)}


def average(plans, step, scale=1.0, dtypes=()):
    """Average the gradients of the parameters of these plans in a group of one rank. Returns the averages by name.

    dtypes: by name; float32 if there is none.
    """
    gradients = {
        name: (scale * gradient(name, 0, step, STATE_SHAPES[name])).to(dict(dtypes).get(name))
        for plan in plans
        for name in plan.names
    }
    groups = [(group, [gradients[plan.names[i]] for i in group.indices]) for plan in plans for group in plan.groups]
    drive([fused([group.average(of_group, 0, 1) for group, of_group in groups])])
    for group, _ in groups:
        group.end_step(skipped=False)
    return gradients


def plan_of(compressor, *names):
    return Plan(compressor, [torch.zeros(STATE_SHAPES[name]) for name in names], list(names), "")


@pytest.mark.parametrize("spec", ["topk:theta=0.9", "dct-range:theta=0.9", "qsgd", "block-float:bits=4"])
def test_states_follow_their_parameters_through_any_buckets(spec):
    """Averages plus residuals add up to the gradients, also if plans that were used before are used again."""
    compressor = gradzip.parse(spec)
    whole = plan_of(compressor, "u", "v", "w", "x")
    pairs = [plan_of(compressor, "v", "u"), plan_of(compressor, "x", "w")]
    alone = [plan_of(compressor, name) for name in STATE_SHAPES]
    other = [plan_of(compressor, "u", "w", "v", "x")]  # has the name of `whole`
    history = [[whole], pairs, [whole], alone, pairs, other, [whole], [whole], alone, [*pairs[:1], *alone[2:]], [whole]]
    sums = {name: torch.zeros(shape) for name, shape in STATE_SHAPES.items()}
    for step, plans in enumerate(history):
        averages = average(plans, step)
        steps = {name: compressor.step_of(name, torch.Size(STATE_SHAPES[name])) for name in STATE_SHAPES}
        assert steps == dict.fromkeys(STATE_SHAPES, step + 1)
        assert len(compressor.states) == sum(len(plan.groups) for plan in plans)
        saved = compressor.state_dict()["states"]
        assert saved.keys() == STATE_SHAPES.keys()
        for name, total in sums.items() if compressor.keeps_residual else ():
            total += averages[name] - gradient(name, 0, step, STATE_SHAPES[name])
            torch.testing.assert_close(total, -saved[name]["residual"], rtol=0, atol=1e-5)
            assert saved[name]["residual"].norm() > 1


def test_a_vector_of_a_bucket_is_what_the_method_sees():
    compressor = gradzip.parse("per-layer:u=topk(theta=0.9),v|x=fft-range(theta=0.5),default=dgc")
    plan = plan_of(compressor, *STATE_SHAPES)
    assert [group.name for group in plan.groups] == ["u", "v and 1 more", "w"]
    averages = average([plan], 0)
    vector = torch.cat([gradient(name, 0, 0, STATE_SHAPES[name]).view(-1) for name in ("v", "x")]).view(1, -1)
    wanted = gradzip.roundtrip(gradzip.FFTRange(theta=0.5), vector, name="v and 1 more")[0].view(-1)
    assert torch.equal(torch.cat([averages["v"].view(-1), averages["x"].view(-1)]), wanted)


def test_gradients_with_the_same_kernels_are_joined():
    """Convolutions with equal kernels are one tensor of their kernels; matrices are one vector."""
    compressor = gradzip.DCTRange(theta=0.8)
    plan = plan_of(compressor, *STATE_SHAPES)
    assert [[plan.names[i] for i in group.indices] for group in plan.groups] == [["u", "w"], ["v", "x"]]
    averages = average([plan], 0)
    for names, shape in ((["u", "w"], (1, -1)), (["v", "x"], (-1, 1, 3, 3))):
        joined = torch.cat([gradient(name, 0, 0, STATE_SHAPES[name]).view(-1) for name in names]).view(shape)
        wanted = gradzip.roundtrip(compressor.clone(), joined)[0].view(-1)
        assert torch.equal(torch.cat([averages[name].view(-1) for name in names]), wanted)


def test_groups_have_at_most_2_to_the_30_elements():
    """DDP's first bucket is the whole model, and indices have 32 bits."""
    parameters = [torch.zeros(1).expand(2**14, 2**15) for _ in range(8)]
    parameters[1:1] = [torch.zeros(1).expand(2**30, 1), torch.zeros(5)]
    plan = Plan(gradzip.TopK(), parameters, [str(i) for i in range(10)], "")
    assert [group.indices for group in plan.groups] == [[0], [1], [3, 4], [5, 6], [7, 8], [9], [2]]


@pytest.mark.parametrize(
    ("spec", "groups"),
    [
        ("none", [[2, 3], [4], [0, 1, 5]]),  # large by what is uncompressed in a vector: not the first and the last one
        ("per-layer:3|5=topk,default=none", [[4], [0, 1, 2], [3, 5]]),
        ("topk", [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_large_vectors_that_are_averaged_uncompressed_are_groups(spec, groups):
    rows = torch.tensor([100, 100, 200, 312, 512, 511])
    parameters = [torch.zeros(1).expand(n, ALONE_NBYTES // 2048) for n in rows]  # 512 rows are large
    plan = Plan(gradzip.parse(spec), parameters, list("012345"), "", [0, 0, 1, 1, 2, 3])
    assert sorted(group.indices for group in plan.groups) == sorted(groups)
    together = Plan(gradzip.parse(spec), parameters, list("012345"), "")
    assert len(together.groups) == len({group.compressed for group in together.groups})


# Without Auto, whose choices depend on the time that methods take.
DIVIDED = [spec for spec in kinds.ALL if not spec.startswith("auto")]
LIMITS = [4160, 2100]  # of u and v, or w and x, together; and less than v
DRAW_BY_GROUP = ("signsgd", "terngrad")  # the keys of their draws have the name of the group
ONE_BY_ONE = [spec for spec in DIVIDED if not (gradzip.parse(spec).vectors or spec.startswith(DRAW_BY_GROUP))]


def divided(monkeypatch, spec, limit):
    """Two ranks that average a bucket in four steps, and continue from state dicts after two. The averages of each."""
    monkeypatch.setattr(groups_of_buckets, "MOST_NUMEL", limit)
    compressors, history = [gradzip.parse(spec) for _ in range(2)], []
    for step in range(4):
        if step == 2:
            compressors = resumed(compressors)
        groups = plan_of(compressors[0], *STATE_SHAPES).groups
        assert all(group.numel <= limit or len(group.names) == 1 for group in groups)
        history.append(average_in_group(compressors, list(STATE_SHAPES), step))
    return history


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("spec", kinds.params(DIVIDED, kinds.SAMPLE))
def test_a_bucket_of_several_groups_is_as_several_buckets(monkeypatch, spec, limit):
    """Saved and loaded states included. A parameter that is larger than a group may be is a group of its own."""
    compressors = [gradzip.parse(spec) for _ in range(2)]
    for step, averages in enumerate(divided(monkeypatch, spec, limit)):
        groups = plan_of(compressors[0], *STATE_SHAPES).groups
        assert len(groups) > 2
        with monkeypatch.context() as undivided:
            undivided.setattr(groups_of_buckets, "MOST_NUMEL", math.inf)
            for group in groups:
                wanted = average_in_group(compressors, group.names, step)
                assert all(torch.equal(averages[name], wanted[name]) for name in group.names)


@pytest.mark.parametrize("spec", kinds.params(ONE_BY_ONE, kinds.SAMPLE))
def test_methods_that_compress_parameters_one_by_one_see_no_limit(monkeypatch, spec):
    for one, other in pairwise(divided(monkeypatch, spec, limit) for limit in (math.inf, *LIMITS)):
        assert all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in STATE_SHAPES)


INDEXED = ["topk", "dgc", "randomk", "atomo:atoms=entry"]


@pytest.mark.parametrize("spec", [*INDEXED, "hierarchical:inner=topk", "powersgd"])
def test_a_parameter_of_2_to_the_31_elements(spec):
    """Methods that number elements do not compress it, and say so. All ranks see the same shape."""
    like = torch.zeros(1).expand(2**16, 2**15)
    compressor = gradzip.parse(spec)
    message = "'w' is averaged uncompressed: got 2147483648 elements, .* takes at most 2147483392; shard it"
    with pytest.warns(UserWarning, match=message) if spec != "powersgd" else contextlib.nullcontext():
        (group,) = Plan(compressor, [like], ["w"], "").groups
    (smaller,) = Plan(compressor, [like[1:]], ["w"], "").groups
    assert group.compressed == (spec == "powersgd") and smaller.compressed


def test_freed_parameters_leave_the_states_of_their_bucket():
    compressor = gradzip.TopK(theta=0.9)
    average([plan_of(compressor, "u", "v", "w")], 0)
    before = compressor.state_dict()["states"]
    compressor.rename_states({"v": None, "unknown": None})
    after = compressor.state_dict()["states"]
    assert after.keys() == {"u", "w"} and compressor.memory.find("v") is None
    assert all(torch.equal(after[name]["residual"], before[name]["residual"]) for name in after)


SCATTERED = [
    "topk:theta=0.9,exchange=scatter_reduce",
    "dct-range:theta=0.9,exchange=scatter_reduce",
    "block-float:bits=4,block=32",
]


def average_in_group(compressors, names, step):
    """Average a bucket in a group with a compressor for each rank. Returns the averages of rank 0 by name."""
    size, per_rank, routines, all_groups = len(compressors), [], [], []
    for rank, compressor in enumerate(compressors):
        groups = plan_of(compressor, *names).groups
        gradients = [gradient(name, rank, step, STATE_SHAPES[name]) for name in names]
        per_rank.append(dict(zip(names, gradients)))
        routines.append(fused([group.average([gradients[i] for i in group.indices], rank, size) for group in groups]))
        all_groups += groups
    drive(routines)
    for group in all_groups:
        group.end_step(skipped=False)
    assert all(torch.equal(averages[name], per_rank[0][name]) for averages in per_rank for name in names)
    return per_rank[0]


def resumed(compressors):
    """Compressors that continue from the state dicts of these."""
    others = [compressor.clone() for compressor in compressors]
    for other, compressor in zip(others, compressors):
        other.load_state_dict(through_file(compressor.state_dict()))
    return others


def owed(fields):
    """What a rank's state dict keeps of a parameter: the residual, and what it owes as the owner of a partition."""
    residual, size = fields["residual"].clone(), fields["size"]
    if "owner_residual" in fields:
        start, own = fields["owner_start"], fields["owner_residual"]
        residual.view(-1)[start : start + own.numel()].add_(own, alpha=size)
    return residual


@pytest.mark.parametrize("spec", SCATTERED)
def test_resuming_from_a_checkpoint_loses_nothing_of_scattered_buckets(spec):
    """State dicts have what ranks keep as the owners of partitions: averages have the same bits."""
    names, size = list(STATE_SHAPES), 3
    gradients = each(range(6), lambda n, r, s: gradient(n, r, s, STATE_SHAPES[n]), names, size)
    averages = {}
    for resumed_after in (None, 3):
        compressors = [gradzip.parse(spec) for _ in range(size)]
        history = averages[resumed_after] = []
        for step in range(6):
            if step == resumed_after:
                compressors = resumed(compressors)
            history.append(average_in_group(compressors, names, step))
        saved = [compressor.state_dict()["states"] for compressor in compressors]
        for name in names:
            left = sum(owed(of_rank[name]) for of_rank in saved) / size
            wanted = sum(sum(of_step[name]) / size for of_step in gradients)
            torch.testing.assert_close(sum(a[name] for a in history) + left, wanted, rtol=0, atol=1e-4)
        assert any("owner_residual" in of_rank[name] for of_rank in saved for name in names)
    for straight, again in zip(averages[None], averages[3], strict=True):
        assert all(torch.equal(straight[name], again[name]) for name in names)


@pytest.mark.parametrize("spec", SCATTERED)
def test_buckets_keep_what_ranks_own_when_the_group_changes(spec):
    compressors = [gradzip.parse(spec) for _ in range(2)]
    average_in_group(compressors, list(STATE_SHAPES), 0)
    for compressor in compressors:
        before = compressor.state_dict()["states"]
        compressor.memory.change_group(0, 3)
        after = compressor.state_dict()["states"]
        for name in STATE_SHAPES:
            assert torch.equal(after[name]["residual"], owed(before[name])) and "owner_residual" not in after[name]
            assert (after[name]["rank"], after[name]["size"]) == (0, 3)
        assert any("owner_residual" in fields for fields in before.values())


class Scaler:
    """The part of a GradScaler that compressors use."""

    scale = 4.0

    def get_scale(self):
        return self.scale


def test_residuals_of_other_loss_scales_join_a_bucket():
    """Parameters that were frozen, or in other buckets, have the loss scale of their last step."""
    scaler = Scaler()
    compressor = gradzip.TopK(theta=0.9).follow(scaler)
    history = [(4.0, ["u"]), (2.0, ["v", "w"]), (8.0, ["u", "v"]), (8.0, ["u", "v", "w"]), (1.0, ["u", "v", "w", "x"])]
    sums = {name: torch.zeros(shape) for name, shape in STATE_SHAPES.items()}
    for step, (scaler.scale, names) in enumerate(history):
        compressor.memory.loss_scale.begin_step()
        averages = average([plan_of(compressor, *names)], step, scaler.scale)
        saved = compressor.state_dict()["states"]
        for name in names:
            sums[name] += averages[name] / scaler.scale - gradient(name, 0, step, STATE_SHAPES[name])
            residual = saved[name]["residual"] / scaler.scale
            torch.testing.assert_close(sums[name], -residual, rtol=0, atol=1e-5)
            assert saved[name]["loss_scale"] == scaler.scale and residual.norm() > 1


def test_parameters_that_change_their_type_leave_the_vector():
    compressor = gradzip.TopK(theta=0.9)
    parameters = [torch.nn.Parameter(torch.zeros(STATE_SHAPES[name])) for name in STATE_SHAPES]
    plan = Plan(compressor, parameters, list(STATE_SHAPES), "")
    assert plan.fits(compressor, parameters) and not plan.fits(compressor, parameters[:3])
    for parameter in parameters[1::2]:
        parameter.data = parameter.data.half()
    assert not plan.fits(compressor, parameters)
    plan = Plan(compressor, parameters, list(STATE_SHAPES), "")
    assert [group.name for group in plan.groups] == ["u and 1 more", "v and 1 more"]
    gradients = average([plan], 0, dtypes={"v": torch.half, "x": torch.half})
    assert [g.dtype for g in gradients.values()] == [p.dtype for p in parameters]
    assert all(float((g != 0).sum()) > 0 for g in gradients.values())


# --- Horovod


@pytest.fixture(scope="module")
def results(tmp_path_factory, pytestconfig):
    pytest.importorskip("horovod.torch")
    folder = tmp_path_factory.mktemp("buckets")
    results = scenarios(SIZE, "buckets_worker.py", folder)
    if pytestconfig.getoption("--long"):
        results |= scenarios(SIZE, "buckets_worker.py", folder, "trained_more")
    for of_rank, more in zip(results["trained"], results.get("trained_more", ())):
        of_rank |= more
    return results


def expected_cut(names, shapes, cap_mb):
    """Buckets of float32 parameters, cut in plain Python."""
    buckets, nbytes = [[]], 0
    for name in names:
        buckets[-1].append(name)
        nbytes += 4 * math.prod(shapes[name])
        if nbytes >= cap_mb * 2**20:
            buckets.append([])
            nbytes = 0
    return [bucket for bucket in buckets if bucket]


def worker():
    import buckets_worker

    return buckets_worker


def trained_steps():
    """The gradients of each step, and the buckets of those that are not frozen."""
    w = worker()
    buckets, steps = expected_cut(w.SHAPES, w.SHAPES, w.CAP_MB), []
    for step, grads in enumerate(each(range(w.STEPS), lambda n, r, s: gradient(n, r, s, w.SHAPES[n]), w.SHAPES)):
        for name, unused in w.UNUSED.items():
            if step in unused:
                grads[name][0].zero_()
        steps.append({name: g for name, g in grads.items() if step not in w.FROZEN.get(name, ())})
    return steps, [[[name for name in bucket if name in of_step] for bucket in buckets] for of_step in steps]


def assert_equal(averages, first, wanted, exact):
    assert averages.keys() == wanted.keys()
    for name, want in wanted.items():
        assert torch.equal(averages[name], first[name]), name
        if exact(name):
            assert torch.equal(averages[name], want), name
        else:
            torch.testing.assert_close(averages[name], want, rtol=1e-4, atol=1e-5)


def every_spec():
    more = [pytest.param("MORE_SPECS", i, marks=pytest.mark.long) for i in range(5)]
    return pytest.mark.parametrize("specs, index", [*(("SPECS", i) for i in range(3)), *more])


@every_spec()
def test_several_buckets(results, specs, index):
    """Hooks in any order, parameters in the order of rank 0, some frozen or unused: as in groups of these buckets."""
    w = worker()
    spec = getattr(w, specs)[index]
    steps, buckets = trained_steps()
    assert [len(bucket) for bucket in buckets[0]] == [4, 2, 1]
    wanted = Expected(spec, size=SIZE).averages(steps, buckets)
    is_sum = lambda name: name == "b" or gradzip.parse(spec).method_for(name, torch.Size()).__class__ in (  # noqa: E731
        gradzip.NoCompression, gradzip.PowerSGD, gradzip.ACPSGD
    )  # fmt: skip
    per_rank = [result[spec] for result in results["trained"]]
    for averages, _, _ in per_rank:
        for got, first, want in zip(averages, per_rank[0][0], wanted, strict=True):
            assert_equal(got, first, want, lambda name: not is_sum(name))


def test_collectives_that_horovod_cannot_count_are_refused(results):
    for errors, sent, parts in results["refused"]:
        assert [error.split(" ranks")[0] for error in errors] == [
            "ValueError: HorovodEngine: got 2000 bytes in one Gather of 2",
            "ValueError: HorovodEngine: got 1600 bytes in one AllToAll of 2",
            "ValueError: HorovodEngine: got 1501 elements in one Mean of 2",
        ]
        assert all("expected at most 1500, which is as far as Horovod counts: make" in error for error in errors)
        assert sent == 0 and [part.numel() for part in parts] == [500, 500]


def test_groups_are_divided_as_in_a_local_group(results, monkeypatch):
    """Of one bucket that is larger than a group may be."""
    w = worker()
    spec, limit = w.DIVIDED
    monkeypatch.setattr(groups_of_buckets, "MOST_NUMEL", limit)
    group = LocalGroup(bucketed(gradzip.parse(spec), math.inf), SIZE)
    steps = each(range(3), lambda n, r, s: gradient(n, r, s, w.SHAPES[n]), w.SHAPES)
    wanted = Expected(spec, size=SIZE, most_numel=limit).averages(steps)
    for step, grads in enumerate(steps):
        averages = group.step([{name: of[rank] for name, of in grads.items()} for rank in range(SIZE)])
        for name in w.SHAPES:
            assert torch.equal(averages[0][name], wanted[step][name])
            for of_rank, names in results["divided"]:
                assert torch.equal(of_rank[step][name], averages[0][name])
                assert names == sorted(group.compressors[0].states) and len(names) > 2


@every_spec()
def test_local_groups_average_as_jobs(results, specs, index):
    """Studies of accuracy rest on it: the same units, with parameters that are frozen or unused in some steps."""
    w = worker()
    spec = getattr(w, specs)[index]
    group, (steps, _) = LocalGroup(bucketed(gradzip.parse(spec), w.CAP_MB), SIZE), trained_steps()
    for got, grads in zip(results["trained"][0][spec][0], steps, strict=True):
        averages, *others = group.step([{name: of[rank] for name, of in grads.items()} for rank in range(SIZE)])
        for name, average in averages.items():
            assert all(torch.equal(average, other[name]) for other in others)
            torch.testing.assert_close(average, got[name], rtol=1e-4, atol=1e-5)
    left = results["trained"][0][spec][2]
    states = worker().residuals(group.compressors[0])
    assert states.keys() == left.keys()
    for name, residual in states.items():
        torch.testing.assert_close(residual, left[name], rtol=1e-4, atol=1e-4)


@every_spec()
def test_collectives_of_buckets(results, specs, index):
    """One per bucket, kind and round, and one for a frozen parameter. The Mean of "b" is joined with other Means."""
    w = worker()
    spec = getattr(w, specs)[index]
    _, buckets = trained_steps()
    for _, launches, *_ in (result[spec] for result in results["trained"]):
        frozen = [sum(step in those for those in w.FROZEN.values()) for step in range(w.STEPS)]
        started = [len(of_step) + n for of_step, n in zip(buckets, frozen, strict=True)]
        means = [sum("b" in bucket for bucket in of_step) + n for of_step, n in zip(buckets, frozen, strict=True)]
        others = [sum(bucket != ["b"] for bucket in of_step) for of_step in buckets]
        payloads = [mean + other for mean, other in zip(means, others, strict=True)]
        if spec == "none" or spec.startswith("acpsgd"):
            assert launches == started
        elif spec.startswith("powersgd"):
            assert launches == [n + 1 for n in started]
        elif spec.startswith("block-float"):
            assert launches == [n + 1 for n in payloads]
        elif not spec.startswith("per-layer"):
            assert launches == payloads


@pytest.mark.parametrize("index", [0, 2])
def test_error_feedback_loses_nothing(results, index):
    w = worker()
    steps, _ = trained_steps()
    per_rank = [result[w.SPECS[index]] for result in results["trained"]]
    names = [name for name in w.SHAPES if name not in ("b", "c")] if index else [n for n in w.SHAPES if n != "b"]
    for name in names:
        total = sum(averages[name] for averages in per_rank[0][0] if name in averages)
        total = total + sum(left[name] for *_, left in per_rank) / SIZE
        wanted = sum(sum(of_step[name]) / SIZE for of_step in steps if name in of_step)
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)
        assert per_rank[0][2][name].norm() > 1


def test_options_of_the_optimizer(results):
    """With several buckets: accumulated gradients, groups, sums, a predivide factor."""
    w, per_rank = worker(), results["options"]
    combinations = [(options, spec) for options in w.OPTIONS for spec in w.OPTIONS_SPECS]
    buckets = [expected_cut(w.SHAPES, w.SHAPES, w.CAP_MB)] * 3
    for number, (options, spec) in enumerate(combinations):
        passes = options.get("backward_passes_per_step", 1)

        def accumulated(name, rank, step, passes=passes):
            return sum(gradient(name, rank, 10 * step + i, w.SHAPES[name]) for i in range(passes))

        wanted = Expected(spec, size=SIZE).averages(each(range(3), accumulated, w.SHAPES), buckets)
        scale = SIZE if "op" in options else 1
        exact = {name for name in w.SHAPES if name != "b" and spec.startswith("topk")}
        for steps in per_rank:
            for got, first, want in zip(steps[number], per_rank[0][number], wanted, strict=True):
                assert_equal(got, first, {n: scale * average for n, average in want.items()}, exact.__contains__)


def test_optimizers_that_start_in_a_different_order_on_each_rank(results):
    """Their buckets follow the names of the parameters: the order that rank 0's optimizer lists is unknown."""
    w, per_rank = worker(), results["two_optimizers"]
    for half in "xy":
        shapes = {f"{half}{name}": shape for name, shape in w.SHAPES.items()}
        gradients = each(range(3), lambda n, r, s: gradient(n, r, s, w.SHAPES[n[1:]]), shapes)
        wanted = Expected("topk:theta=0.9", size=SIZE).averages(gradients, [expected_cut(shapes, shapes, w.CAP_MB)] * 3)
        for steps in per_rank:
            for got, want in zip(steps, wanted, strict=True):
                got = {name: got[name] for name in want}
                assert_equal(got, got, want, lambda name: not name.endswith("b"))


def test_states_do_not_depend_on_the_buckets(results):
    """A job that goes on with buckets of other sizes loses nothing."""
    w, per_rank = worker(), results["resized"]
    gradients = each(range(8), lambda n, r, s: gradient(n, r, s, w.SHAPES[n]), w.SHAPES)
    for name in w.SHAPES:
        assert all(torch.equal(a[name], b[name]) for a, b in zip(per_rank[0][0], per_rank[1][0]))
        total = sum(averages[name] for averages in per_rank[0][0])
        if name != "b":
            total = total + sum(left[name] for _, left in per_rank) / SIZE
        wanted = sum(sum(of_step[name]) / SIZE for of_step in gradients)
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)
    caps = [w.CAP_MB] * 2 + [0] * 2 + [25] * 4
    buckets = [expected_cut(w.SHAPES, w.SHAPES, cap) for cap in caps]
    wanted = Expected("topk:theta=0.9", size=SIZE).averages(gradients, buckets)
    for averages, _ in per_rank:
        for got, want in zip(averages, wanted, strict=True):
            assert_equal(got, got, want, lambda name: name != "b")


def test_parameters_that_are_unfrozen_between_backward_passes(results):
    shapes = {"g": (40, 50), "d": (50, 40)}
    gradients = each(range(3), lambda n, r, s: gradient(n, r, s, shapes[n]), shapes)
    wanted = Expected("topk:theta=0.9", size=SIZE).averages(gradients, [[["g"], ["d"]]] * 3)
    per_rank = results["unfrozen_between_backward_passes"]
    for averages, left in per_rank:
        for got, want in zip(averages, wanted, strict=True):
            assert_equal(got, got, want, lambda name: True)
        assert left.keys() == shapes.keys()


def test_parameter_that_is_frozen_before_the_step(results):
    shapes = {"g": (40, 50), "d": (50, 40), "h": (40, 40)}
    gradients = each(range(3), lambda n, r, s: gradient(n, r, s, shapes[n]), shapes)
    del gradients[1]["d"]
    wanted = Expected("topk:theta=0.9", size=SIZE).averages(gradients)
    for averages in results["frozen_before_the_step"]:
        for got, want in zip(averages, wanted, strict=True):
            assert_equal(got, got, want, lambda name: True)


def test_buckets_start_in_the_backward_pass(results):
    """Two weights of 6.4 kB fill a bucket, and so do a weight and the table, for which it waits in the first step.

    A bucket starts an all-gather, and an all-reduce of its biases. That of the last bias alone starts the latter.
    """
    for started in results["overlap"]:
        assert started == [3, 3, 3, 2, 4, 4]


def test_a_dropped_step_leaves_nothing(results):
    """The step after it averages as the first one does, with residuals of completed steps alone."""
    w = worker()
    (grads,) = each([1], lambda n, r, s: gradient(n, r, s, w.SHAPES[n]), w.SHAPES)
    wanted = Expected("topk:theta=0.9", size=SIZE).averages([grads, grads], [[list(w.SHAPES)]] * 2)
    for steps in results["dropped"]:
        for got, want in zip(steps, wanted, strict=True):
            assert_equal(got, got, want, lambda name: name != "b")


def test_a_local_group_of_one_parameter_after_the_other_has_no_buckets():
    group, alone = LocalGroup(gradzip.TopK(theta=0.9), 2), LocalGroup(gradzip.TopK(theta=0.9), 2)
    for step in range(3):
        of_ranks = [{name: gradient(name, rank, step, STATE_SHAPES[name]) for name in "uv"} for rank in range(2)]
        group.step(of_ranks)
        for name in "uv":
            alone.average([of_rank[name] for of_rank in of_ranks], name)
    assert group.compressors[0].states.keys() == {"u and 1 more"} and alone.compressors[0].states.keys() == {"u", "v"}

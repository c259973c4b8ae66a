"""Phases: when methods change, what happens to residuals and states, step numbers, and real jobs."""

import json
import math

import pytest
import torch
import torch.distributed as dist

import gradzip
import kinds
from contract import SHAPES, each, gradient, kept_residual, through_file
from gradzip import ACPSGD, Cast, FFTRange, LocalGroup, NoCompression, Phases, TopK
from gradzip.averaging.handshake import compare, describe
from gradzip.engines.local import drive
from gradzip.methods.base.group import averaged, plan_groups
from gradzip.methods.spec import unparse
from launch import horovodrun, scenarios, torchrun
from paths import ROOT
from phases_worker import SCALED_STEPS, SKIPPED, STEPS
from phases_worker import SHAPES as JOB_SHAPES

SHAPE = torch.Size(SHAPES["w"])


def grads_of(step, size, name="w"):
    return [gradient(name, rank, step) for rank in range(size)]


def run_steps(group, first, last, names=("w",)):
    """The averages of all steps, in order."""
    size = len(group.compressors)
    return [group.average(grads_of(step, size, name), name)[0] for step in range(first, last) for name in names]


def residual_of(compressor, name="w"):
    """A copy of a rank's residual, with that of the partition that it owns; float64."""
    saved = [fields[name] for part in compressor.parts if name in (fields := part.memory.by_parameter())]
    found = [residual for fields in saved if (residual := kept_residual(fields)) is not None]
    assert len(found) <= 1
    return found[0].double() if found else torch.zeros(SHAPES[name], dtype=torch.float64)


def in_charge(compressor, name="w", prefix=""):
    return list(compressor.phases)[
        [part is compressor.method_for(name, SHAPE, prefix) for part in compressor.parts].index(True)
    ]


# --- arguments


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Phases({}), r"Phases: got \{\}, expected a dict of methods by step, as in \{0: No"),
        (lambda: Phases([NoCompression()]), r"got \[NoCompression\(.*\)\], expected a dict of methods by step"),
        (lambda: Phases(None), "got None, expected a dict of methods by step"),
        (lambda: Phases({1: TopK()}), r"got the steps \[1\], expected step 0 among them, and its method"),
        (lambda: Phases({0: TopK(), -1: TopK()}), "got the step -1, expected an integer >= 0"),
        (lambda: Phases({0: TopK(), 1.5: TopK()}), "got the step 1.5, expected an integer >= 0"),
        (lambda: Phases({0: TopK(), True: TopK()}), "got the step True, expected an integer >= 0"),
        (lambda: Phases({0: TopK(), "9": TopK()}), "got the step '9', expected an integer >= 0"),
        (lambda: Phases({0: "topk"}), "got 'topk', expected a compressor other than PerLayer, Auto, Phases"),
        (lambda: Phases({0: TopK}), r"got <class .*TopK'>, expected a compressor"),
        (lambda: Phases({0: Phases({0: TopK()})}), "got Phases, expected a compressor other than PerLayer, Auto"),
        (lambda: Phases({0: gradzip.Auto()}), "got Auto, expected a compressor other than"),
        (lambda: Phases({0: gradzip.parse("per-layer:w=topk")}), "got PerLayer, expected a compressor other than"),
        (lambda: gradzip.PerLayer([("w", Phases({0: TopK()}))]), "PerLayer: got Phases, expected a compressor"),
        (lambda: gradzip.Auto(allow=[Phases({0: TopK()})]), "Auto: got Phases, expected a compressor other than"),
        (lambda: gradzip.parse("phases"), "^compression 'phases': got no phases, expected phases:step=method,st"),
        (lambda: gradzip.parse("phases:none"), "got the phase 'none', expected step=method or step=method"),
        (lambda: gradzip.parse("phases:0=none,"), "got the phase '', expected step=method or step=method"),
        (lambda: gradzip.parse("phases:0=none,x=topk"), "got the step 'x', expected an integer >= 0"),
        (lambda: gradzip.parse("phases:0=none,1e3=topk"), "got the step '1e3', expected an integer >= 0"),
        (lambda: gradzip.parse("phases:0=none,-5=topk"), "got the step -5, expected an integer >= 0"),
        (lambda: gradzip.parse("phases:0=none,0=topk"), "got step 0 twice, expected one method for each step"),
        (lambda: gradzip.parse("phases:5=topk"), r"got the steps \[5\], expected step 0 among them"),
        (lambda: gradzip.parse("phases:0=zip"), "unknown compression method 'zip'"),
        (lambda: gradzip.parse("phases:0=phases(0=none)"), "got Phases, expected a compressor other than"),
        (lambda: gradzip.parse("phases:0=none,exempt=w"), r"got exempt = \('w',\), expected a list of rules, and two"),
        (lambda: Phases({0: Cast(), 1: TopK()}, "w"), "got exempt = 'w', expected a list of rules"),
        (lambda: Phases({0: Cast(), 1: TopK()}, ["("]), r"Phases: got the regular expression '\(': "),
    ],
)  # fmt: skip
def test_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "spec, compressor",
    [
        ("phases:0=none,1000=acpsgd", Phases({0: NoCompression(), 1000: ACPSGD()})),
        ("phases:0=fp16,10=topk(theta=0.9,bits=8),20=none",
         Phases({20: NoCompression(), 0: Cast(), 10: TopK(theta=0.9, bits=8)})),
        ("phases:0=fft-range(value_range=(-1, 2))", Phases({0: FFTRange(value_range=(-1, 2))})),
        ("phases:0=none,9=fp16,exempt=^w$,exempt=v", Phases({0: NoCompression(), 9: Cast()}, ("^w$", "v"))),
    ],
)  # fmt: skip
def test_parse_and_unparse(spec, compressor):
    assert gradzip.parse(spec) == compressor and unparse(compressor) == spec
    assert gradzip.parse(spec.replace(",", " , ").replace(":", ": ", 1)) == compressor


def test_clone_and_digest():
    compressor = Phases({3: TopK(), 0: Cast()})
    clone = compressor.clone()
    assert clone == compressor and clone.digest == compressor.digest
    assert list(clone.phases) == [0, 3] and clone.parts == [Cast(), TopK()]
    assert not {id(part) for part in clone.parts} & {id(part) for part in compressor.parts}
    assert all(part.traffic is clone.traffic is not compressor.traffic for part in clone.parts)
    others = [Phases({0: Cast(), 4: TopK()}), Phases({0: Cast(), 3: TopK(theta=0.5)}), Phases({0: Cast()})]
    others.append(Phases({0: Cast(), 3: TopK()}, ["w"]))
    assert len({c.digest for c in [compressor, *others]}) == 5


def test_rounds_and_bypass_are_those_of_all_parts():
    assert gradzip.parse("phases:0=none,5=powersgd").rounds == 2
    assert not gradzip.parse("phases:0=none,5=topk").bypasses(torch.zeros(64, 64))
    assert gradzip.parse("phases:0=none,5=topk").bypasses(torch.zeros(64))


# --- a change of methods


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_averages_and_bytes_equal_those_of_each_method_alone(size):
    """Without error feedback. A method begins with its own step 0."""
    group, sent = LocalGroup(gradzip.parse("phases:0=none,2=acpsgd(error_feedback=False),5=fp16,7=topk"), size), 0
    for spec, first, last in (("none", 0, 2), ("acpsgd:error_feedback=False", 2, 5), ("fp16", 5, 7), ("topk", 7, 9)):
        alone = LocalGroup(gradzip.parse(spec), size)
        for a, b in zip(run_steps(group, first, last), run_steps(alone, first, last), strict=True):
            assert torch.equal(a, b)
        sent += alone.bytes_sent
        assert group.bytes_sent == sent


def test_the_last_phase_never_begins_for_exempt_parameters():
    """Nor after a state was loaded."""
    spec = "phases:0=none,1=topk,2=acpsgd"
    group, alone = (
        LocalGroup(gradzip.parse(f"{spec},exempt=^w$"), 2),
        LocalGroup(gradzip.parse("phases:0=none,1=topk"), 2),
    )
    for step in range(4):
        averages = group.step([{name: gradient(name, rank, step) for name in ("w", "v")} for rank in range(2)])
        assert torch.equal(averages[0]["w"], alone.average(grads_of(step, 2), "w")[0])
        assert [in_charge(group.compressors[0], name) for name in ("w", "v")] == [min(step + 1, 1), min(step + 1, 2)]
    loaded = group.compressors[0].clone()
    loaded.load_state_dict(through_file(group.compressors[0].state_dict()))
    assert [in_charge(loaded, name) for name in ("w", "v")] == [1, 2]
    assert loaded.later_methods("w") == []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_changes_conserve_the_sum(size):
    """After each step: sum of averages + mean residual = sum of mean gradients."""
    sample = [gradzip.parse(spec) for spec in kinds.SAMPLE]
    parts = [*(part for part in sample if part.keeps_residual and not part.optimizer_momentum), NoCompression()]
    assert len(parts) > 3
    last = 4 * (len(parts) - 1)
    group = LocalGroup(Phases({4 * i: part for i, part in enumerate(parts)}), size)
    sent = wanted = torch.zeros(SHAPE, dtype=torch.float64)
    largest = 0.0
    for step in range(last + 2):
        grads = grads_of(step, size)
        sent = sent + group.average(grads, "w")[0].double()
        wanted = wanted + sum(g.double() for g in grads) / size
        left = sum(residual_of(c) for c in group.compressors) / size
        largest = max(largest, left.abs().max().item(), 5.0)
        # A step rounds some tens of times, numbers below twice the largest one.
        bound = (step + 1) * 40 * 2**-24 * 2 * largest
        assert (sent + left - wanted).abs().max() < bound, step
        warms_up = step % 4 < getattr(parts[min(step, last) // 4], "warmup_steps", 0)  # sends the residual uncompressed
        assert (left.abs().max() > 100 * bound) == (step < last and not warms_up), step
        assert in_charge(group.compressors[0]) == min(4 * ((step + 1) // 4), last)


@pytest.mark.parametrize("spec, bits", [("none", 22), ("fp16", 10), ("qsgd(bits=8,norm=max,coding=packed)", 6)])
def test_a_method_without_error_feedback_sends_the_residual_once(spec, bits):
    group = LocalGroup(gradzip.parse(f"phases:0=acpsgd,3={spec}"), 2)
    run_steps(group, 0, 3)
    residual = sum(residual_of(c) for c in group.compressors) / 2
    assert residual.norm() > 1
    for step, left in ((3, residual), (4, 0.0)):
        average = group.average(grads_of(step, 2), "w")[0]
        wanted = sum(g.double() for g in grads_of(step, 2)) / 2 + left
        assert (average - wanted).abs().max() <= 16 * 2.0**-bits, step  # of numbers below 16
    assert all(residual_of(c).abs().max() == 0 for c in group.compressors)


def test_state_and_workspace_of_a_method_that_is_over_are_freed():
    group = LocalGroup(gradzip.parse("phases:0=fft-range(theta=0.9),2=acpsgd,4=none"), 2)
    names = ("w", "v", "b")
    run_steps(group, 0, 3, names[:1])
    for compressor in group.compressors:
        fft, acpsgd, none = compressor.parts
        assert not fft.states and acpsgd.states.keys() == {"w"}
    run_steps(group, 0, 1, names[1:])
    for compressor in group.compressors:
        fft = compressor.parts[0]
        assert fft.states.keys() == {"v"} and fft.workspace._buffers  # v is still there
    run_steps(group, 1, 3, names[1:])
    for compressor in group.compressors:
        fft, acpsgd, none = compressor.parts
        assert not fft.states and not fft.workspace._buffers and acpsgd.states.keys() == {"w", "v"}
    run_steps(group, 3, 5, names)
    for compressor in group.compressors:
        fft, acpsgd, none = compressor.parts
        assert not fft.states and not acpsgd.states
        assert all(state.residual is None for state in none.states.values())


def test_step_numbers_of_a_method_begin_with_its_phase():
    """Schedules, and DGC's warm-up."""
    seen = []
    schedule = lambda step: seen.append(step) or 0.5  # noqa: E731
    group = LocalGroup(Phases({0: NoCompression(), 2: TopK(theta=schedule)}), 1)
    run_steps(group, 0, 5)
    assert list(dict.fromkeys(seen)) == [0, 0, 1, 2][1:]
    dgc = LocalGroup(gradzip.parse("phases:0=none,3=dgc(momentum=0,warmup_steps=4)"), 1)
    run_steps(dgc, 0, 3)
    alone = LocalGroup(gradzip.parse("dgc:momentum=0,warmup_steps=4"), 1)
    for a, b in zip(run_steps(dgc, 3, 7), run_steps(alone, 3, 7), strict=True):
        assert torch.equal(a, b)


def test_roundtrip_and_simulate_are_a_first_step():
    x = gradient("w", 0, 0)
    approximation, nbytes = gradzip.roundtrip(Phases({0: Cast(), 1: TopK()}), x)
    assert torch.equal(approximation, x.half().float()) and nbytes == 2 * x.numel()
    assert torch.equal(
        gradzip.simulate(Phases({0: NoCompression(), 1: TopK()}), grads_of(0, 2))[0], sum(grads_of(0, 2)) / 2
    )


# --- steps


def test_parameters_have_steps_of_their_own():
    """Of two models with equal names, too."""
    group = LocalGroup(gradzip.parse("phases:0=none,2=topk"), 1)
    (compressor,) = group.compressors
    run_steps(group, 0, 2)
    assert (in_charge(compressor), in_charge(compressor, "v"), in_charge(compressor, prefix="model1.")) == (2, 0, 0)
    for _ in range(2):
        grad = gradient("w", 0, 0)
        (group_of_w,) = plan_groups(compressor, [grad], ["w"], "model1.")
        drive([group_of_w.average([grad])])
        group_of_w.end_step(skipped=False)
        compressor.complete_step(["model1.w"])
    assert (in_charge(compressor, "v"), in_charge(compressor, prefix="model1.")) == (0, 2)
    assert [compressor.step_of("w", SHAPE, prefix) for prefix in ("", "model1.", "model2.")] == [2, 2, 0]


def test_steps_that_are_skipped_do_not_count():
    group = LocalGroup(gradzip.parse("phases:0=none,2=topk(theta=0.9)"), 2)
    spoilt = grads_of(7, 2)
    spoilt[1][3, 4] = math.inf
    for number in (1, 2):
        assert not group.average(spoilt, "w")[0].isfinite().all()
        run_steps(group, number, number + 1)
        assert [c.step_of("w", SHAPE) for c in group.compressors] == [number] * 2


def test_a_step_ends_while_the_gradient_of_another_optimizer_is_in_flight():
    """Its residual is on the way, and moves when its own step ends."""
    compressor = gradzip.parse("phases:0=topk(theta=0.9),1=acpsgd")
    routines = {name: averaged(compressor, gradient(name, 0, 0), name) for name in ("w", "v")}
    payloads = {name: next(routine) for name, routine in routines.items()}
    topk, acpsgd = compressor.parts
    for name, others in (("v", ["w"]), ("w", [])):
        with pytest.raises(StopIteration) as end:
            routines[name].send([payloads[name].tensor])
        compressor.complete_step([name])
        assert in_charge(compressor, name) == 1 and list(topk.states) == others
        sent = end.value.value.double() + acpsgd.memory.fields(name)["residual"]
        assert (sent - gradient(name, 0, 0).double()).abs().max() < 2**-20


# --- state dicts


@pytest.mark.parametrize("last", range(9))
def test_a_checkpoint_of_any_step_resumes_to_the_bit(last):
    spec = "phases:0=none,2=topk(theta=0.9,exchange=scatter_reduce),4=acpsgd,6=fp16"
    group, resumed = (LocalGroup(gradzip.parse(spec), 2) for _ in range(2))
    run_steps(group, 0, last, SHAPES)
    merged = through_file(gradzip.checkpoint.merge([c.state_dict() for c in group.compressors]))
    for rank, compressor in enumerate(resumed.compressors):
        compressor.load_state_dict(gradzip.checkpoint.shard(merged, rank, 2))
        assert in_charge(compressor) == in_charge(group.compressors[rank]) == min(last - last % 2, 6)
    for a, b in zip(run_steps(group, last, 9, SHAPES), run_steps(resumed, last, 9, SHAPES), strict=True):
        assert torch.equal(a, b)


def test_another_world_size_continues_in_the_same_phase():
    group, resumed = LocalGroup(gradzip.parse("phases:0=none,2=acpsgd,6=none"), 3), []
    run_steps(group, 0, 4)
    merged = gradzip.checkpoint.merge([c.state_dict() for c in group.compressors])
    resumed = LocalGroup(gradzip.parse("phases:0=none,2=acpsgd,6=none"), 2)
    for rank, compressor in enumerate(resumed.compressors):
        with pytest.warns(UserWarning, match="residuals are dropped"):
            compressor.load_state_dict(gradzip.checkpoint.shard(merged, rank, 2))
        assert in_charge(compressor) == 2 and compressor.parts[1].memory.fields("w")["step"] == 2
    run_steps(resumed, 4, 6)
    assert {in_charge(c) for c in resumed.compressors} == {6}


def test_residuals_move_if_the_phases_begin_at_other_steps():
    """A warm-up that is made longer when training resumes."""
    before, after = gradzip.parse("phases:0=none,2=topk(theta=0.9)"), gradzip.parse("phases:0=none,6=topk(theta=0.9)")
    group, resumed = LocalGroup(before, 2), LocalGroup(after, 2)
    run_steps(group, 0, 4)
    for old, new in zip(group.compressors, resumed.compressors):
        new.load_state_dict(through_file(old.state_dict()))
        assert in_charge(new) == 0
    residual = sum(residual_of(c) for c in group.compressors) / 2
    average = run_steps(resumed, 4, 5)[0]
    assert not any(compressor.parts[1].states for compressor in resumed.compressors)
    assert (average - residual - sum(grads_of(4, 2)) / 2).abs().max() < 16 * 2**-22
    run_steps(resumed, 5, 6)
    assert in_charge(resumed.compressors[0]) == 6


@pytest.mark.parametrize("steps", [None, 3, {"w": -1}, {"w": 1.5}, {"w": True}, {"w": "1"}])
def test_malformed_steps_are_refused(steps):
    compressor = gradzip.parse("phases:0=none,2=topk")
    with pytest.raises(ValueError, match="Phases.load_state_dict: got steps = .*, expected integers by parameter name"):
        compressor.load_state_dict(compressor.state_dict() | {"steps": steps})
    with pytest.raises(ValueError, match="got the states of 2 compressors, expected 1: one for each of its parts"):
        Phases({0: TopK()}).load_state_dict(compressor.state_dict())
    with pytest.raises(ValueError, match="got the state of 'TopK', expected that of 'Phases'"):
        compressor.load_state_dict(TopK().state_dict())


def test_handshake_names_different_steps():
    compressors = [gradzip.parse("phases:0=none,9=topk") for _ in range(2)]
    compressors[1].load_state_dict(compressors[1].state_dict() | {"steps": {"w": 5}})
    named = [(name, torch.zeros(shape)) for name, shape in SHAPES.items()]
    with pytest.raises(RuntimeError, match="parameter 'w': rank 1 has compressed it 5 times, rank 0 0 times; load the"):
        compare([describe(c, named) for c in compressors])
    compare([describe(compressors[1], named)] * 2)


# --- jobs of two ranks

BOUND = STEPS * 40 * 2**-24 * 50  # each step rounds some tens of times, numbers below 50


@pytest.fixture(scope="module", params=["horovod", "ddp"])
def results(request, tmp_path_factory):
    if request.param == "horovod":
        pytest.importorskip("horovod.torch")
    elif not dist.is_available():
        pytest.skip("torch without torch.distributed")

    run = horovodrun if request.param == "horovod" else torchrun
    names = ["switched", "resumed", "different_steps", "loss_scaled", "synced"]
    folder = tmp_path_factory.mktemp(request.param)
    return scenarios(2, "phases_worker.py", folder, *names, run=run, timeout=250) | {"front_end": request.param}


def mean_gradients(steps, name):
    gradients = each(steps, lambda n, r, s: gradient(n, r, s, JOB_SHAPES[n]), JOB_SHAPES)
    return [sum(g.double() for g in of_step[name]) / 2 for of_step in gradients]


def test_changes_conserve_the_sum_in_jobs(results):
    """Of parameters and of whole buckets, after each step."""
    per_rank = results["switched"]
    for name, shape in JOB_SHAPES.items():
        error = torch.zeros(shape, dtype=torch.float64)
        for step, wanted in enumerate(mean_gradients(range(STEPS), name)):
            averages, residuals = ([of_rank[step][i].get(name) for of_rank in per_rank] for i in range(2))
            assert torch.equal(*averages)
            left = sum(r.double() for r in residuals) / 2 if residuals[0] is not None else torch.zeros(shape)
            error += averages[0].double() - wanted
            assert (error + left).abs().max() < BOUND, (name, step)
            assert (left.abs().max() > 100 * BOUND) == (name != "b" and step < 12), (name, step)


def test_bytes_of_each_phase_in_jobs(results):
    dense = 4 * sum(math.prod(shape) for shape in JOB_SHAPES.values())
    matrices = [(shape[0], math.prod(shape[1:])) for shape in JOB_SHAPES.values() if len(shape) > 1]
    # Horovod also all-reduces one number for each gradient.
    extra = 4 * len(JOB_SHAPES) if results["front_end"] == "horovod" else 0
    p, q = (4 * (48 + 4 * sum(shape[i] for shape in matrices)) + extra for i in range(2))
    for of_rank in results["switched"]:
        sent = [nbytes for *_, nbytes in of_rank]
        assert sent[4:8] == [p, q, p, q] and sent[12:] == [dense + extra] * 4
        assert max(sent[:4]) < dense / 3 and dense / 8 < min(sent[8:12]) <= max(sent[8:12]) < dense / 2


def test_jobs_resume_in_the_phase_of_the_checkpoint(results):
    for straight, *resumed in results["resumed"]:
        for run in resumed:
            for a, b in zip(straight, run, strict=True):
                assert all(torch.equal(a[name], b[name]) for name in JOB_SHAPES)


def test_ranks_with_different_steps_find_out_in_the_first_step(results):
    for same_phase, other_phase in results["different_steps"]:
        assert "rank 1 has compressed it 2 times, rank 0 0 times; load the compressor's state on all" in same_phase
        assert "rank 1 has compressed it 4 times, rank 0 0 times; load the compressor's state on all" in other_phase


def test_skipped_steps_do_not_count_in_jobs(results):
    kept = [step for step in range(SCALED_STEPS) if step not in SKIPPED]
    for changes, numbers, parameters in results["loss_scaled"]:
        assert changes == [] and numbers == [sum(k <= step for k in kept) for step in range(SCALED_STEPS)]
        for name, p in parameters.items():
            assert torch.equal(p, results["loss_scaled"][0][2][name])
            wanted = -0.5 * sum(mean_gradients(kept, name))  # the last phase has sent the residuals
            assert (p.double() - wanted).abs().max() < BOUND, name


def test_elastic_state_has_the_steps(results):
    for synced in results["synced"]:
        if synced is not None:  # Horovod
            numbers, is_last, parameters = synced
            assert numbers == [4, 5] and is_last
            assert all(torch.equal(p, results["synced"][0][2][name]) for name, p in parameters.items())


@pytest.mark.long
def test_example_learns_digits_through_a_change(tmp_path):
    """All 400 steps of the training example, from the same weights. Other tests change methods in jobs of Horovod."""
    pytest.importorskip("sklearn")
    specs, path = ["none", "acpsgd", "phases:0=none,100=acpsgd"], tmp_path / "results.json"
    train = ROOT / "examples" / "train.py"
    job = torchrun(
        2, train, *(a for s in specs for a in ("--compression", s)), "--threads", 1, "--json", path, timeout=280
    )
    assert job.returncode == 0, job.stdout + job.stderr
    plain, low_rank, phases = json.loads(path.read_text())["runs"]
    assert all(run["replicas_identical"] and run["steps"] == 400 for run in (plain, low_rank, phases))
    assert phases["loss_curve"][:100] == plain["loss_curve"][:100] != low_rank["loss_curve"][:100]
    assert plain["test_accuracy"] > 0.97 and phases["test_accuracy"] > plain["test_accuracy"] - 0.02
    wanted = (100 * plain["payload_bytes_per_step"] + 300 * low_rank["payload_bytes_per_step"]) / 400
    assert phases["payload_bytes_per_step"] == pytest.approx(wanted, rel=1e-5)  # DDP counts the handshake, too


@pytest.mark.parametrize("last", ["gradiveq", "none", "dgc(min_numel=100000)", "acpsgd(min_numel=100000)"])
def test_residuals_move_to_groups_that_are_not_compressed(last):
    """Matrices, which GradiVeQ averages uncompressed, in one group; a number is one of its own parameters."""
    names = {"m": (40, 48), "n": (48, 30), "s": (1,)}
    group = LocalGroup(gradzip.parse(f"phases:0=topk(theta=0.9),2={last}"), 2)
    exact = given = dict.fromkeys(names, 0.0)
    for step in range(3):
        grads = [{n: gradient(n, rank, step, shape) for n, shape in names.items()} for rank in range(2)]
        for of in grads:
            of["s"] = of["s"][0]
        exact = {n: exact[n] + sum(of[n].double() for of in grads) / 2 for n in names}
        averages = group.step(grads)[0]
        given = {n: given[n] + averages[n].double() for n in names}
        if step == 1:
            assert (exact["m"] - given["m"]).norm() > 1
    for name in names:
        torch.testing.assert_close(given[name], exact[name], rtol=0, atol=1e-5)

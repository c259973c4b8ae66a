"""What front ends share: names of states, steps, and steps that fail. One rank, on a real process group."""

import contextlib
import copy
from dataclasses import dataclass
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist

import gradzip
from contract import assert_equal_states
from gradzip.averaging.session import Session
from gradzip.collectives import Mean
from gradzip.memory.names import StateNames
from gradzip.methods.base.compressor import Average, Compressor
from gradzip.methods.base.group import plan_groups


@dataclass
class Fails(Compressor):
    """Averages gradients, unless it is told to fail between its collective and its end."""

    fails: bool = False

    def reduce(self, group):
        average = yield Mean(group.vector)
        if self.fails:
            raise gradzip.PayloadError("this one")
        return Average([average])


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def connected(compressor, group, named):
    session = Session(compressor, "test")
    session.name_states(named, "model")
    session.connect(session.torch_engine(group, torch.device("cpu")), named, "handshake")
    return session


plans = WeakKeyDictionary()  # by session


def train(session, named):
    """One step in which all gradients are one bucket. Returns the averages."""
    parameters, plan = list(named.values()), plans.get(session)
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    if plan is None or not plan.fits(session.compressor, parameters):
        plan = plans[session] = session.plan(parameters, list(named))
    session.start(0, plan.groups, parameters, gradients, "bucket")
    session.finish("round")
    session.end(skipped := session.is_skipped())
    session.complete(skipped)
    return gradients


def layers(*names):
    return {name: torch.zeros(40, 40) for name in names}


def test_a_failed_step_is_dropped(group):
    compressor, named = Fails(), layers("v", "w")
    session = connected(compressor, group, named)
    compressor.fails = True
    with pytest.raises(gradzip.PayloadError, match="this one"):
        train(session, named)
    assert not session.buckets and not session.groups
    compressor.fails = False
    assert all(torch.equal(average, torch.ones(40, 40)) for average in train(session, named))
    assert {state.step for state in compressor.states.values()} == {1}


@pytest.mark.parametrize(
    ("spec", "compressed"),
    [
        ("block-float:bits=4", {"large", "wide"}),
        ("acpsgd:rank=8", {"large"}),  # its factors of `wide` are no smaller
        ("per-layer:wide=none,default=topk", {"large"}),
        ("phases:0=none,2=topk", {"large", "wide"}),
        ("auto:allow=[fp16,acpsgd(rank=8)]", {"large", "wide"}),
        ("phases:0=topk,2=acpsgd(rank=8),exempt=large", {"large", "wide"}),
        ("none", set()),
    ],
)
def test_what_is_compressed_is_logged_once(group, caplog, spec, compressed):
    """The parameters of the groups that are compressed, now or in a later phase, without frozen ones."""
    shapes = {"large": (100, 48), "wide": (8, 150), "bias": (100,), "exempt": (50, 50), "frozen": (90, 90)}
    named = {name: torch.nn.Parameter(torch.zeros(shape), name != "frozen") for name, shape in shapes.items()}
    compressor = gradzip.parse(spec)
    compressor.exempted = frozenset({"exempt"})
    with caplog.at_level("INFO", "gradzip"):
        session = connected(compressor, group, named)
        train(session, named)
    share = 100 * sum(named[name].numel() for name in compressed) / (4800 + 1200 + 100 + 2500)
    assert [record.getMessage() for record in caplog.records if record.name == "gradzip"] == [
        f"{len(compressed)} of 4 parameters, {share:.1f} % of the elements, by {spec}"
    ]
    if not ("none" in spec or "auto" in spec):
        groups = session.plan(list(named.values()), list(named)).groups
        assert {name for own in groups if own.compressed for name in own.names} == compressed | {"frozen"}


@pytest.mark.parametrize(
    ("spec", "exempt", "refuses"),
    [
        ("topk", {"v", "w"}, True),
        ("topk", {"v"}, False),
        ("fp16", {"v", "w"}, True),
        ("auto", {"v", "w"}, True),
        ("phases:0=none,2=topk", {"v", "w"}, True),
        ("phases:0=none,2=topk", {"v"}, False),
        ("per-layer:^w=topk,default=none", {"w"}, True),
        ("per-layer:^w=topk,default=none", {"v"}, False),
        ("per-layer:^x=topk,default=none", {"v", "w"}, False),
        ("none", {"v", "w"}, False),
        ("topk:min_numel=5000", {"v", "w"}, False),
    ],
)
def test_refuses_exemptions_of_all_that_is_compressed(group, spec, exempt, refuses):
    """By names that `exempt_modules` had of a model with more parameters, or with other shapes."""
    named = layers("v", "w") | {"bias": torch.zeros(40)}
    compressor = gradzip.parse(spec)
    compressor.exempted = frozenset({*exempt, "other"})
    expected = "^test: got exemptions of all parameters that the method compresses, expected some that are compressed"
    with pytest.raises(ValueError, match=expected) if refuses else contextlib.nullcontext():
        train(connected(compressor, group, named), named)


def test_frozen_parameters_that_are_not_exempt_count(group):
    """They may be trained later."""
    compressor = gradzip.TopK()
    compressor.exempted = frozenset("v")
    named = {name: torch.nn.Parameter(p, name != "w") for name, p in layers("v", "w").items()}
    assert connected(compressor, group, named).engine is not None


@pytest.mark.parametrize(
    "own, shards, refuses", [((0, 2), (3, 5), False), ((0, 2), (0, 5), True), ((0, 0), (0, 0), False)]
)
def test_ranks_with_other_shards_count(group, own, shards, refuses):
    """A rank may own none of the parameters that are compressed."""
    named, compressor = layers("v", "w"), gradzip.TopK()
    session = Session(compressor, "test")
    session.name_states(named, "model")
    engine = session.torch_engine(group, torch.device("cpu"))
    engine.sum_over_shards = lambda values: list(shards) if tuple(values) == own else list(values)
    with (
        mock.patch.object(compressor, "count_compressed", lambda *_: own),
        pytest.raises(ValueError, match="exemptions of all") if refuses else contextlib.nullcontext(),
    ):
        session.connect(engine, named, "handshake")


@pytest.mark.parametrize("spec", ["topk", "phases:0=topk,2=acpsgd", "dgc:momentum=0.9"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_is_dropped_after_its_averages_changes_no_state(group, spec, times):
    """Its session drops it, or another one continues with its states. A gradient may be averaged twice in it."""
    compressor, named = gradzip.parse(spec), layers("v", "w") | {"b": torch.zeros(40)}
    session = connected(compressor, group, named)
    train(session, named)
    before = copy.deepcopy(compressor.state_dict())
    expected = train(session, named)
    for drops in (True, False):
        compressor.load_state_dict(copy.deepcopy(before))
        session = connected(compressor, group, named)
        plan = session.plan(list(named.values()), list(named))
        for _ in range(times):
            session.start(0, plan.groups, plan.parameters, [torch.ones_like(p) for p in plan.parameters], "bucket")
            session.finish("round")
        session.end(False)
        changed = [vars(state)["step"] for part in compressor.parts for state in part.states.values()]
        assert times + 1 in changed
        if drops:
            session.drop()
        assert_equal_states(compressor.state_dict(), before)
        assert_equal_states(train(connected(compressor, group, named), named), expected)


def test_a_step_that_nobody_ends_stops_neither_phases_nor_the_loss_scale(group):
    """A model whose backward pass has failed, and whose hook is still referred to, beside one that goes on training."""

    class Scaler:
        scale = 4.0

        def get_scale(self):
            return self.scale

    scaler = Scaler()
    compressor = gradzip.parse("phases:0=none,2=topk").follow(scaler)
    first, second = (connected(compressor, group, layers(name)) for name in "vw")
    first.begin()
    named = layers("w")
    train(second, named)
    train(second, named)
    assert compressor.method_for("w", (40, 40)) is compressor.parts[1]
    for scaler.scale in (4.0, 1024.0):
        train(second, named)
        assert compressor.parts[1].states["w"].loss_scale == scaler.scale


def test_a_state_dict_of_the_last_step_of_a_phase_goes_on_in_the_same_job(group):
    """Its residuals are those of the next phase already."""
    compressor, named = gradzip.parse("phases:0=topk,2=acpsgd"), layers("v", "w")
    session = connected(compressor, group, named)
    for _ in range(2):
        train(session, named)
    saved, runs = copy.deepcopy(compressor.state_dict()), []
    for _ in range(2):
        runs.append([train(session, named) for _ in range(3)])
        compressor.load_state_dict(saved)
    for of_step in zip(*runs, strict=True):
        assert all(torch.equal(*averages) for averages in zip(*of_step, strict=True))


def test_steps_of_frozen_parameters_do_not_count(group):
    compressor, named = gradzip.parse("phases:0=none,2=topk"), layers("v", "w")
    session = connected(compressor, group, named)
    for name, parameter in named.items():
        (own,) = plan_groups(compressor, [parameter], [name], frozen=name == "v")
        session.start(name, [own], [parameter], [torch.ones_like(parameter)], name)
    session.finish("round")
    session.end(False)
    session.complete(False)
    assert [compressor.step_of(name, (40, 40)) for name in named] == [0, 1]


@pytest.mark.parametrize("adjacent", [True, False])
def test_uncompressed_gradients_of_a_bucket_keep_their_own_states(group, adjacent):
    """They are averaged as one, also with a residual that another method has left, and errors name the gradient."""
    compressor, named = gradzip.NoCompression(), layers("v", "w", "x")
    session = connected(compressor, group, named)
    parameters = list(named.values())
    plan = session.plan(parameters, list(named))
    (group_of_all,) = plan.groups
    residual = torch.randn(40, 40)

    def step(bad=()):
        bucket = torch.randn(3 * 1600)
        gradients = [part.view(40, 40) for part in bucket.split(1600)]
        if not adjacent:
            gradients = [gradient.clone() for gradient in gradients]
        for i in bad:
            gradients[i][3, 4] = torch.nan
        before = [gradient.clone() for gradient in gradients]
        session.start(0, plan.groups, parameters, gradients, "bucket")
        session.finish("round")
        session.end(skipped := session.is_skipped())
        session.complete(skipped)
        return [after - own for after, own in zip(gradients, before)], skipped

    compressor.memory.add_to_residual("w", residual)
    (v, w, x), skipped = step(bad=[0, 2])
    assert skipped and group_of_all.culprits == ["v", "x"]
    assert torch.equal(compressor.memory.by_parameter()["w"]["residual"], residual), "the step is undone"
    (v, w, x), skipped = step()
    assert not skipped and not v.any() and not x.any() and torch.allclose(w, residual, atol=1e-6)
    assert not compressor.memory.by_parameter(), "it is sent"
    changes, skipped = step()
    assert not skipped and not any(change.any() for change in changes)


def test_a_monitor_counts_steps_whose_buckets_have_changed(group):
    """Uncompressed gradients of a bucket are averaged as one: it is their names that begin a step."""
    compressor, named = gradzip.NoCompression(), layers("v", "w", "x")
    monitor = gradzip.Monitor(lambda *_: None)
    monitor.watch(compressor)
    session = connected(compressor, group, named)
    for buckets in (["vwx"], ["v", "wx"], ["vw", "x"], ["vwx"]):
        for number, names in enumerate(buckets):
            plan = session.plan([named[name] for name in names], [*names])
            session.start(number, plan.groups, plan.parameters, [torch.ones_like(p) for p in plan.parameters], names)
        session.finish("round")
        session.end(False)
        session.complete(False)
    assert monitor.steps == 3, "the last one has not ended"


def test_the_loss_scale_is_read_once_a_step(group):
    """A GradScaler keeps it on the device: each reading waits."""

    class Scaler:
        readings = 0

        def get_scale(self):
            self.readings += 1
            return 4.0

    scaler = Scaler()
    compressor = gradzip.PerLayer([("v|w", gradzip.TopK())], default=gradzip.ACPSGD(rank=2))
    named = layers("v", "w", "x", "y")
    session = connected(compressor.follow(scaler), group, named)
    train(session, named)
    assert scaler.readings == 1
    train(session, named)
    assert scaler.readings == 2


# --- names of states


def test_models_with_equal_names_get_prefixes():
    compressor, models = gradzip.TopK(), [layers("v", "w"), layers("w", "x"), layers("x"), layers("w"), layers("w")]

    def prefix(model, group=""):
        session = Session(compressor, "test")
        session.name_states(model, "model", group)
        return session.prefix

    assert [prefix(model) for model in models[:3]] == ["", "model1.", ""]
    assert prefix(dict(models[1])) == "model1."  # wrapped again
    assert [prefix(model, "set2.") for model in models[3:]] == ["set2.", "set2.model1."]  # numbered on their own
    names = compressor.memory.names
    assert names.find(models[1]["x"]) == ("model1.", "x") and names.find(torch.zeros(1)) is None


def test_states_of_deleted_parameters_are_freed_and_so_are_their_names(group):
    compressor, named = gradzip.TopK(), layers("v", "w")
    train(connected(compressor, group, named), named)
    cycle = [named.pop("w")]
    cycle.append(cycle)  # which the garbage collector finds
    del cycle
    session = connected(compressor, group, layers("w"))
    assert session.prefix == "" and compressor.memory.by_parameter().keys() == {"v"}


def test_states_that_are_loaded_after_their_parameters_are_deleted_are_kept(group):
    compressor, named = gradzip.TopK(), layers("v", "w")
    train(connected(compressor, group, named), named)
    saved = copy.deepcopy(compressor.state_dict())
    compressor.load_state_dict(saved)
    named.clear()
    new = layers("v", "w")
    connected(compressor, group, new)
    assert_equal_states(compressor.state_dict(), saved)


def test_parameters_without_names_are_numbered():
    names, model, parameters = StateNames(), torch.nn.Module(), [torch.zeros(1) for _ in range(3)]
    names.add("", {"0": model})
    assert [names.add_number("", parameter, model) for parameter in parameters] == ["0", "1", "2"]
    assert names.taken({"0": torch.nn.Module()}) == [""] and names.taken({"0": parameters[0]}) == []


@pytest.mark.parametrize("compressor", [gradzip.TopK, "topk", None])
def test_what_is_no_compressor_is_refused(compressor):
    with pytest.raises(TypeError, match="^test: got .*, expected a compressor, such as"):
        Session(compressor, "test")


def test_a_profiler_shows_the_parts_of_a_step(group):
    compressor, named = gradzip.PowerSGD(rank=2), layers("v", "w")
    session = connected(compressor, group, named)
    with torch.profiler.profile() as profile:
        train(session, named)
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("gradzip::")}
    # A bucket's first round, and the second one of all buckets.
    assert counts == {"gradzip::encode": 1, "gradzip::exchange": 2, "gradzip::decode": 2, "gradzip::commit": 1}

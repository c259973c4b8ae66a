"""What front ends share: names of states, steps, and steps that fail. One rank, on a real process group."""

import gc
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import gradzip
from gradzip.averaging.session import Session
from gradzip.collectives import Mean
from gradzip.memory.names import StateNames
from gradzip.methods.base.compressor import Compressor


@dataclass
class Fails(Compressor):
    """Averages gradients, unless it is told to fail between its collective and its end."""

    fails: bool = False

    def reduce(self, grad, state):
        average = yield Mean(grad)
        if self.fails:
            raise gradzip.PayloadError("this one")
        return average


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


def train(session, named):
    """One step in which all gradients are one bucket. Returns the averages."""
    gradients = [torch.ones_like(parameter) for parameter in named.values()]
    plan = session.plan(list(named.values()), list(named))
    session.start(0, plan.units, gradients, "bucket")
    session.finish("round")
    session.end(session.overflows(gradients))
    return gradients


def layers(*names):
    return {name: torch.zeros(40, 40) for name in names}


def test_a_failed_step_is_dropped(group):
    compressor, named = Fails(), layers("v", "w")
    session = connected(compressor, group, named)
    compressor.fails = True
    with pytest.raises(gradzip.PayloadError, match="this one"):
        train(session, named)
    assert not session.buckets and not session.units and not compressor.memory.in_step
    compressor.fails = False
    assert all(torch.equal(average, torch.ones(40, 40)) for average in train(session, named))
    assert {state.step for state in compressor.states.values()} == {1} and not compressor.memory.in_step


def test_a_dropped_step_does_not_stop_phases(group):
    """A model whose backward pass has failed, beside one that goes on training."""
    compressor = gradzip.parse("phases:0=none,1=topk")
    first, second = (connected(compressor, group, layers(name)) for name in "vw")
    first.begin()
    train(second, layers("w"))
    assert compressor.method_for("w", (40, 40)) is compressor.parts[0]
    first.drop()
    train(second, layers("w"))
    assert compressor.method_for("w", (40, 40)) is compressor.parts[1]


def test_the_loss_scale_is_read_once_a_step_and_method(group):
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
    assert scaler.readings == 2
    train(session, named)
    assert scaler.readings == 4


# --- names of states


def test_models_with_equal_names_get_prefixes():
    names, models = StateNames(), [layers("v", "w"), layers("w", "x"), layers("x")]
    assert [names.prefix(model, "model") for model in models] == ["", "model1.", ""]
    assert names.prefix(dict(models[1]), "model") == "model1."  # wrapped again
    assert names.prefix(layers("w"), "model", "set2.") == "set2."  # groups are numbered on their own
    assert names.prefix(layers("w"), "model", "set2.") == "set2.model1."
    assert names.find(models[1]["x"]) == ("model1.", "x") and names.find(torch.zeros(1)) is None


def test_states_of_deleted_parameters_are_freed_and_their_names_stay_reserved(group):
    compressor, named = gradzip.TopK(), layers("v", "w")
    train(connected(compressor, group, named), named)
    del named["w"]
    gc.collect()
    new = layers("w")
    session = connected(compressor, group, new)
    assert session.prefix == "model1." and not compressor.states.keys() & {"w"} and "v" in compressor.states


def test_parameters_without_names_are_numbered():
    names, model, parameters = StateNames(), torch.nn.Module(), [torch.zeros(1) for _ in range(3)]
    prefix = names.prefix({"0": model}, "model")
    assert [names.add_number(prefix, parameter, model) for parameter in parameters] == ["0", "1", "2"]
    assert names.prefix({"0": torch.nn.Module()}, "model") == "model1."


@pytest.mark.parametrize("compressor", [gradzip.TopK, "topk", None])
def test_what_is_no_compressor_is_refused(compressor):
    with pytest.raises(TypeError, match="^test: got .*, expected a compressor, such as"):
        Session(compressor, "test")

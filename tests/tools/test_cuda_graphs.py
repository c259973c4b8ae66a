"""What keeps torch.cuda.graph from capturing a step, found on a stand-in device: the table of docs/gpu.md."""

import contextlib
import itertools
import math
import re
import shutil
from unittest import mock

import pytest
import torch

import gradzip
import kinds
from benchmarks.common.results import END
from benchmarks.device_ops import capture
from benchmarks.device_ops.__main__ import Loopback, ddp_steps, fake_group, future, horovod_steps, noise
from benchmarks.device_ops.capture import BETWEEN, KEYS, OTHER_WORK, TWO_STEPS, obstacles
from benchmarks.device_ops.stand_in import DEVICE, stand_in
from gradzip.averaging.session import Session
from gradzip.memory.state import Key, State
from gradzip.ops import replays
from paths import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")

REFILL = "run python -m benchmarks.device_ops.capture --write"
TABLE = capture.PAGE.read_text().partition(capture.START)[2].partition(END)[0]
METHODS = dict(capture.methods())
SAMPLE = ["none", "topk", "block-float", "acpsgd"]

# What capture allows a launcher to call, and what is called before any launch.
LAUNCHES = {"cudaLaunchKernelEx", "cudaMemsetAsync", "cudaGetLastError", "cudaGetErrorString"}
QUERIES = {
    "cudaDeviceGetAttribute", "cudaDriverGetVersion", "cudaGetDevice", "cudaGetDeviceCount", "cudaGetDeviceProperties",
    "cudaRuntimeGetVersion",
}  # fmt: skip


def test_the_table_has_all_methods():
    """Each has a row, in the order of their names."""
    titles = re.findall(r"^\| `([\w-]+)", TABLE, re.MULTILINE)
    assert list(dict.fromkeys(titles)) == list(METHODS), REFILL


@pytest.mark.parametrize("name", kinds.params(METHODS, SAMPLE))
def test_the_table_is_what_is_found(name):
    of_method = re.findall(rf"^\| `{name}[`:].*\n", TABLE, re.MULTILINE)
    assert of_method == [f"{line}\n" for line in capture.lines(capture.rows_of(METHODS[name]))], REFILL


@pytest.mark.parametrize(
    ("wait", "found"),
    [
        (lambda grad, state: grad.sum().item(), BETWEEN),
        (lambda grad, state: gradzip.ops.bernoulli(grad, state.key(0).bits), KEYS),
        (lambda grad, state: grad[: 8 + state.step].neg(), OTHER_WORK),
        (lambda grad, state: grad[: 8 + state.step % 2].neg(), TWO_STEPS),
    ],
)
@pytest.mark.parametrize("part", ["hooks", "end"])
def test_obstacles_are_found_in_their_part(wait, found, part):
    class Mutant(gradzip.BlockFloat):
        def reduce(self, group):
            if part == "hooks":
                wait(group.gradients[0], group.state)
            average = yield from super().reduce(group)
            if part == "end":
                wait(group.gradients[0], group.state)
            return average

    arguments = {"rounding": "nearest", "error_feedback": False}
    without, mutant = (obstacles(m(**arguments)) for m in (gradzip.BlockFloat, Mutant))
    assert without == capture.Obstacles((), ())
    assert set(getattr(mutant, part)) == {*getattr(without, part), found}
    other = "end" if part == "hooks" else "hooks"
    assert getattr(mutant, other) == getattr(without, other)


def test_states_that_move_are_found():
    never = property(lambda session: False, lambda session, value: None)
    found = pytest.raises(AssertionError, match="a replay reads states where they were")
    with mock.patch("gradzip.averaging.session.Session._is_captured", never, create=True), found:
        obstacles(gradzip.BlockFloat(rounding="nearest"))


def gradients_on(device, number):
    return {n: device.tensor(noise(s.numel(), number).view(s).clone()) for n, s in capture.SHAPES.items()}


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("spec", ["topk", "powersgd", "block-float:rounding=nearest", "momentum:inner=powersgd"])
def test_a_first_step_is_not_captured(spec, checks):
    """It adds tensors to states. It is dropped: later steps are as if it had not been."""
    runs = []
    for tries in (False, True):
        compressor = gradzip.parse(spec).skip_nonfinite(checks)
        with stand_in() as device:
            run = horovod_steps(compressor, capture.SHAPES, 2, device)
            if tries:
                refused = pytest.raises(RuntimeError, match="gets or loses tensors.*run steps of the method before")
                with device.capturing(), device.counting() as counts, refused:
                    run(gradients_on(device, 0), counts)
            averages = []
            for number in range(2):
                gradients = gradients_on(device, number)
                with device.counting() as counts:
                    run(gradients, counts)
                averages += [gradient.host for gradient in gradients.values()]
        runs.append(averages + [tensor.host for tensor in capture.tensors_of(compressor).values()])
    assert all(map(same_bits, *runs))


# Of methods that are made of others, or whose arguments no example has: what captured steps need.
REFUSED = {
    "auto:every=0": "the method that it has chosen, gradzip.parse(compressor.report['method'])",
    "momentum:inner=topk(theta=0.9),warmup_steps=auto,beta2=0.5": "a number as warmup_steps",
    "momentum:inner=topk(theta=0.9,select=sampled)": "select='exact'",
    "phases:0=topk,1=acpsgd(reuse=False)": "reuse=True",
    "hierarchical:inner=qsgd(coding=always_elias),local_size=1": "coding='elias'",
} | {
    spec: needs
    for spec in itertools.chain(*METHODS.values())
    if (needs := gradzip.parse(spec).capture_needs) is not None
}


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("steps", [horovod_steps, ddp_steps])
@pytest.mark.parametrize("spec", kinds.params(REFUSED, ["auto:every=0", "phases:0=topk,1=acpsgd(reuse=False)"]))
def test_what_cannot_be_captured_is_refused(spec, steps, checks):
    """In the first hook, before anything waits. Under DDP, later steps are as if that one had not been; Horovod's
    optimizer does not go on after an error in a hook."""
    runs = []
    for tries in (False, True) if steps is ddp_steps else (True,):
        compressor = gradzip.parse(spec).skip_nonfinite(checks)
        with fake_group(2), mock.patch("gradzip.ddp.Future", future), stand_in() as device:
            run = steps(compressor, capture.SHAPES, 2, device)
            found = []
            for number in range(4):
                if tries and number == 2:
                    needs = re.escape(REFUSED[spec])
                    refused = pytest.raises(
                        RuntimeError, match=f"CUDA graph, expected {needs} for that: its host decid"
                    )
                    with device.capturing(), device.counting() as counts, refused as error:
                        run(gradients_on(device, number), counts)
                    text = str(error.value)
                    assert counts.syncs == 0 and "\n" not in text and text.partition(":")[0] in repr(compressor)
                    if steps is not ddp_steps:
                        return
                gradients = gradients_on(device, number)
                with device.counting() as counts:
                    run(gradients, counts)
                found += [gradient.host.clone() for gradient in gradients.values()]
            parts = [tensor.host for part in compressor.parts for tensor in capture.tensors_of(part).values()]
        runs.append(found + parts)
    assert all(map(same_bits, *runs))


def test_gradiveq_is_not_captured():
    """Whose steps the stand-in has not all operations for."""
    with stand_in() as device:
        run = horovod_steps(gradzip.GradiVeQ(), {"conv": (32, 16, 3, 3)}, 2, device)
        refused = pytest.raises(RuntimeError, match="GradiVeQ: .* expected another method, such as PowerSGD")
        with device.capturing(), device.counting() as counts, refused:
            run({"conv": device.tensor(torch.ones(32, 16, 3, 3))}, counts)


@pytest.mark.parametrize("name", kinds.params(METHODS, SAMPLE))
def test_what_is_refused_is_what_is_found(name):
    """If the host reads more than whether averages are finite, or steps queue other work. `skip_nonfinite(False)`, and
    a graph of two steps, are for the other obstacles."""
    for spec in METHODS[name]:
        compressor = gradzip.parse(spec).skip_nonfinite(False)
        needs, found = compressor.capture_needs, obstacles(compressor)
        assert (needs is not None) == bool({*found.hooks, *found.end} - {TWO_STEPS}), (spec, needs, found)


@pytest.mark.parametrize("spec", ["fft-range:theta=0.5,value_range=1.0", "dct-range:theta=0.5,value_range=1.0"])
def test_clamped_values_are_counted_where_they_were(spec):
    """In memory that a replay adds to."""
    compressor = gradzip.parse(spec)
    with stand_in() as device:
        run, found = horovod_steps(compressor, capture.SHAPES, 2, device), []
        for number in range(3):
            with device.capturing() if number == 2 else contextlib.nullcontext(), device.counting() as counts:
                run(gradients_on(device, number), counts)
            found.append(next(iter(compressor._clamped.values())))
    assert found[0].host.item() > 0 and found[0] is found[1] is found[2]


def test_adamw_counts_steps_outside_of_graphs():
    with stand_in() as device:
        parameter = device.tensor(torch.zeros(64, 64)).requires_grad_()
        parameter.grad = device.tensor(torch.ones(64, 64))
        with device.capturing(), pytest.raises(RuntimeError, match="AdamW: got a step to capture.*torch.optim.AdamW"):
            gradzip.optim.AdamW([parameter]).step()


def same_bits(x, y):
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.filterwarnings("ignore:got an average gradient")  # a step that is not captured warns
@pytest.mark.parametrize("broken", [None, 4])
@pytest.mark.parametrize("name", kinds.params(METHODS, SAMPLE))
def test_captured_steps_have_the_same_bits(name, broken):
    """They leave a state where the last one did, so that replays find it. A step with a NaN changes none.

    Random numbers are those of the keys, to compare.
    """
    for spec in METHODS[name]:
        undone_on_device, runs = gradzip.parse(spec).undone_on_device, []
        if spec in REFUSED or (broken is not None and not undone_on_device):
            continue
        for captured in (False, True):
            compressor = gradzip.parse(spec).skip_nonfinite(undone_on_device)
            with stand_in() as device, mock.patch.object(replays, "address", lambda where, draws=True: 0):
                run = horovod_steps(compressor, capture.SHAPES, 2, device)
                averages = []
                for number in range(6):
                    gradients = gradients_on(device, number)
                    if number == broken:
                        gradients["a.weight"].host[3, 5] = math.nan
                    within = device.capturing() if captured and number > 2 else contextlib.nullcontext()
                    with within, device.counting() as counts:
                        run(gradients, counts)
                    averages += [gradient.host.clone() for gradient in gradients.values()]
            runs.append((averages, {key: tensor.host for key, tensor in capture.tensors_of(compressor).items()}))
        (outside, states), (inside, in_place) = runs
        assert states.keys() <= in_place.keys(), spec
        kept = [in_place[key] for key in states]
        assert all(map(same_bits, [*outside, *states.values()], [*inside, *kept])), spec


def averages(spec, how, step=3, rank=0):
    """The averages of steps that begin as replays do: with the same gradients, and the keys of one step.

    how: for each step, a function of the device that returns what to run it in.
    """
    compressor, found = gradzip.parse(spec), []
    on_rank = mock.patch.object(Loopback, "rank", property(lambda engine: rank, lambda engine, _: None), create=True)
    of_one_step = mock.patch.object(State, "key", lambda state, seed: Key(seed, step, state.name, state.rank))
    with stand_in() as device, on_rank:
        run = horovod_steps(compressor, capture.SHAPES, 2, device)
        for number, within in enumerate([by_keys] * 3 + how):
            gradients = gradients_on(device, min(number, 3))
            for gradient in gradients.values():
                gradient.host.clamp_(min=0.0)  # signs of zeros are drawn
            keys = of_one_step if number >= 3 else contextlib.nullcontext()
            with within(device), keys, device.counting() as counts:
                run(gradients, counts)
            found.append(torch.cat([gradient.host.clone().view(-1) for gradient in gradients.values()]))
    return found[3:]


def captured(device):
    return device.capturing()


def by_keys(device):
    return contextlib.nullcontext()


def by_number(number):
    on_device = torch.tensor([number])
    return lambda device: mock.patch.object(replays, "address", lambda where, draws=True: on_device.data_ptr())


@pytest.mark.parametrize("name", kinds.params(METHODS, ["natural", "topk"]))
def test_replays_draw_other_numbers(name):
    """Those of the keys and of the number of the replay, and other ones than those of the keys alone."""
    for spec in METHODS[name]:
        if spec in REFUSED:
            continue
        first, other = (averages(spec, [by_keys], step)[0] for step in (3, 4))
        draws, replayed = not same_bits(first, other), averages(spec, [captured] * 3)
        assert same_bits(replayed[0], first) == (not draws), spec
        if draws:
            assert not same_bits(replayed[0], replayed[1]), spec
            assert all(map(same_bits, replayed, averages(spec, list(map(by_number, range(3)))))), spec
        assert draws or name != "natural"


def test_ranks_replay_the_same_shared_draws():
    for spec, agree in (("randomk:theta=0.9,error_feedback=False", True), ("natural", False)):
        first, second = (averages(spec, [captured] * 3, rank=rank) for rank in (0, 1))
        assert all(torch.equal(*pair) for pair in zip(first, second)) == agree


def test_ranks_that_connect_count_alike():
    """A rank that joins has counted no replays. Captured steps count as steps, so that each has keys of its own."""
    sessions, connect = [], Session.connect
    noted = mock.patch.object(Session, "connect", lambda own, *of: sessions.append(own) or connect(own, *of))
    with stand_in() as device, noted:
        compressor = gradzip.Natural()
        run = horovod_steps(compressor, capture.SHAPES, 2, device)
        for number in range(4):
            with device.capturing() if number % 2 else contextlib.nullcontext(), device.counting() as counts:
                run(gradients_on(device, number), counts)
        (session,) = sessions
        (count,) = session._replays.values()
        assert count.host.item() == 2 and {state.step for state in compressor.states.values()} == {4}
        session.connect(Loopback(2, compressor.traffic, device.uncounted), {}, "handshake")
        assert session._replays == {DEVICE: count} and count.host.item() == 0


def test_launchers_call_nothing_that_capture_forbids():
    """Workspaces are torch's (`gradzip/ops/_native.py`): launchers neither allocate, nor copy, nor wait."""
    sources = [*ROOT.glob("csrc/cuda/**/*.cu"), *ROOT.glob("csrc/cuda/**/*.cuh"), *ROOT.glob("csrc/cuda/**/*.h")]
    called = {name for path in sources for name in re.findall(r"\b(cuda[A-Z]\w*)\(", path.read_text())}
    assert LAUNCHES & called and called <= LAUNCHES | QUERIES, called - LAUNCHES - QUERIES

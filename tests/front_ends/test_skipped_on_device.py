"""Steps that a device skips: the host learns it in the next one. On the stand-in for a device."""

import contextlib
import itertools
import math
import shutil
import warnings
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import gradzip
import gradzip.ddp
import gradzip.fsdp
import kinds
from benchmarks.device_ops import __main__ as device_ops
from benchmarks.device_ops.__main__ import FRONT_ENDS, SHARDS, SMALLEST, STEPS, fake_group, noise, shapes_of, world_size
from benchmarks.device_ops.stand_in import StandInTensor, stand_in
from gradzip.memory.verdict import read_all
from gradzip.methods.base.gather import GatherCompressor

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")

SHAPES = shapes_of(SMALLEST)
RANKS = 3
SETTLED = 3  # steps until no state gets tensors that it has not had


def is_undone_on_device(compressor):
    return compressor.undone_on_device


def never_waits(compressor):
    """Whether what is sent, and what is drawn on the host, is known before a step."""
    if (inner := getattr(compressor, "inner", None)) is not None:
        return never_waits(inner)
    fixed = getattr(compressor, "fixed_nbytes", True) and getattr(compressor, "exchange", "gather") == "gather"
    keeps = getattr(compressor, "warm_start", True) and getattr(compressor, "reuse", True)
    return fixed and keeps and all(never_waits(part) for part in compressor.parts if part is not compressor)


def is_verified_on_device(compressor):
    return isinstance(compressor, GatherCompressor) and compressor.undone_on_device and never_waits(compressor)


SPECS = kinds.examples(is_undone_on_device)


class Job:
    """Steps of one rank, whose gradients all ranks have."""

    def __init__(self, compressor, front_end, device, dtype=torch.float32):
        self.compressor, self.device, self.dtype = compressor, device, dtype
        self._run = STEPS[front_end](compressor, SHAPES, RANKS, device, dtype)

    def step(self, number, broken=None, value=math.nan):
        """Run a step. broken: the name of a gradient that has `value`. Returns the averages and the counts."""
        gradients = {name: noise(s.numel(), number).view(s).to(self.dtype).clone() for name, s in SHAPES.items()}
        if broken is not None:
            gradients[broken].view(-1)[7] = value
        gradients = {name: self.device.tensor(gradient) for name, gradient in gradients.items()}
        with self.device.counting() as counts:
            self._run(gradients, counts)
        return {name: gradient.host for name, gradient in gradients.items()}, counts

    def states(self):
        """Copies of all tensors of the states, and their step counts."""
        tensors, steps = {}, {}
        for part in self.compressor.parts:
            for name, state in part.states.items():
                steps[name] = state.step
                tensors[name] = {k: v.host.clone() for k, v in vars(state).items() if isinstance(v, StandInTensor)}
        return tensors, steps


@contextlib.contextmanager
def on_stand_in(front_end="ddp"):
    with (
        fake_group(world_size(front_end, RANKS)),
        mock.patch("gradzip.ddp.Future", device_ops.future),
        stand_in() as device,
    ):
        yield device
        with warnings.catch_warnings(), contextlib.suppress(gradzip.PayloadError):
            warnings.simplefilter("ignore")
            read_all()


@contextlib.contextmanager
def job(spec, front_end, dtype=torch.float32):
    with on_stand_in(front_end) as device:
        yield Job(gradzip.parse(spec), front_end, device, dtype)


def equal(states, others):
    return states.keys() == others.keys() and all(
        of.keys() == others[name].keys() and all(torch.equal(of[k], others[name][k]) for k in of)
        for name, of in states.items()
    )


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("spec", kinds.params(SPECS, kinds.FIRST))
def test_a_skipped_step_changes_no_state_and_is_counted(spec, front_end):
    """Each gradient in turn, with NaN and with infinity."""
    with job(spec, front_end) as trained:
        cases = list(itertools.product(SHAPES, [math.nan, math.inf]))
        if trained.compressor.asymmetric:  # the stand-in's ranks have the first partition alone
            last = "a.weight" if front_end == "ddp" else "b.weight"  # DDP's buckets have the last parameters first
            cases = [case for case in cases if case[0] != last]
        for number in range(SETTLED):
            trained.step(number)
        for number, (broken, value) in enumerate(cases):
            before, steps = trained.states()
            _, counts = trained.step(SETTLED + 2 * number, broken, value)
            assert counts.syncs == 0 or not never_waits(trained.compressor), counts.waits
            after, counted = trained.states()
            assert equal(before, after), (broken, value)
            assert counted == {name: step + (step > 0) for name, step in steps.items()}  # 0: what is not compressed
            with pytest.warns(UserWarning, match="not finite.*the step is skipped"):
                trained.step(SETTLED + 2 * number + 1)
            assert not trained.compressor.last_step_skipped
            assert all(torch.isfinite(x).all() for of in trained.states()[0].values() for x in of.values())


@pytest.mark.parametrize("spec", kinds.params(SPECS, kinds.FIRST))
def test_the_first_step_may_be_skipped(spec):
    """A state of which some methods cannot tell what it was: the host waits, and undoes it."""
    with job(spec, "horovod") as trained, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained.step(0, "a.weight")
        assert trained.compressor.last_step_skipped
        for x in (x for of in trained.states()[0].values() for x in of.values()):
            assert not x.any()
        averages, _ = trained.step(1)
        assert all(average.isfinite().all() for average in averages.values())


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("spec", ["none", "fp16", "topk", "acpsgd"])
def test_averages_that_overflow_in_float16(spec, front_end):
    """All averages of the step become NaN, so that a GradScaler skips the steps of all optimizers."""
    with job(spec, front_end, torch.float16) as trained:
        for number in range(SETTLED):
            trained.step(number)
        before, _ = trained.states()
        averages, counts = trained.step(SETTLED, "b.bias", math.inf)
        assert counts.syncs == 0 and equal(before, trained.states()[0])
        if front_end != "ddp":  # which has them in its buckets
            assert all(average.isnan().all() and average.dtype == torch.float16 for average in averages.values())
        assert trained.compressor.last_step_skipped


@pytest.mark.parametrize("spec", kinds.params(SPECS, ["none", "acpsgd", "topk"]))
def test_a_shard_of_another_rank_is_not_finite(spec):
    """It is known from the exchange between the shards of a model."""
    with job(spec, "fsdp") as trained:
        for number in range(SETTLED):
            trained.step(number)
        before, _ = trained.states()
        with mock.patch.object(torch.distributed, "all_reduce", lambda number, group: number.fill_(math.nan)):
            averages, counts = trained.step(SETTLED)
        assert counts.syncs == 0 or not never_waits(trained.compressor), counts.waits
        assert all(average.isnan().all() for average in averages.values())
        assert equal(before, trained.states()[0])
        with pytest.warns(UserWarning, match="average gradient on another rank"):
            trained.step(SETTLED + 1)
        assert not trained.compressor.last_step_skipped


def test_a_verdict_can_be_asked_for_before_the_next_step():
    with job("topk", "ddp") as trained:
        for number in range(SETTLED):
            trained.step(number)
        trained.step(SETTLED, "a.weight")
        with pytest.warns(UserWarning, match="average gradient of 'a.weight' that is not finite, expected"):
            trained.compressor.state_dict()
        assert trained.compressor.last_step_skipped
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it warns once
            trained.step(SETTLED + 1)
        assert not trained.compressor.last_step_skipped


def corrupted(launch, change):
    """`_Looped.result`, of which a payload is changed: of a rank, a byte of it."""

    def result(pending):
        received = launch(pending)
        if isinstance(received, list) and received[0].numel() > 100:
            received = [payload.clone() if rank == 1 else payload for rank, payload in enumerate(received)]
            change(received[1].host)
        return received

    return result


CHANGES = {
    "body": lambda payload: payload[70:71].bitwise_xor_(4),
    "digest": lambda payload: payload[5:6].bitwise_xor_(1),
    "fields": lambda payload: payload[32:33].bitwise_xor_(1),
}


@pytest.mark.parametrize("spec", kinds.params(kinds.examples(is_verified_on_device), kinds.FIRST))
def test_a_corrupt_payload_changes_nothing_and_is_an_error_in_the_next_step(spec):
    with job(spec, "horovod") as trained:
        for number in range(SETTLED):
            trained.step(number)
        looped = device_ops._Looped
        for number, (part, change) in enumerate(CHANGES.items()):
            before, _ = trained.states()
            with mock.patch.object(looped, "result", corrupted(looped.result, change)):
                averages, counts = trained.step(SETTLED + 3 * number)
            assert counts.syncs == 0
            assert all(average.isnan().all() for average in averages.values())
            assert equal(before, trained.states()[0]), part
            with (
                pytest.warns(UserWarning, match="not finite"),
                pytest.raises(gradzip.PayloadError, match=f"from rank 1 of {RANKS}"),
            ):
                trained.step(SETTLED + 3 * number + 1)
            trained.step(SETTLED + 3 * number + 2)
            assert not trained.compressor.last_step_skipped


# --- optimizers


class Model:
    """Parameters on the device, averaged by DDP's hook, and an optimizer of them."""

    def __init__(self, compressor, device, make):
        self.device, self.counts = device, None
        named = {name: noise(s.numel(), len(name)).view(s).clone() for name, s in SHAPES.items()}
        self.named = {name: torch.nn.Parameter(device.tensor(value)) for name, value in named.items()}
        self.hook = gradzip.ddp.HookState(compressor, named_parameters=self.named.items(), find_unused_parameters=False)
        self.optimizer = make(list(self.named.values()))

    def step(self, number, broken=False, scaler=None):
        """A backward pass and a step of the optimizer. Returns the waits of both."""
        gradients = [noise(p.numel(), number).clone() for p in self.named.values()]
        gradients[0][3] = math.nan if broken else gradients[0][3]
        with self.device.counting() as counts:
            self.backward(gradients)
            backward = counts.syncs
            step = self.optimizer.step if scaler is None else lambda: scaler.step(self.optimizer)
            step()
        return backward, counts.syncs - backward

    def backward(self, gradients):
        """The part of gradzip in a backward pass."""
        parameters = list(self.named.values())
        bucket = device_ops.grad_bucket(0, parameters, self.device.tensor(torch.cat(gradients)), True)
        gradzip.ddp.hook(self.hook, bucket)
        for parameter, gradient in zip(parameters, bucket.gradients()):
            parameter.grad = gradient

    def tensors(self):
        """Copies of parameters and of the optimizer's tensors on the device, and its counters."""
        found = [on_host(p) for p in self.named.values()]
        for state in self.optimizer.state.values():
            found += [on_host(x) for x in state.values() if isinstance(x, torch.Tensor)]
        return found


class ShardedModel(Model):
    """The same with FSDP2, whose forward and backward passes are real, and counted too."""

    def __init__(self, compressor, device, make):
        self.device = device
        mesh = init_device_mesh("cuda", (RANKS, SHARDS), mesh_dim_names=("replicate", "shard"))
        self.model = device_ops.Sharded(SHAPES, mesh["shard"], device)
        self.named = self.model.named
        gradzip.fsdp.compress(self.model, compressor, mesh["replicate"].get_group())
        self.optimizer = make(list(self.named.values()))

    def backward(self, gradients):
        named = zip(self.named.items(), gradients)
        self.model.backward({name: self.device.tensor(gradient.view(p.shape)) for (name, p), gradient in named})


def on_host(x):
    """A copy of a tensor, or of this rank's shard of it."""
    x = x.to_local() if hasattr(x, "to_local") else x
    return getattr(x, "host", x).detach().clone()


@contextlib.contextmanager
def model(spec, make, front_end="ddp"):
    with on_stand_in(front_end) as device:
        yield (ShardedModel if front_end == "fsdp" else Model)(gradzip.parse(spec), device, make)


def muon(parameters):
    groups = [{"params": [p for p in parameters if p.ndim == 2]}]
    return gradzip.optim.Muon([*groups, {"params": [p for p in parameters if p.ndim != 2], "adamw": True}], lr=0.01)


SKIP_ON_DEVICE = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "gradzip's AdamW": lambda parameters: gradzip.optim.AdamW(parameters),
    "gradzip's Muon": muon,
}

OF_SHARDS = [("fsdp", "fused AdamW"), ("fsdp", "gradzip's AdamW")]  # others do not take shards


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize(("front_end", "make"), [*(("ddp", make) for make in SKIP_ON_DEVICE), *OF_SHARDS])
def test_optimizers_skip_on_the_device(front_end, make, first):
    """The host does not wait. Later steps are those of training without the one that is skipped."""
    found = []
    for skips in (True, False):
        with model("none", SKIP_ON_DEVICE[make], front_end) as trained, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(6):
                if number == first and skips:
                    before = trained.tensors()
                    assert trained.step(100, broken=True)[1] == 0
                    assert not hasattr(trained.optimizer, "found_inf")
                    assert all(map(torch.equal, before[: len(SHAPES)], trained.tensors()[: len(SHAPES)]))
                waits = trained.step(number)
                assert waits == (0, 0) or number == 0  # which plans and connects
            found.append(trained.tensors())
    assert all(map(torch.equal, *found)) and len(found[0]) == len(found[1]) > 2 * len(SHAPES) - 1


@pytest.mark.filterwarnings("ignore:got an average gradient")  # in steps that are not captured
@pytest.mark.parametrize("broken", [None, 2, 3, 4])
@pytest.mark.parametrize("make", [SKIP_ON_DEVICE["fused AdamW"], lambda params: gradzip.optim.DGCSGD(params, lr=0.1)])
def test_optimizers_before_in_and_after_a_captured_step(make, broken):
    """They do not wait for it, have the same bits, and skip the step that they skip otherwise."""
    found = []
    for captured in (None, 3):
        with model("topk:theta=0.5", make) as trained:
            for number in range(6):
                with trained.device.capturing() if number == captured else contextlib.nullcontext():
                    _, waits = trained.step(number, broken=number == broken)
                assert waits == 0
            found.append(trained.tensors())
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("front_end", ["ddp", "fsdp"])
def test_for_other_optimizers_the_host_waits_in_their_step(front_end):
    with model("none", lambda parameters: torch.optim.AdamW(parameters, foreach=True), front_end) as trained:
        assert trained.step(0)[1] == 1
        before = trained.tensors()
        with pytest.warns(UserWarning, match="average gradient of '(shard0of2.)?a[._]weight'"):
            assert trained.step(1, broken=True) == (0, 1)
        assert all(map(torch.equal, before, trained.tensors()))
        assert all(p.grad is not None for p in trained.named.values())
        assert trained.step(2) == (0, 1)
        assert not all(map(torch.equal, before, trained.tensors()))


def test_a_grad_scaler_sees_a_step_that_the_device_skips():
    with model("topk", lambda parameters: torch.optim.AdamW(parameters, fused=True)) as trained:
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        found = []
        scaler.step = lambda optimizer: found.append(optimizer)  # it does not step
        trained.hook.compressor.follow(scaler)
        trained.step(0, broken=True, scaler=scaler)
        assert found and all(p.grad.host.isnan().all() for p in trained.named.values())


def adamw(parameters):
    return gradzip.optim.AdamW(parameters)


def counts_of(optimizer):
    return [float(state["step"]) for state in optimizer.state.values()]


def gentle(parameters):
    """Two optimizers: of the first, the host waits to know if a step is skipped."""
    return torch.optim.SGD(parameters[:1], lr=0.1, foreach=True), gradzip.optim.AdamW(parameters[1:])


@pytest.mark.parametrize("asked", ["by another optimizer", "by state_dict", "by the optimizer's state_dict", "not yet"])
def test_counters_of_optimizers_do_not_count_a_skipped_step(asked):
    with model("none", adamw) as trained, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, trained.optimizer = gentle(list(trained.named.values()))
        plain = trained.optimizer.step

        def step():
            if asked == "by another optimizer":
                first.step()
            if asked == "by state_dict":
                trained.hook.state_dict()
            plain()

        trained.optimizer.step = step
        for number in range(3):
            trained.step(number)
        trained.step(3, broken=True)
        if asked == "by the optimizer's state_dict":
            saved = trained.optimizer.state_dict()["state"].values()
            assert [float(state["step"]) for state in saved] == [3.0, 3.0]
        trained.step(4)
        assert counts_of(trained.optimizer) == [4.0, 4.0]


def test_warnings_as_errors_leave_counters_right():
    with model("none", adamw) as trained:
        for number in range(3):
            trained.step(number)
        trained.step(3, broken=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="not finite"):
                trained.step(4)
        assert counts_of(trained.optimizer) == [3.0] * 3


def test_a_verdict_of_another_model_does_not_undo_a_later_step():
    """One optimizer has the parameters of two models. One of them is not used in the step after a skipped one."""
    with model("none", adamw) as one, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = Model(gradzip.parse("none"), one.device, adamw)
        both = gradzip.optim.AdamW([*one.named.values(), *other.named.values()])
        one.optimizer, other.optimizer = both, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        other.step(0, broken=True)
        one.step(0)  # skipped, too
        both.zero_grad()
        for number in (1, 2):
            one.step(number)
        assert counts_of(both) == [2.0] * 3
        other.step(3)
        assert counts_of(both) == [2.0] * 3


def test_a_step_that_nobody_took_is_forgotten():
    """As one that a GradScaler has skipped: later steps of its parameters count, one of which is frozen by then."""
    with model("none", lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True)) as trained:
        taken, trained.optimizer.step = trained.optimizer.step, lambda: None
        trained.step(0, broken=True)
        names = list(trained.named)
        frozen = trained.named.pop(names[0]).requires_grad_(False)
        frozen.grad = None
        trained.hook = gradzip.ddp.HookState(
            gradzip.parse("none"), named_parameters=trained.named.items(), find_unused_parameters=False
        )
        trained.optimizer.step = taken
        before = trained.tensors()
        trained.step(1)
        assert not any(map(torch.equal, before, trained.tensors()))


@pytest.mark.parametrize("discards", [False, True])
def test_zeros_of_passes_that_do_not_count_do_not_prolong_a_warm_up(discards):
    compressor = gradzip.Momentum(gradzip.SignSGD(majority=False), warmup_steps=3)
    discarding = compressor.discarding()
    with on_stand_in() as device:
        run = device_ops.horovod_steps(compressor, SHAPES, RANKS, device)
        sent = []
        for number in range(8):
            zeros = {name: device.tensor(torch.zeros(shape)) for name, shape in SHAPES.items()}
            gradients = {name: device.tensor(noise(s.numel(), number).view(s).clone()) for name, s in SHAPES.items()}
            with device.counting() as counts, discarding if discards else contextlib.nullcontext():
                run(zeros, counts)
            before = compressor.traffic.bytes_sent
            with device.counting() as counts:
                run(gradients, counts)
            sent.append(compressor.traffic.bytes_sent - before)
        read_all()
        (state,) = (state for state in compressor.states.values() if state.step)
        assert getattr(state, "unused", 0) == (0 if discards else 3)
        assert sent[-1] < sent[0] / 10


def test_others_that_no_optimizer_is_told_of_stay_as_they_are():
    with model("none", adamw) as trained:
        trained.step(0)
        session = trained.hook._session
        other, bad = trained.device.tensor(torch.ones(3)), trained.device.tensor(torch.full((3,), math.nan))
        for fills in (False, True):
            with trained.device.counting():
                verdict = session.is_skipped([other, bad], fills=fills)
            assert bool(verdict) and bool(other.host.isnan().all()) == fills
            session.drop()


# --- several ranks


def compares(compressor):
    return compressor.undone_on_device and compressor.parts == [compressor] and not compressor.adapts


INNER = ["qsgd", "natural", "block-float(error_feedback=owner)", "topk(theta=0.9)"]


@pytest.mark.parametrize("inner", INNER)
def test_methods_within_momentum_free_what_they_have_encoded(inner):
    """Averages are the CPU's, in the warm-up and after it."""
    with stand_in() as device:
        groups = [gradzip.LocalGroup(gradzip.parse(f"momentum:inner={inner},warmup_steps=2"), RANKS) for _ in range(2)]
        for number in range(5):
            gradients = [
                {n: noise(math.prod(s), 10 * number + rank).view(s).clone() for n, s in MATRICES.items()}
                for rank in range(RANKS)
            ]
            on_device = groups[0].step([{n: device.tensor(g.clone()) for n, g in of.items()} for of in gradients])
            for got, expected in zip(on_device, groups[1].step(gradients)):
                for name in MATRICES:
                    assert torch.allclose(got[name].host, expected[name], rtol=1e-5, atol=1e-6), (number, name)


def test_low_rank_groups_of_several_turns_in_a_step():
    """ACPSGD computes P in some and Q in others, where parameters are absent in some steps."""
    shapes = {"a": (48, 64), "b": (80, 30)}
    with stand_in() as device:
        groups = [gradzip.LocalGroup(gradzip.parse("acpsgd:rank=2"), 1) for _ in range(2)]
        for number in range(7):
            names = list(shapes) if number % 3 != 1 else ["a"]
            gradients = {n: noise(math.prod(shapes[n]), number).view(shapes[n]).clone() for n in names}
            got = groups[0].step([{n: device.tensor(g.clone()) for n, g in gradients.items()}])[0]
            expected = groups[1].step([gradients])[0]
            assert all(torch.allclose(got[n].host, expected[n], rtol=1e-5, atol=1e-6) for n in names), number


MATRICES = {"a": (40, 30), "b": (64, 20, 3, 3), "d": (17, 101), "c": (64,)}
ALL = list(dict.fromkeys(kinds.with_other_exchanges(kinds.examples(compares))))


@pytest.mark.parametrize("spec", kinds.params(ALL, ["natural:exchange=scatter_reduce", "block-float", "topk"]))
def test_all_ranks_skip_together(spec):
    """Whatever rank has it, in whatever gradient: all skip, and no state changes."""
    with stand_in() as device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = gradzip.LocalGroup(gradzip.parse(spec), size=RANKS)

        def step(number, broken=None, value=math.nan):
            gradients = []
            for rank in range(RANKS):
                own = {n: noise(math.prod(s), 10 * number + rank).view(s).clone() for n, s in MATRICES.items()}
                if broken is not None and broken[0] == rank:
                    own[broken[1]].view(-1)[-1] = value
                gradients.append({name: device.tensor(gradient) for name, gradient in own.items()})
            return group.step(gradients)

        def tensors():
            return [
                {(n, k): v.host.clone() for n, s in c.states.items() for k, v in vars(s).items() if hasattr(v, "host")}
                for c in group.compressors
            ]

        for number in range(SETTLED):
            step(number)
        for rank in range(RANKS):
            for name, value in zip(MATRICES, (math.nan, -math.inf, math.nan, math.inf)):
                before = tensors()
                averages = step(4, (rank, name), value)
                assert all(compressor.last_step_skipped for compressor in group.compressors), (rank, name)
                assert all(average.host.isnan().all() for of_rank in averages for average in of_rank.values())
                assert [of.keys() for of in before] == [of.keys() for of in tensors()]
                assert all(torch.equal(of[k], now[k]) for of, now in zip(before, tensors()) for k in of), (rank, name)
        step(5)
        assert not any(compressor.last_step_skipped for compressor in group.compressors)

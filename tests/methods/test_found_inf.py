"""Steps that `found_inf` skips: of gradzip's optimizers, and of torch's fused ones that front ends let the device skip.

A stand-in for a CUDA device (benchmarks/device_ops/stand_in.py) counts waits of the host.
"""

import contextlib
import copy
import inspect
import shutil

import pytest
import torch
from torch.nn import Parameter

import gradzip
from benchmarks.device_ops.stand_in import stand_in
from gradzip.averaging import found_inf

SHAPES = {"w": (24, 8), "v": (9, 40), "b": (7,), "empty": (0, 4)}
MATRICES = ("w", "v")
WARMUP = 3
STEPS = 9
needs_stand_in = pytest.mark.skipif(not shutil.which("g++"), reason="no g++, with which the stand-in is compiled")


def adamw(named):
    return gradzip.optim.AdamW(named.values(), lr=0.01, weight_decay=0.1)


def held(named):
    return gradzip.optim.AdamW(named.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)


def muon(named):
    others = [p for name, p in named.items() if name not in MATRICES]
    groups = [{"params": [named[name] for name in MATRICES]}, {"params": others, "adamw": True}]
    return gradzip.optim.Muon(groups, lr=0.01)


def dgc_sgd(named):
    return gradzip.optim.DGCSGD(named.values(), lr=0.1, momentum=0.9, weight_decay=0.01, maximize=True)


def dgc_sgd_without_decay(named):
    return gradzip.optim.DGCSGD(named.values(), lr=0.1)


def fused(kind, **options):
    def made(named):
        return kind(named.values(), lr=0.01, fused=True, **options)

    made.__name__ = f"fused_{kind.__name__}" + "".join(f"_{name}" for name in options)
    return made


OURS = [adamw, held, muon, dgc_sgd, dgc_sgd_without_decay]
FUSED = [
    fused(torch.optim.AdamW),
    fused(torch.optim.Adam, amsgrad=True),
    fused(torch.optim.SGD),
    fused(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    fused(torch.optim.SGD, momentum=0.9, nesterov=True),
    fused(torch.optim.Adagrad),
]


def values(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    made["w"].view(-1)[:2] = torch.tensor([-0.0, 0.0])
    return made


def averages(step, dtype=torch.float32):
    """Some elements of v have no gradient in the warm-up, so that their second moment is 0."""
    made = values(100 + step, dtype)
    made["v"][5:] *= step >= WARMUP
    return made


def host(x):
    return getattr(x, "host", x)


def bits(x):
    x = host(x.detach())
    return x.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


class Job:
    """Trains parameters, on the stand-in device or on the CPU."""

    def __init__(self, make, device=None, dtype=torch.float32):
        self.device, self.dtype, self.taken, self.syncs = device, dtype, 0, []
        self.average = None  # that no step has taken yet
        self.named = {name: Parameter(self.put(value)) for name, value in values(0, dtype).items()}
        self.optimizer = make(self.named)
        warmup = WARMUP if make is held else 99
        method = gradzip.Momentum(gradzip.SignSGD(majority=False, min_numel=0), beta=0.9, warmup_steps=warmup)
        self.group = gradzip.LocalGroup(method if make is held else gradzip.NoCompression(), 1)

    def put(self, value):
        return value if self.device is None else self.device.tensor(value)

    def step(self, skipped=False, rolls_back=True):
        """Take a step of averages, or one to skip: of NaN in their place."""
        if self.average is None:
            self.average = self.group.step([averages(self.taken, self.dtype)])[0]
        made = self.average
        if not skipped:
            self.average, self.taken = None, self.taken + 1
        for name, parameter in self.named.items():
            value = torch.full_like(made[name], torch.nan) if skipped else made[name].clone()
            parameter.grad = self.put(value)
        self.group.tell_optimizers(self.named)
        flag = self.put(torch.tensor([1.0 if skipped else 0.0]))
        assert found_inf.prepare(self.optimizer) == (self.device is not None)
        with self.device.counting() if self.device is not None else contextlib.nullcontext() as counts:
            found_inf.hand_over(self.optimizer, flag)
            self.optimizer.step()
            found_inf.take_away(self.optimizer)
        assert not hasattr(self.optimizer, "found_inf")
        self.syncs.append(counts.syncs if counts is not None else 0)
        if skipped and rolls_back and hasattr(self.optimizer, "rollback_counts"):
            self.optimizer.rollback_counts()
        return self

    def bits(self):
        """All bits of the parameters, and of the states that are there."""
        found = {name: bits(parameter) for name, parameter in self.named.items()}
        for name, parameter in self.named.items():
            for key, x in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = bits(x)
        return found


def assert_equal(got, wanted):
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        assert torch.equal(got[name], x), name


@needs_stand_in
@pytest.mark.filterwarnings("ignore:AdamW. got .* without a gradient in the warm-up")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", OURS + FUSED, ids=lambda make: make.__name__)
def test_skipped_steps_change_no_bit_and_nothing_waits(make, dtype):
    """Also the first of all steps, the first of held ones, and two in succession."""
    if dtype == torch.bfloat16 and "SGD_momentum" in make.__name__:
        pytest.skip("torch's kernel for CPUs, which computes here, reads what it has not written")
    with stand_in() as device:
        through, skipping = Job(make, device, dtype), Job(make, device, dtype)
        for step in range(STEPS):
            if step in (0, 1, WARMUP, STEPS - 1):
                for _ in range(1 + (step == 1)):
                    before = skipping.bits()
                    skipping.step(skipped=True)
                    after = skipping.bits()
                    assert_equal({name: after[name] for name in before}, before)
                    if step == 0 and make in OURS:
                        assert not skipping.optimizer.state
            through.step(), skipping.step()
            assert_equal(skipping.bits(), through.bits())
    # `AdamW` looks for zeros of the second moment when it begins to stand still.
    looks = [i for i, syncs in enumerate(skipping.syncs) if syncs]
    assert looks == ([WARMUP + 3, WARMUP + 4] if make is held else []), skipping.syncs


@needs_stand_in
@pytest.mark.filterwarnings("ignore:AdamW. got .* without a gradient in the warm-up")
@pytest.mark.parametrize("make", OURS, ids=lambda make: make.__name__)
def test_steps_on_a_device_are_those_on_a_cpu_up_to_rounding(make):
    """Muon multiplies matrices in bfloat16, with relative errors of 2^-9 in each of 15 products."""
    with stand_in() as device:
        ours, theirs = Job(make, device), Job(make)
        for _ in range(STEPS):
            ours.step(), theirs.step()
        lr = theirs.optimizer.param_groups[0]["lr"]
        for name, p in theirs.named.items():
            got, start = ours.named[name].host, values(0)[name]
            bound = STEPS * lr * (15 * 2**-9 if make is muon and name in MATRICES else 2**-18)
            assert not p.numel() or (got - p).abs().max() <= bound + STEPS * 2**-22 < 0.2 * (start - p).abs().max(), (
                name
            )
            for key, x in theirs.optimizer.state.get(p, {}).items():
                torch.testing.assert_close(host(ours.optimizer.state[ours.named[name]][key]), x, rtol=1e-5, atol=1e-6)


@needs_stand_in
def test_a_step_without_found_inf_has_the_bits_of_one_with_it():
    """Where skipped steps are turned off, and where none is skipped."""
    with stand_in() as device:
        with_it, without = Job(held, device), Job(held, device)
        with pytest.warns(UserWarning, match="without a gradient in the warm-up"):
            for _ in range(STEPS):
                with_it.step()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(found_inf, "hand_over", lambda *_: None)
                    without.step()
        assert_equal(without.bits(), with_it.bits())


@needs_stand_in
def test_adamw_on_a_device_has_the_bits_of_torchs_fused_adamw():
    with stand_in() as device:
        ours, theirs = Job(adamw, device), Job(lambda named: fused(torch.optim.AdamW, weight_decay=0.1)(named), device)
        for _ in range(STEPS):
            ours.step(), theirs.step()
        assert_equal({name: bits(p) for name, p in ours.named.items()}, {n: bits(p) for n, p in theirs.named.items()})


@needs_stand_in
def test_a_late_parameter_has_a_count_of_its_own():
    with stand_in() as device:
        job = Job(adamw, device)
        job.step(), job.step()
        late = Parameter(device.tensor(torch.ones(3)))
        job.optimizer.add_param_group({"params": [late]})
        alone = Parameter(device.tensor(torch.ones(3)))
        other = torch.optim.AdamW([alone], lr=0.01, weight_decay=0.1, fused=True)
        for p in (late, alone):
            p.grad = device.tensor(torch.arange(3.0))
        job.step(), other.step()
        assert torch.equal(late.host, alone.host) and job.optimizer.state[late]["step"] == 1
        assert job.optimizer.state[job.named["w"]]["step"] == 3


@needs_stand_in
@pytest.mark.filterwarnings("ignore:AdamW. got .* without a gradient in the warm-up")
@pytest.mark.parametrize("make", OURS, ids=lambda make: make.__name__)
def test_a_skipped_step_keeps_unusual_numbers(make):
    """Such as first moments where the second moment is 0, which a held step sets to 0."""
    unusual = torch.tensor([-0.0, 2.0, torch.inf, torch.nan, 1e-45])
    with stand_in() as device:
        job = Job(make, device)
        for _ in range(WARMUP + 2):
            job.step()
        v = job.named["v"]
        states = job.optimizer.state.get(v, {})
        states = [states[name].host for name in ("exp_avg", "momentum_buffer") if name in states]
        for x in (v.host, *states):
            x[-1, :5] = unusual
        before = job.bits()
        job.step(skipped=True)
        assert_equal(job.bits(), before)


# --- what the fused kernels do not take


@needs_stand_in
@pytest.mark.parametrize("make", [adamw, dgc_sgd], ids=lambda make: make.__name__)
def test_a_gradient_of_another_layout_takes_a_wait(make):
    with stand_in() as device:
        p, q = (Parameter(device.tensor(values(0)["w"])) for _ in range(2))
        ours, theirs = make({"w": p}), make({"w": q})
        for step in range(4):
            value = averages(step)["w"] if step % 2 else torch.full(SHAPES["w"], torch.nan)
            p.grad = device.tensor(value.T.contiguous().T)
            found_inf.hand_over(ours, device.tensor(torch.tensor(float(step % 2 == 0))))
            before = bits(p)
            with device.counting() as counts:
                ours.step()
            found_inf.take_away(ours)
            assert counts.syncs and torch.equal(bits(p), before) == (step % 2 == 0)
            if step % 2 == 0:
                ours.rollback_counts()
            else:
                q.grad = device.tensor(value.T.contiguous().T)
                theirs.step()
            assert torch.equal(bits(p), bits(q)) and ours.state.get(p, {}).keys() == theirs.state.get(q, {}).keys()


@pytest.mark.parametrize("make", OURS, ids=lambda make: make.__name__)
def test_on_a_cpu_a_skipped_step_changes_nothing(make):
    job, through = Job(make), Job(make)
    job.step(skipped=True)
    assert not job.optimizer.state
    for _ in range(WARMUP - 1):
        job.step(), through.step()
        before = job.bits()
        job.step(skipped=True, rolls_back=False)
        assert_equal(job.bits(), before)
        job.optimizer.rollback_counts()  # nothing is to be undone
        assert_equal(job.bits(), through.bits())


# --- counters


@needs_stand_in
def test_rollback_undoes_one_step_once():
    with stand_in() as device:
        job = Job(adamw, device)
        state = job.optimizer.state
        job.step(), job.step(skipped=True, rolls_back=False)
        parameter = job.named["w"]
        assert state[parameter]["step"] == state[parameter]["exp_avg_sq_step"] == 2
        for _ in range(2):
            job.optimizer.rollback_counts()
            assert state[parameter]["step"] == state[parameter]["exp_avg_sq_step"] == 1
        job.step(skipped=True, rolls_back=False)
        job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
        job.optimizer.rollback_counts()
        assert job.optimizer.state[parameter]["step"] == 2


@needs_stand_in
def test_a_gradient_that_was_missing_has_no_count_to_roll_back():
    with stand_in() as device:
        job = Job(adamw, device)
        job.step()
        job.named["b"].grad = None
        job.named["w"].grad = device.tensor(torch.full(SHAPES["w"], torch.nan))
        found_inf.hand_over(job.optimizer, device.tensor(torch.ones(1)))
        job.optimizer.step()
        job.optimizer.rollback_counts()
        assert {float(job.optimizer.state[p]["step"]) for p in job.named.values()} == {1.0}


# --- which optimizers


class Inherits(torch.optim.AdamW):
    pass


class Overrides(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class OverridesOurs(gradzip.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class OfAnotherLibrary(torch.optim.Optimizer):
    """As optimizers with kernels of their own are."""

    def __init__(self, params, fused=True):
        super().__init__(params, {"fused": fused})

    def step(self, closure=None):
        return None


def as_horovods(kind):
    """A class as Horovod makes it of an optimizer's class, with its own methods."""

    def step(self, closure=None):
        return super(self.__class__, self).step(closure)

    step.__module__ = "horovod.torch.optimizer"
    return type(kind.__name__, (kind,), {"step": step})


@needs_stand_in
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: gradzip.optim.AdamW([p]), True),
        (lambda p: as_horovods(gradzip.optim.AdamW)([p]), True),
        (lambda p: OverridesOurs([p]), False),
        (lambda p: Inherits([p], fused=True), True),
        (lambda p: as_horovods(Inherits)([{"params": [p], "fused": True}]), True),
        (lambda p: as_horovods(Overrides)([{"params": [p], "fused": True}]), False),
        (lambda p: Overrides([p], fused=True), False),
        (lambda p: OfAnotherLibrary([p]), False),
        (lambda p: torch.optim.AdamW([p]), False),
        (lambda p: torch.optim.AdamW([{"params": [p], "fused": False}], fused=True), False),
        (lambda p: torch.optim.RMSprop([p]), False),
        (lambda p: torch.optim.Adagrad([p], fused=True), True),
        (lambda p: torch.optim.SGD([p], fused=True), True),
        (lambda p: torch.optim.SGD([p], momentum=0.9, fused=True), True),
        (lambda p: torch.optim.SGD([p], momentum=0.9, dampening=0.1, fused=True), False),
        (lambda p: torch.optim.SGD([p], momentum=0.0, dampening=0.1, fused=True), True),
    ],
)
def test_which_optimizers_the_device_can_skip(make, expected):
    with stand_in() as device:
        p = Parameter(device.tensor(torch.ones(3)))
        optimizer = make(p)
        p.grad = device.tensor(torch.ones(3))
        with device.counting() as counts:
            assert found_inf.prepare(optimizer) == expected
        assert not counts.syncs
        on_cpu = torch.ones(3, requires_grad=True)
        optimizer.add_param_group({"params": [on_cpu], "fused": True})
        assert found_inf.prepare(optimizer) == expected  # it has no gradient
        on_cpu.grad = torch.ones(3)
        assert not found_inf.prepare(optimizer)


def test_all_classes_of_the_package_read_it():
    for kind in vars(gradzip.optim).values():
        if inspect.isclass(kind):
            assert kind.reads_found_inf and inspect.unwrap(kind.step).__module__ == "gradzip.optim.base"


@needs_stand_in
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_buffers_made_for_sgd_give_the_bits_of_its_first_step(nesterov, decay):
    with stand_in() as device:
        results = []
        for prepares in (True, False):
            p = Parameter(device.tensor(torch.tensor([1.0, -2.0, 0.0, -0.0, 3.0, 1e-45])))
            sgd = torch.optim.SGD([p], 0.1, 0.9, nesterov=nesterov, weight_decay=decay, fused=True)
            p.grad = device.tensor(torch.tensor([0.5, 1e-30, -0.0, -0.0, 0.0, -1e-45]))
            if prepares:
                assert found_inf.prepare(sgd)
                assert found_inf.prepare(sgd)  # makes nothing anew
            sgd.step()
            results.append([bits(p), bits(sgd.state[p]["momentum_buffer"])])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


# --- the attribute


def optimizer_on_a_cpu():
    p = torch.ones(3, requires_grad=True)
    return p, torch.optim.AdamW([p], lr=0.1, fused=True)


@pytest.mark.parametrize("theirs", [0.0, 1.0])
@pytest.mark.parametrize("ours", [0.0, 1.0])
def test_either_tensor_skips_and_gradscalers_stays(ours, theirs):
    p, optimizer = optimizer_on_a_cpu()
    own = optimizer.found_inf = torch.tensor(theirs)
    p.grad = torch.ones(3)
    handed_over = found_inf.hand_over(optimizer, torch.tensor([ours]))
    assert optimizer.found_inf is handed_over and handed_over.shape == ()
    assert handed_over == max(ours, theirs)
    optimizer.step()
    assert torch.equal(p, torch.ones(3)) == bool(max(ours, theirs))
    for _ in range(2):
        found_inf.take_away(optimizer)
        assert optimizer.found_inf is own and own == theirs


def test_a_gradscaler_beside_it():
    """It sets the attribute, and deletes it after the step. Neither sees the other's."""
    p, optimizer = optimizer_on_a_cpu()
    flags = {0: (1.0, 1.0), 1: (0.0, torch.inf), 2: (0.0, 1.0)}
    current = [0.0]

    def hands_over(optimizer, *_):
        found_inf.hand_over(optimizer, torch.tensor([current[0]]))

    optimizer.register_step_pre_hook(hands_over)
    optimizer.register_step_post_hook(lambda o, *_: found_inf.take_away(o))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for step, (flag, factor) in flags.items():
        current[0] = flag
        optimizer.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not hasattr(optimizer, "found_inf")
        assert torch.equal(p, torch.ones(3)) == (step < 2)
    assert scaler.get_scale() == 4.0 * 2 / 2 * 2  # it grew, shrank and grew
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((3,), 0.1))


def test_what_a_failed_step_has_left_is_taken_away():
    _, optimizer = optimizer_on_a_cpu()
    found_inf.hand_over(optimizer, torch.ones(1))
    handed_over = found_inf.hand_over(optimizer, torch.zeros(1))
    assert handed_over == 0.0
    found_inf.take_away(optimizer)
    assert not hasattr(optimizer, "found_inf")
    found_inf.hand_over(optimizer, torch.ones(1))
    own = optimizer.found_inf = torch.zeros(())  # a GradScaler's, in a later step
    assert found_inf.hand_over(optimizer, torch.zeros(1)) == 0.0
    found_inf.take_away(optimizer)
    assert optimizer.found_inf is own


# --- shards


@pytest.fixture
def mesh():
    pytest.importorskip("torch.distributed.tensor")
    with torch.device("cpu"):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("flag", [0.0, 1.0])
@pytest.mark.parametrize("make", [adamw, dgc_sgd, fused(torch.optim.AdamW)], ids=lambda make: make.__name__)
def test_shards(make, flag, mesh):
    """The kernels of a device, which the CPU has, too."""
    from torch.distributed.tensor import Shard, distribute_tensor

    found = []
    for shards in (True, False):
        put = (lambda x: distribute_tensor(x, mesh, [Shard(0)])) if shards else (lambda x: x)
        p = Parameter(put(values(0)["w"]))
        optimizer = make({"w": p})
        p.grad = put(averages(0)["w"] if not flag else torch.full(SHAPES["w"], torch.nan))
        if make in OURS:
            group = optimizer.param_groups[0]
            optimizer.state[p] = optimizer._new_state(group, p)
            with torch.no_grad():
                optimizer._update_on_device(group, {p: p.grad}, torch.tensor(flag))
        else:
            found_inf.hand_over(optimizer, torch.tensor([flag]))
            optimizer.step()
        local = [x.to_local() if shards and x.dim() else x for x in (p.detach(), *optimizer.state[p].values())]
        found.append([bits(x.to_local() if hasattr(x, "to_local") else x) for x in local])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(found[0][0], bits(values(0)["w"])) == bool(flag)

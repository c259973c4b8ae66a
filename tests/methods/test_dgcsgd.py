"""DGCSGD with DGC, against SGD with momentum on gradients and on the decay. tests/front_ends has it in real jobs."""

import pytest
import torch

import gradzip
from contract import through_file
from gradzip.engines.local import drive
from gradzip.methods.base.group import averaged
from reference import MomentumSGD, U

M = 0.9
LR = 0.1
STEPS = 50
DECAYS = {"w": 0.1, "b": 0.02}
BYPASSED = f"dgc:momentum={M},min_numel=10000"  # all parameters are averaged uncompressed, with momentum
UNMASKED, MASKED, PLAIN = (M, M), (0.0, M), (0.0, 0.0)  # momentum of the gradient, and of the decay


def tensor(name, step):
    shape = {"w": (40, 40), "b": (30,)}[name]
    return torch.randn(shape, generator=torch.Generator().manual_seed(2 * step + (name == "b")))


class Job:
    """Two parameters and their optimizer. Gradients are averaged as the front ends do it, in a group of one."""

    def __init__(self, compressor, optimizer=gradzip.optim.DGCSGD, **options):
        self.compressor = gradzip.parse(compressor)
        self.named = {name: torch.nn.Parameter(tensor(name, 1000)) for name in DECAYS}
        groups = [{"params": [p], "weight_decay": DECAYS[name]} for name, p in self.named.items()]
        self.sgd = optimizer(groups, lr=LR, momentum=M, **options)

    def average(self, gradients):
        self.compressor.memory.loss_scale.begin_step()
        for name, gradient in gradients.items():
            self.named[name].grad = gradient.clone()
            drive([averaged(self.compressor, self.named[name].grad, name)])

    def step(self, step):
        self.average({name: tensor(name, step) for name in self.named})
        self.sgd.step()

    def parameters(self):
        return {name: p.detach().clone() for name, p in self.named.items()}


def assert_close(got, wanted, steps=STEPS):
    """Equal up to rounding: a step adds three numbers of at most the largest magnitude of a parameter or velocity."""
    for name, want in wanted.items():
        bound = steps * 8 * U * 16
        assert torch.from_numpy(abs(got[name].double().numpy() - want)).max() < bound < 1e-2 * abs(want).max(), name


@pytest.mark.parametrize(
    ("spec", "of_w"), [(BYPASSED, UNMASKED), (f"dgc:momentum={M},theta=0", MASKED)], ids=["bypassed", "compressed"]
)
@pytest.mark.parametrize("maximize", [False, True])
def test_follows_its_formula(spec, of_w, maximize):
    """Also when the learning rate and the decay change."""
    job = Job(spec, maximize=maximize)
    reference = MomentumSGD(job.named, {"w": of_w, "b": UNMASKED})
    without = MomentumSGD(job.named, {"w": (of_w[0], 0.0), "b": (M, 0.0)})
    for step in range(STEPS):
        lr = LR / (1 + step // 20)
        decays = {name: 0.0 if step >= 40 else decay * (1 + step // 30) for name, decay in DECAYS.items()}
        for group, decay in zip(job.sgd.param_groups, decays.values()):
            group["lr"], group["weight_decay"] = lr, decay
        job.step(step)
        gradients = {name: (-1 if maximize else 1) * tensor(name, step) for name in DECAYS}
        reference.step(gradients, lr, decays)
        without.step(gradients, lr, decays)
    assert_close(job.parameters(), reference.parameters)
    for name, p in job.parameters().items():
        assert abs(p.numpy() - without.parameters[name]).max() > 0.1


def test_bypassed_parameters_equal_those_of_torch_sgd_with_momentum():
    job, plain = Job(BYPASSED), Job("none", torch.optim.SGD)
    for step in range(STEPS):
        job.step(step)
        plain.step(step)
    for name, p in job.parameters().items():
        torch.testing.assert_close(p, plain.named[name].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [BYPASSED, "dgc:theta=0.9", "dgc:theta=0.9,exchange=scatter_reduce"])
def test_decay_alone(spec):
    """200 steps with gradients of 0 multiply parameters by 0.12 with lr w = 0.001, and by 0.82 without momentum."""
    job, plain = Job(spec), Job("none", torch.optim.SGD)
    for of in (job, plain):
        of.sgd.param_groups[0]["weight_decay"] = of.sgd.param_groups[1]["weight_decay"] = 0.01
        for _ in range(200):
            of.average({name: torch.zeros_like(p) for name, p in of.named.items()})
            of.sgd.step()
    for name, p in job.parameters().items():
        torch.testing.assert_close(p, plain.named[name].detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(p, 0.12 * tensor(name, 1000), rtol=0.02, atol=0)


def test_loss_scale():
    """GradScaler unscales gradients, and skips a step."""
    job = Job(BYPASSED)
    reference = MomentumSGD(job.named, dict.fromkeys(DECAYS, UNMASKED))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    scaler.scale(torch.zeros(()))  # initializes the scale lazily
    job.compressor.follow(scaler)
    for step in range(STEPS):
        gradients = {name: tensor(name, step) for name in DECAYS}
        factor = float("inf") if step == 7 else scaler.get_scale()
        before = job.parameters()
        job.average({name: factor * gradient for name, gradient in gradients.items()})
        scaler.step(job.sgd)
        scaler.update()
        if step == 7:
            assert all(torch.equal(p, before[name]) for name, p in job.parameters().items())
        else:
            reference.step(gradients, LR, DECAYS)
    assert scaler.get_scale() > 1024.0
    assert_close(job.parameters(), reference.parameters)


def test_half_precision_and_strides():
    p = torch.nn.Parameter(torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last).bfloat16())
    single = torch.nn.Parameter(torch.ones(3))  # the same group may have several types
    sgd = gradzip.optim.DGCSGD([p, single], lr=LR, weight_decay=0.1)
    for _ in range(3):
        p.grad, single.grad = torch.randn_like(p), torch.ones(3)
        sgd.step()
    buffer = sgd.state[p]["decay_momentum_buffer"]
    assert (buffer.dtype, buffer.stride()) == (torch.float32, p.stride()) and p.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_decay_of_16_bit_parameters_does_not_drift(dtype):
    """Its momentum is that of a constant parameter. In bfloat16, it would end at 0.956 of that."""
    p = torch.nn.Parameter(torch.ones(8, dtype=dtype))
    sgd = gradzip.optim.DGCSGD([p], lr=0.0, momentum=M, weight_decay=1.0)
    for _ in range(60):
        p.grad = torch.zeros_like(p)
        sgd.step()
    torch.testing.assert_close(sgd.state[p]["decay_momentum_buffer"], torch.full((8,), (1 - M**60) / (1 - M)))


def test_states_of_16_bit_parameters_continue_and_older_ones_load():
    """torch would round the loaded buffer. An older one, of 16 bits, has the same values."""
    ps = [torch.nn.Parameter(torch.full((8,), 1 / 3).bfloat16()) for _ in range(3)]
    through, resumed, older = (gradzip.optim.DGCSGD([p], lr=LR, weight_decay=0.1) for p in ps)

    def step(*of):
        for sgd in of:
            (p,) = sgd.param_groups[0]["params"]
            p.grad = torch.ones_like(p)
            sgd.step()

    step(through), step(through)
    saved = through_file(through.state_dict())
    resumed.load_state_dict(saved)
    ps[1].data.copy_(ps[0])
    step(through, resumed)
    buffers = [sgd.state[p]["decay_momentum_buffer"] for sgd, p in zip((through, resumed), ps)]
    assert torch.equal(*buffers) and torch.equal(ps[0], ps[1])
    assert not torch.equal(buffers[0].bfloat16().float(), buffers[0])
    saved["state"][0]["decay_momentum_buffer"] = rounded = buffers[0].bfloat16()
    older.load_state_dict(saved)
    buffer = older.state[ps[2]]["decay_momentum_buffer"]
    assert buffer.dtype == torch.float32 and torch.equal(buffer, rounded.float())
    step(older)


def test_a_loaded_state_continues_bit_for_bit():
    through, stopped = Job("dgc:theta=0.9"), Job("dgc:theta=0.9")
    for step in range(5):
        through.step(step), stopped.step(step)
    states = through_file([stopped.compressor.state_dict(), stopped.sgd.state_dict()])
    resumed = Job("dgc:theta=0.9")
    resumed.compressor.load_state_dict(states[0])
    resumed.sgd.load_state_dict(states[1])
    for name, p in resumed.named.items():
        p.data.copy_(stopped.named[name])
    for step in range(5, 10):
        through.step(step), resumed.step(step)
    assert all(torch.equal(p, through.named[name]) for name, p in resumed.named.items())


def test_a_loaded_state_continues_bit_for_bit_on_nodes():
    """A rank of a node has the states of its chunks alone, and the optimizer those of whole parameters."""
    compressor = gradzip.Hierarchical(gradzip.DGC(theta=0.9))
    optimizers, groups, named = {}, {}, {}
    for job in ("through", "resumed"):
        named[job] = {name: torch.nn.Parameter(tensor(name, 1000)) for name in DECAYS}
        optimizers[job] = gradzip.optim.DGCSGD(named[job].values(), lr=LR, momentum=M, weight_decay=0.1)
        groups[job] = gradzip.LocalGroup(compressor, (2, 2))

    def step(job, number):
        for name, p in named[job].items():
            p.grad = groups[job].average([tensor(name, 4 * number + rank) for rank in range(4)], name)[0]
        optimizers[job].step()

    for number in range(3):
        step("through", number)
    merged = gradzip.checkpoint.merge([one.state_dict() for one in groups["through"].compressors])
    saved = [merged, optimizers["through"].state_dict(), named["through"]]
    merged, of_optimizer, parameters = through_file(saved)
    for rank, one in enumerate(groups["resumed"].compressors):
        one.load_state_dict(gradzip.checkpoint.shard(merged, rank, 4))
    optimizers["resumed"].load_state_dict(of_optimizer)
    for name, p in named["resumed"].items():
        p.data.copy_(parameters[name])
    for number in range(3, 6):
        step("through", number), step("resumed", number)
    assert all(torch.equal(p, named["through"][name]) for name, p in named["resumed"].items())


def test_groups_with_momenta_of_their_own():
    """As where `PerLayer` gives some parameters to another method. A parameter without a gradient does not decay."""
    job = Job(f"per-layer:^w$=dgc(theta=0,momentum={M})")
    job.sgd.param_groups[1]["momentum"] = 0.0
    reference = MomentumSGD(job.named, {"w": MASKED, "b": PLAIN})
    unused = torch.nn.Parameter(torch.ones(3))
    job.sgd.add_param_group({"params": [unused], "weight_decay": 0.5})
    for step in range(STEPS):
        job.step(step)
        reference.step({name: tensor(name, step) for name in DECAYS}, LR, DECAYS)
    assert_close(job.parameters(), reference.parameters)
    assert torch.equal(unused, torch.ones(3)) and unused not in job.sgd.state


def test_no_state_without_weight_decay():
    """As torch.optim.SGD without momentum: Horovod's broadcast_optimizer_state() has nothing to broadcast."""
    p = torch.nn.Parameter(torch.ones(3))
    sgd = gradzip.optim.DGCSGD([p], lr=LR)
    p.grad = torch.ones(3)
    sgd.step()
    assert not sgd.state_dict()["state"] and torch.equal(p, torch.full((3,), 1 - LR))

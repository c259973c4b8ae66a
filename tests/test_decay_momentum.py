"""The momentum that SGD's weight decay gets next to DGC. tests/test_horovod.py and test_ddp.py test it in real jobs."""

import io
import subprocess
import sys

import pytest
import torch

import gradzip
from gradzip import decay_momentum
from gradzip.averaging import Averaging
from gradzip.engines.local import drive
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
    """Two parameters and their SGD. Gradients are averaged as the front ends do it, in a group of one."""

    def __init__(self, compressor, optimizer=torch.optim.SGD, **options):
        self.compressor = gradzip.parse(compressor) if isinstance(compressor, str) else compressor
        decay_momentum.prepare(self.compressor)
        self.named = {name: torch.nn.Parameter(tensor(name, 1000)) for name in DECAYS}
        groups = [{"params": [p], "weight_decay": DECAYS[name]} for name, p in self.named.items()]
        self.sgd = optimizer(groups, lr=LR, **options)

    def average(self, gradients):
        for name, gradient in gradients.items():
            averaging = Averaging(self.compressor, name, self.named[name])
            decay_momentum.register(self.named[name], averaging)
            self.named[name].grad = gradient.clone()
            drive([averaging.run(self.named[name].grad)])

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


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize(
    ("spec", "of_w"), [(BYPASSED, UNMASKED), (f"dgc:momentum={M},theta=0", MASKED)], ids=["bypassed", "compressed"]
)
@pytest.mark.parametrize("maximize", [False, True])
def test_sgd_decays_with_momentum(spec, of_w, maximize, options):
    """Also when the learning rate and the decay change."""
    job = Job(spec, maximize=maximize, **options)
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
    job, plain = Job(BYPASSED), Job("none", momentum=M)
    for step in range(STEPS):
        job.step(step)
        plain.step(step)
    for name, p in job.parameters().items():
        torch.testing.assert_close(p, plain.named[name].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", [BYPASSED, "dgc:theta=0.9", "dgc:theta=0.9,exchange=scatter_reduce"])
def test_decay_alone(spec):
    """200 steps with gradients of 0 multiply parameters by 0.12 with lr w = 0.001, and by 0.82 without momentum."""
    job, plain = Job(spec), Job("none", momentum=M)
    for of in (job, plain):
        of.sgd.param_groups[0]["weight_decay"] = of.sgd.param_groups[1]["weight_decay"] = 0.01
        for _ in range(200):
            of.average({name: torch.zeros_like(p) for name, p in of.named.items()})
            of.sgd.step()
    for name, p in job.parameters().items():
        torch.testing.assert_close(p, plain.named[name].detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(p, 0.12 * tensor(name, 1000), rtol=0.02, atol=0)


@pytest.mark.parametrize("fused", [False, True])
def test_closure(fused):
    """The closure computes the gradients, and its loss is returned."""
    job = Job(BYPASSED, fused=fused)
    reference = MomentumSGD(job.named, dict.fromkeys(DECAYS, UNMASKED))
    for step in range(STEPS):
        gradients = {name: tensor(name, step) for name in DECAYS}

        def closure(gradients=gradients, step=step):
            assert torch.is_grad_enabled()
            job.sgd.zero_grad()
            job.average(gradients)
            return step

        assert (job.sgd.step(closure) if step % 2 else job.sgd.step(closure=closure)) == step
        reference.step(gradients, LR, DECAYS)
    assert_close(job.parameters(), reference.parameters)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_loss_scale(fused, unscale):
    """GradScaler skips a step. A fused SGD unscales gradients, and skips the step, itself."""
    job = Job(BYPASSED, fused=fused)
    reference = MomentumSGD(job.named, dict.fromkeys(DECAYS, UNMASKED))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    scaler.scale(torch.zeros(()))  # initializes the scale lazily
    job.compressor.follow(scaler)
    for step in range(STEPS):
        gradients = {name: tensor(name, step) for name in DECAYS}
        factor = float("inf") if step == 7 else scaler.get_scale()
        before = job.parameters()
        job.average({name: factor * gradient for name, gradient in gradients.items()})
        if unscale:
            scaler.unscale_(job.sgd)
        scaler.step(job.sgd)
        scaler.update()
        if step == 7:
            assert all(torch.equal(p, before[name]) for name, p in job.parameters().items())
        else:
            reference.step(gradients, LR, DECAYS)
    assert scaler.get_scale() > 1024.0
    assert_close(job.parameters(), reference.parameters)


def test_half_precision_and_strides():
    job = Job("dgc:theta=0.5,min_numel=0")
    p = torch.nn.Parameter(torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last).bfloat16())
    job.named = {"w": p}
    job.sgd = torch.optim.SGD([p], lr=LR, weight_decay=0.1)
    for _ in range(3):
        job.average({"w": torch.randn_like(p)})
        job.sgd.step()
    velocity = job.compressor.states["w"].decay_velocity
    assert (velocity.dtype, velocity.stride()) == (p.dtype, p.stride()) and p.isfinite().all()


def test_momentum_of_the_decay_is_saved_with_the_compressor():
    through, stopped = Job("dgc:theta=0.9"), Job("dgc:theta=0.9")
    for step in range(5):
        through.step(step), stopped.step(step)
    file = io.BytesIO()
    torch.save(stopped.compressor.state_dict(), file)
    file.seek(0)
    resumed = Job("dgc:theta=0.9")
    resumed.compressor.load_state_dict(torch.load(file, weights_only=True))
    for name, p in resumed.named.items():
        p.data.copy_(stopped.named[name])
    for step in range(5, 10):
        through.step(step), resumed.step(step)
    assert all(torch.equal(p, through.named[name]) for name, p in resumed.named.items())
    # Horovod's broadcast_optimizer_state() hangs if the optimizers of some ranks have states and others have none.
    assert not through.sgd.state_dict()["state"]


def test_only_parameters_of_dgc_are_affected():
    per_layer = gradzip.PerLayer([("^w$", gradzip.DGC(theta=0.0, momentum=M))])
    job = Job(per_layer)
    reference = MomentumSGD(job.named, {"w": MASKED, "b": PLAIN})
    unused = torch.nn.Parameter(torch.ones(3))
    job.sgd.add_param_group({"params": [unused], "weight_decay": 0.5})
    for step in range(STEPS):
        job.step(step)
        reference.step({name: tensor(name, step) for name in DECAYS}, LR, DECAYS)
    assert_close(job.parameters(), reference.parameters)
    assert torch.equal(unused, torch.ones(3))


HOWS = ["another method", "no momentum", "not averaged", "compressor deleted", "gradient None"]


@pytest.mark.parametrize("how", HOWS)
def test_parameters_that_dgc_no_longer_averages(how):
    job = Job(BYPASSED)
    for step in range(3):
        job.step(step)
    before = job.parameters()
    if how == "compressor deleted":
        job.average({name: tensor(name, 3) for name in job.named})
        del job.compressor
    elif how == "not averaged":
        job.sgd.param_groups[0]["momentum"] = 0.5  # not refused, as the method plays no part
    elif how == "gradient None":
        job.sgd.zero_grad()
        job.sgd.step()
        assert all(torch.equal(p, before[name]) for name, p in job.named.items())
        return
    else:
        job.compressor = gradzip.parse("none" if how == "another method" else "dgc:momentum=0")
        job.average({name: tensor(name, 3) for name in job.named})
    gradients = {name: p.grad.clone() for name, p in job.named.items()}
    job.sgd.step()
    for name, p in job.named.items():
        torch.testing.assert_close(p.detach(), before[name] - LR * (gradients[name] + DECAYS[name] * before[name]))


def test_frozen_parameters_decay_without_momentum():
    """A method leaves the state of a frozen parameter alone; without averages, it has none."""
    job = Job(BYPASSED)
    for name, p in job.named.items():
        averaging = Averaging(job.compressor, name, p, frozen=True)
        decay_momentum.register(p, averaging)
        p.grad = torch.zeros_like(p)
        drive([averaging.run(p.grad)])
    for _ in range(2):
        job.sgd.step()
    for name, p in job.parameters().items():
        torch.testing.assert_close(p, tensor(name, 1000) * (1 - LR * DECAYS[name]) ** 2)


def test_other_optimizers_are_left_alone():
    """Decoupled weight decay needs no momentum. Gradients are the same, so Adam steps alike."""
    job, plain = Job("dgc:theta=0", torch.optim.AdamW), Job("none", torch.optim.AdamW)
    for step in range(3):
        job.average({"w": tensor("w", step)})
        plain.average({"w": tensor("w", step)})
        assert job.sgd.step() is None
        plain.sgd.step()
    assert torch.equal(job.named["w"], plain.named["w"])


def test_momentum_of_the_optimizer_is_refused():
    for options in ({"momentum": 0.5}, {"momentum": 0.5, "nesterov": True}):
        job = Job(BYPASSED, **options)
        message = (
            "SGD: got momentum = 0.5 for a parameter to which DGC applies momentum 0.9, expected 0: give its param "
            "group momentum=0"
        )
        with pytest.raises(ValueError, match=message):
            job.step(0)
        assert all(torch.equal(p, tensor(name, 1000)) for name, p in job.named.items())


@pytest.mark.long
def test_optimizers_have_no_hooks_before_dgc_is_used():
    code = (
        "import torch, torch.optim.optimizer as o, gradzip, gradzip.ddp\n"
        "from gradzip import decay_momentum\n"
        "from gradzip.averaging import Averaging\n"
        "p = torch.nn.Parameter(torch.zeros(40, 40))\n"
        "decay_momentum.prepare(gradzip.TopK())\n"
        "decay_momentum.register(p, Averaging(gradzip.TopK(), 'p', p))\n"
        "assert not o._global_optimizer_pre_hooks\n"
        "for _ in range(2): decay_momentum.register(p, Averaging(gradzip.DGC(), 'p', p))\n"
        "assert len(o._global_optimizer_pre_hooks) == 1\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr

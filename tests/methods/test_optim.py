"""AdaMomentum against its formula in NumPy, and what torch's optimizers promise. test_dgcsgd.py has DGCSGD's."""

import copy
import math

import numpy as np
import pytest
import torch

import gradzip
from gradzip.optim import DGCSGD, AdaMomentum

SHAPES = [(3, 5), (7,), (), (0, 4)]


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]


def train(optimizer, steps, seed=1, parameters_of=None):
    """Take steps with random gradients, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    parameters = parameters_of or [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def reference(values, gradients, lr, beta1, beta2, eps, weight_decay):
    """The docstring's formula, in float64, for one parameter."""
    p, m, v = values.astype(np.float64), gradients[0].astype(np.float64), 0.0
    for t, g in enumerate(gradients, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * m**2
        p = p - lr * (m / (np.sqrt(v / (1 - beta2**t)) + eps) + weight_decay * p)
    return p


@pytest.mark.parametrize("beta1", [0.0, 0.7])
def test_follows_its_formula(beta1):
    params, steps = parameters(), 25
    options = {"lr": 0.01, "betas": (beta1, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    before = [p.detach().numpy().copy() for p in params]
    generator = torch.Generator().manual_seed(1)
    gradients = [[torch.randn(shape, generator=generator).numpy() for shape in SHAPES] for _ in range(steps)]
    train(AdaMomentum(params, **options), steps)
    for i, p in enumerate(params):
        expected = reference(before[i], [of_step[i] for of_step in gradients], 0.01, beta1, 0.9, 1e-6, 0.1)
        # float32 rounding: each of 25 steps adds an error of a few units in the last place of numbers below 4.
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=0, atol=25 * 4 * 2**-23)


def test_the_second_moment_is_that_of_the_momentum():
    """A gradient every tenth step: AdamW divides by its root mean square, AdaMomentum by that of the average."""
    moved = {}
    for kind in (AdaMomentum, torch.optim.AdamW):
        p = torch.zeros(1, requires_grad=True)
        optimizer = kind([p], lr=0.01, betas=(0.9, 0.99), weight_decay=0.0)
        for step in range(1100):
            if step == 1000:
                begin = p.item()
            p.grad = torch.tensor([10.0 if step % 10 == 0 else 0.0])
            optimizer.step()
        moved[kind] = (begin - p.item()) / (0.01 * 100)
    # The mean gradient is 1, its root mean square sqrt(10). The momentum is 1.535 0.9^k in the steps k = 0 to 9 after a
    # gradient: its mean is 1, its root mean square 1.044. The moving averages vary by some percent between steps.
    assert moved[torch.optim.AdamW] == pytest.approx(1 / math.sqrt(10), rel=0.03)
    assert moved[AdaMomentum] == pytest.approx(1 / 1.044, rel=0.03)


def test_without_momentum_it_is_adamw():
    ours, theirs = parameters(), parameters()
    train(AdaMomentum(ours, 0.01, (0.0, 0.95), weight_decay=0.1), 5)
    train(torch.optim.AdamW(theirs, 0.01, (0.0, 0.95), weight_decay=0.1), 5)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_state_dict_continues_bit_for_bit(dtype):
    params = parameters(dtype)
    optimizer = AdaMomentum(params, 0.01)
    train(optimizer, 3)
    copies = [p.detach().clone().requires_grad_() for p in params]
    other = AdaMomentum(copies, 0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, 3, seed=2)
    train(other, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(params, copies))
    assert all(p.dtype == dtype and p.isfinite().all() for p in params)


def test_groups_have_their_own_options_and_parameters_without_gradient_stay():
    used, unused, slow = (torch.ones(4, requires_grad=True) for _ in range(3))
    optimizer = AdaMomentum([{"params": [used, unused]}, {"params": [slow], "lr": 0.0}], lr=0.1)
    train(optimizer, 2, parameters_of=[used, slow])
    assert not torch.equal(used, torch.ones(4))
    assert torch.equal(unused, torch.ones(4)) and torch.equal(slow, torch.ones(4))
    assert unused not in optimizer.state


@pytest.mark.parametrize("kind", [AdaMomentum, DGCSGD])
def test_gradients_are_not_changed_and_a_closure_is_called(kind):
    p = torch.ones(3, requires_grad=True)
    optimizer = kind([p], lr=0.1, weight_decay=0.01)

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    gradient = p.grad.clone()
    optimizer.step()
    assert torch.equal(p.grad, gradient)


def test_a_step_that_gradscaler_skips_changes_nothing():
    p = torch.ones(3, requires_grad=True)
    optimizer, scaler = AdaMomentum([p], lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    for finite in (True, False):
        before = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        scaler.scale((p * (1.0 if finite else torch.inf)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(p, before[0]) != finite
    assert torch.equal(optimizer.state[p]["exp_avg"], torch.ones(3))  # unscaled, and without the infinite one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "got lr = -1.0, expected a number >= 0"),
        ({"eps": -1e-8}, "got eps = -1e-08"),
        ({"weight_decay": float("nan")}, "got weight_decay = nan"),
        ({"betas": (0.9, 1.0)}, r"got betas = \(0.9, 1.0\), expected two numbers in \[0, 1\)"),
        ({"betas": (0.9,)}, "got betas = .*, expected two numbers"),
    ],
)
def test_refuses_wrong_options(options, message):
    with pytest.raises(ValueError, match=f"AdaMomentum: {message}"):
        AdaMomentum(parameters(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "got lr = -1.0, expected a number >= 0"),
        ({"weight_decay": float("nan")}, "got weight_decay = nan"),
        ({"momentum": 1.0}, r"got momentum = 1.0, expected a number in \[0, 1\)"),
    ],
)
def test_dgcsgd_refuses_wrong_options(options, message):
    with pytest.raises(ValueError, match=f"DGCSGD: {message}"):
        DGCSGD(parameters(), **options)


@pytest.mark.parametrize("kind", [AdaMomentum, DGCSGD])
def test_refuses_sparse_gradients(kind):
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=f"{kind.__name__}: got a sparse gradient"):
        kind(embedding.parameters()).step()


def test_trains_with_sparse_averages():
    """The gradients of a quadratic, of four workers, one element in twenty sent with four bits."""
    target, p = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)), torch.zeros(64, 64, requires_grad=True)
    group = gradzip.LocalGroup(gradzip.TopK(theta=0.95, bits=4), 4)
    optimizer = AdaMomentum([p], lr=0.05, weight_decay=0.0)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 300)
        noise = torch.Generator().manual_seed(step)
        gradients = [p.detach() - target + 0.1 * torch.randn(64, 64, generator=noise) for _ in range(4)]
        p.grad = group.average(gradients, "p")[0]
        optimizer.step()
    assert ((p - target).norm() / target.norm()).item() < 0.1

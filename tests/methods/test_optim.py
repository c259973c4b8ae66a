"""What torch's optimizers promise. test_adamw.py, test_muon.py and test_dgcsgd.py compare each with its formula."""

import copy

import pytest
import torch

from gradzip.optim import DGCSGD, AdamW, Muon

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_state_dict_continues_bit_for_bit(dtype):
    params = parameters(dtype)
    optimizer = AdamW(params, 0.01)
    train(optimizer, 3)
    copies = [p.detach().clone().requires_grad_() for p in params]
    other = AdamW(copies, 0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, 3, seed=2)
    train(other, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(params, copies))
    assert all(p.dtype == dtype and p.isfinite().all() for p in params)


@pytest.mark.parametrize("kind", [AdamW, DGCSGD, Muon])
def test_torch_default_device_does_not_matter(kind):
    """Counts are on the host, also after they were loaded."""
    start, gradients = torch.randn(4, 3), torch.randn(4, 4, 3)

    def trained():
        parameter = start.clone().requires_grad_()
        optimizer = kind([parameter], lr=0.1)
        for step, parameter.grad in enumerate(gradients.clone()):
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.step()
        return parameter

    expected = trained()
    with torch.device("meta"):
        got = trained()
    assert torch.equal(got, expected)


def test_groups_have_their_own_options_and_parameters_without_gradient_stay():
    used, unused, slow = (torch.ones(4, requires_grad=True) for _ in range(3))
    optimizer = AdamW([{"params": [used, unused]}, {"params": [slow], "lr": 0.0}], lr=0.1)
    train(optimizer, 2, parameters_of=[used, slow])
    assert not torch.equal(used, torch.ones(4))
    assert torch.equal(unused, torch.ones(4)) and torch.equal(slow, torch.ones(4))
    assert unused not in optimizer.state


@pytest.mark.parametrize("kind", [AdamW, DGCSGD])
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
    optimizer, scaler = AdamW([p], lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    for finite in (True, False):
        before = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        scaler.scale((p * (1.0 if finite else torch.inf)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(p, before[0]) != finite
    # Unscaled, and without the infinite one.
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((3,), 0.1))


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
    with pytest.raises(ValueError, match=f"AdamW: {message}"):
        AdamW(parameters(), **options)


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


@pytest.mark.parametrize("kind", [AdamW, DGCSGD])
def test_refuses_sparse_gradients(kind):
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=f"{kind.__name__}: got a sparse gradient"):
        kind(embedding.parameters()).step()

"""Schedules of theta."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradzip import DiminishingTheta, FFTRange, StepSchedule, TopK, roundtrip
from gradzip.methods.base.schedule import theta_at
from reference import examples, resnet20_gradients

INVALID = [-0.1, 1.0, 1, 2.0, math.nan, math.inf, "0.5", None, [0.5], 0.5j, torch.tensor([0.1, 0.2])]


def sgd(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in rates], lr=0.0)


@pytest.mark.parametrize("theta", [0, 0.0, 0.85, 1 - 2**-53, np.float64(0.5)])
def test_fixed_theta(theta):
    for step in (0, 1, 10**9):
        value = theta_at(theta, step)
        assert value == theta and type(value) is float


def test_callable_theta():
    assert [theta_at(lambda step: 0.9 / (1 + step), step) for step in (0, 1, 2)] == [0.9, 0.45, 0.3]


@pytest.mark.parametrize("theta", INVALID)
def test_invalid_theta(theta):
    with pytest.raises(ValueError, match=r"got theta = .*, expected a number in \[0, 1\)"):
        theta_at(theta, 0)


@pytest.mark.parametrize("theta", INVALID)
def test_error_names_the_step(theta):
    with pytest.raises(ValueError, match=r"got theta = .* at step 17, expected a number in \[0, 1\)"):
        theta_at(lambda step: theta if step == 17 else 0.5, 17)


# --- StepSchedule


@examples
@given(
    thetas=st.dictionaries(st.integers(1, 1000), st.floats(0, 1, exclude_max=True), max_size=8),
    first=st.floats(0, 1, exclude_max=True),
    step=st.integers(0, 1100),
)
def test_step_schedule_holds_the_last_value(thetas, first, step):
    thetas[0] = first
    expected = first
    for at in range(step + 1):  # walk through all steps
        expected = thetas.get(at, expected)
    assert StepSchedule(thetas)(step) == expected


def test_step_schedule_in_any_order():
    schedule = StepSchedule({30: 0.1, 0: 0.9, 10: 0.5})
    assert [schedule(step) for step in (0, 9, 10, 11, 29, 30, 10**9)] == [0.9, 0.9, 0.5, 0.5, 0.5, 0.1, 0.1]


@pytest.mark.parametrize("thetas", [{}, {1: 0.5}, {5: 0.5, 10: 0.2}])
def test_step_schedule_requires_step_0(thetas):
    with pytest.raises(ValueError, match=r"StepSchedule: got steps \[.*\], expected step 0 among them"):
        StepSchedule(thetas)


@pytest.mark.parametrize("theta", INVALID)
def test_step_schedule_checks_every_value(theta):
    with pytest.raises(ValueError, match="got theta = .*, expected"):
        StepSchedule({0: 0.5, 100: theta})


# --- DiminishingTheta (HPDC'20, Theorem 3.5)


def test_diminishing_theta_follows_the_learning_rate():
    """theta_t^2 = L eta_t."""
    optimizer = sgd(0.1)
    schedule = DiminishingTheta(optimizer, lipschitz=2.5)
    for step in range(20):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        assert schedule(step) ** 2 == pytest.approx(2.5 * 0.1 / (1 + step), rel=1e-14)
        assert theta_at(schedule, step) == schedule(step)


def test_diminishing_theta_under_a_torch_scheduler():
    optimizer = sgd(0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.25)
    schedule = DiminishingTheta(optimizer, lipschitz=2.5)
    thetas = []
    for step in range(6):
        thetas.append(schedule(step))
        optimizer.step()
        scheduler.step()
    assert thetas == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.125, 0.125])


def test_diminishing_theta_uses_the_largest_learning_rate():
    assert DiminishingTheta(sgd(0.01, 0.36, 0.04), lipschitz=1.0)(0) == pytest.approx(0.6)
    assert DiminishingTheta(sgd(0.36), lipschitz=0.0)(0) == 0.0


def test_diminishing_theta_is_bounded():
    assert DiminishingTheta(sgd(10.0), lipschitz=1.0)(0) == 0.99
    assert DiminishingTheta(sgd(10.0), lipschitz=1.0, most=0.7)(0) == 0.7


@pytest.mark.parametrize("lipschitz", [-1.0, -1e-300, math.nan])
def test_invalid_lipschitz(lipschitz):
    with pytest.raises(ValueError, match=f"DiminishingTheta: got lipschitz = {lipschitz}, expected a number >= 0"):
        DiminishingTheta(sgd(0.1), lipschitz)


@pytest.mark.parametrize("most", [1.0, -0.1, math.nan])
def test_invalid_most(most):
    with pytest.raises(ValueError, match="got theta = .*, expected"):
        DiminishingTheta(sgd(0.1), 1.0, most=most)


def test_tensor_learning_rate():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.25))
    assert theta_at(DiminishingTheta(optimizer, lipschitz=1.0), 0) == 0.5


def test_the_fraction_dropped_bounds_the_error_of_real_gradients():
    """Theorem 3.5 needs |v - v^| <= theta |v|. Equal magnitudes have an error of sqrt(theta)."""

    def error(compressor, grad: torch.Tensor) -> float:
        return float((roundtrip(compressor, grad)[0] - grad).norm() / grad.norm())

    for theta in (0.5, 0.85, 0.95):
        for name, grad in resnet20_gradients().items():
            assert 0.01 * theta < error(FFTRange(theta=theta), grad) < theta, name
        signs = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).sign()
        kept = round((1 - theta) * 4096)
        assert error(TopK(theta=theta), signs) == pytest.approx(math.sqrt(1 - kept / 4096), rel=1e-6)

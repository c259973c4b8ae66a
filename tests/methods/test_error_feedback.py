"""`residual_decay`, which all methods with error feedback have alike."""

import dataclasses

import numpy as np
import pytest
import torch

import gradzip
import kinds
from contract import check_conservation
from gradzip.methods.base.error_feedback import ErrorFeedback
from gradzip.methods.base.registry import registered
from gradzip.methods.spec import unparse
from gradzip.watch.replay import replay

METHODS = {name: method for name, method in registered().items() if issubclass(method, ErrorFeedback)}


def compressor(name, **options):
    """A method with its first example's arguments. Momentum adds up what is sent, so DGC has none here."""
    made = dataclasses.replace(gradzip.parse(METHODS[name].examples[0]), **options)
    return dataclasses.replace(made, momentum=0.0) if name == "dgc" else made


def test_methods_with_error_feedback_have_a_decay():
    with_residual = {spec.split(":")[0] for spec in kinds.examples(lambda c: c.keeps_residual and c.parts == [c])}
    assert with_residual - {"momentum"} == METHODS.keys()  # momentum has that of its method
    assert gradzip.parse("momentum:inner=topk(residual_decay=0.5)").residual_decay == 0.5
    for name, method in registered().items():
        if name not in METHODS:
            with pytest.raises(TypeError, match="unexpected keyword argument 'residual_decay'"):
                method(residual_decay=0.5)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_left_of_each_step_fades(name, size):
    group = gradzip.LocalGroup(compressor(name, residual_decay=0.75), size)
    generator = torch.Generator().manual_seed(0)

    def gradients(step):
        return [torch.randn(64, 64, generator=generator) for _ in range(size)]

    check_conservation(group, gradients, 20, roundings=400, above=1e2)


def top_k(x, k):
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    sent = np.zeros_like(x)
    sent[kept] = x[kept]
    return sent


@pytest.mark.parametrize("decay", [1.0, 0.95, 0.5])
def test_top_k_with_decay_in_numpy(decay):
    """e = beta e + g, then send the largest: bit by bit, with two ranks."""
    group = gradzip.LocalGroup(gradzip.TopK(theta=0.9, residual_decay=decay), 2)
    residuals = [np.zeros(4096, np.float32) for _ in range(2)]
    for step in range(10):
        gradients = [torch.randn(64, 64, generator=torch.Generator().manual_seed(2 * step + r)) for r in range(2)]
        averages = group.average([g.clone() for g in gradients], "w")
        mean = np.zeros(4096, np.float32)
        for rank, gradient in enumerate(gradients):
            corrected = residuals[rank] + gradient.numpy().reshape(-1)
            sent = top_k(corrected, 410)
            mean += np.float32(0.5) * sent
            residuals[rank] = np.float32(decay) * (corrected - sent)
        assert np.array_equal(averages[0].numpy().reshape(-1), mean)
        for own, state in zip(residuals, (c.states["w"] for c in group.compressors)):
            assert np.array_equal(state.residual.numpy().reshape(-1), own)


@pytest.mark.parametrize("name", ["topk", "block-float", "powersgd", "signsgd"])
def test_a_step_that_is_skipped_does_not_decay(name):
    options = {"exchange": "scatter_reduce"} if name == "topk" else {}
    group = gradzip.LocalGroup(compressor(name, residual_decay=0.5, **options), 2)
    spared = gradzip.LocalGroup(compressor(name, residual_decay=0.5, **options), 2)

    def finite(step):
        return [torch.randn(64, 64, generator=torch.Generator().manual_seed(2 * step + r)) for r in range(2)]

    for step in range(4):
        spoilt = finite(step)
        spoilt[1][5, 5] = float("inf")
        if step == 2:
            assert not group.average(spoilt, "w")[0].isfinite().all()
        assert torch.equal(group.average(finite(step), "w")[0], spared.average(finite(step), "w")[0])


def test_a_state_that_is_loaded_goes_on():
    method = gradzip.TopK(theta=0.9, residual_decay=0.5)
    group, resumed = gradzip.LocalGroup(method, 2), gradzip.LocalGroup(method, 2)
    gradients = [[torch.randn(64, 64) for _ in range(2)] for _ in range(4)]
    for of_step in gradients[:2]:
        group.average(of_step, "w")
    for new, old in zip(resumed.compressors, group.compressors):
        new.load_state_dict(old.state_dict())
    for of_step in gradients[2:]:
        assert torch.equal(group.average(of_step, "w")[0], resumed.average(of_step, "w")[0])


def test_replay_compares_with_what_was_sent():
    """The error of a step is what it did not send, before that fades."""
    x = torch.randn(64, 64)
    seen, faded = (replay(gradzip.TopK(theta=0.9, residual_decay=decay), "w", x) for decay in (1.0, 0.5))
    assert torch.equal(seen.wanted, faded.wanted) and torch.equal(seen.sent, faded.sent)


def test_specs_and_digests():
    method = gradzip.parse("topk:theta=.985,residual_decay=.95")
    assert method == gradzip.TopK(theta=0.985, residual_decay=0.95)
    assert unparse(method) == "topk:residual_decay=0.95,theta=0.985"
    assert "residual_decay=0.95" in repr(method) and method.clone() == method
    assert method.digest != gradzip.TopK(theta=0.985).digest  # by which ranks compare their methods
    nested = gradzip.parse("per-layer:w=topk(theta=.985,residual_decay=.95),default=fp16")
    assert nested.parts[0] == method


@pytest.mark.parametrize("decay", [0, -0.5, 1.5, float("nan"), "0.5", True, None])
@pytest.mark.parametrize("name", METHODS)
def test_other_values_are_refused(name, decay):
    with pytest.raises(ValueError, match=r"got residual_decay = .*, expected a number in \(0, 1\]"):
        METHODS[name](residual_decay=decay)


def test_a_decay_needs_error_feedback():
    with pytest.raises(ValueError, match="got residual_decay = 0.5 and error_feedback = False, expected error_feed"):
        gradzip.BlockFloat(error_feedback=False, residual_decay=0.5)


@pytest.mark.parametrize("name", METHODS)
def test_residuals_take_turns_in_two_memories(name):
    """A step that fails is undone, so the former residual stays until the step is complete."""
    group = gradzip.LocalGroup(compressor(name), 1)
    (own,) = group.compressors
    grad, seen = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)), []
    for _ in range(8):
        group.average([grad.clone()], "w")
        assert own.states["w"].next_residual is None
        seen.append(own.states["w"].residual)  # keeps the memory: what is new is not where another one was
    addresses = [residual.data_ptr() for residual in seen]
    assert len(set(addresses[-4:])) == 2 and addresses[-4:-2] == addresses[-2:]

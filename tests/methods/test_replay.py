"""The error of one rank's step: against references, and identities of error feedback."""

import copy
import math

import numpy as np
import pytest
import torch

import gradzip
from contract import SHAPES, assert_equal_states, gradient
from gradzip.watch.replay import cosine, relative_error, replay
from kinds import params


def alpha(wanted, sent):
    """|x - x^| / |x| in NumPy, float64."""
    wanted, sent = (np.asarray(x, dtype=np.float64).ravel() for x in (wanted, sent))
    return np.linalg.norm(wanted - sent) / np.linalg.norm(wanted)


def error(seen):
    return relative_error(*seen.energies)


def cosine_of(seen):
    return cosine(*seen.energies, float(seen.sent.double().norm()) ** 2)


def test_error_and_cosine_of_float16():
    x = gradient("w", 0, 0)
    rounded = x.numpy().astype(np.float16).astype(np.float32)
    seen = replay(gradzip.Cast(), "w", x)
    assert torch.equal(seen.sent, torch.from_numpy(rounded))
    assert error(seen) == pytest.approx(alpha(x, rounded), rel=1e-5)
    assert 2**-13 < error(seen) < 2**-11  # rounding to 11 bits: at most 2^-11 of an element, at least nothing
    assert cosine_of(seen) == pytest.approx(1, abs=1e-6)
    assert (seen.nbytes, seen.clamped) == (2 * x.numel(), None)


def test_top_k_with_a_residual():
    x, residual = gradient("w", 0, 0), gradient("w", 0, 1)
    wanted = (x + residual).numpy()
    kept = np.sort(np.abs(wanted).ravel())[-round(0.1 * wanted.size)]
    sent = np.where(np.abs(wanted) >= kept, wanted, 0)
    state = gradzip.State({"w": x.shape})
    state.residual = residual.view(-1).clone()
    seen = replay(gradzip.TopK(theta=0.9), "w", x, state)
    np.testing.assert_allclose(seen.sent.numpy(), sent, rtol=1e-6)
    assert error(seen) == pytest.approx(alpha(wanted, sent), rel=1e-6)
    # The elements that are sent are exact, so x - x^ and x^ are orthogonal.
    assert cosine_of(seen) == pytest.approx(math.sqrt(1 - error(seen) ** 2), rel=1e-6)
    assert (seen.sent == 0).double().mean().item() == pytest.approx(0.9, abs=1 / wanted.size)
    assert torch.equal(state.residual, residual.view(-1))


def test_a_residual_that_another_method_has_left_is_sent():
    x, residual = gradient("w", 0, 0), gradient("w", 0, 1)
    state = gradzip.State({"w": x.shape})
    state.residual = residual.view(-1)
    seen = replay(gradzip.Cast(), "w", x, state)
    assert torch.equal(seen.wanted, x + residual)
    assert 2**-13 < error(seen) < 2**-11


def test_clamped_share():
    x = gradient("w", 0, 0)
    magnitudes = np.sort(np.abs(x.numpy()).ravel())[::-1][: round(0.25 * x.numel())]
    seen = replay(gradzip.DCTRange(theta=0.75, value_range=1.5), "w", x)  # a matrix is not transformed
    assert seen.clamped == pytest.approx(np.mean(magnitudes > 1.5))
    assert 0.1 < seen.clamped < 0.9
    assert replay(gradzip.FFTRange(), "w", x).clamped == 0


def state_before(method, name, x):
    """The state with which a step begins, in a copy: with the residual that another method has left."""
    memory = copy.deepcopy(method.memory)
    if name not in memory.states and name not in memory.parked:
        return None
    return memory.begin_step({name: x.shape}, method.state_shapes, x.device, 0, 1)


@pytest.mark.parametrize("spec", params())
def test_replay_is_the_step_of_a_group_of_one_and_changes_nothing(spec):
    group = gradzip.LocalGroup(gradzip.parse(spec), 1)
    compressor = group.compressors[0]
    for step in range(4):
        for name in SHAPES:
            x = gradient(name, 0, step)
            method = compressor.method_for(name, x.shape)
            state, before = state_before(method, name, x), compressor.state_dict()
            seen = replay(method, name, x, state)
            assert_equal_states(compressor.state_dict(), before)
            old = None if state is None else state.residual
            wanted = x if old is None or not method.keeps_residual else x + old.view(x.shape)
            average = group.average([x], name)[0]
            compressed = not method.bypasses(x)
            if compressed or not method.changes_uncompressed:
                assert torch.equal(seen.sent, average)
            if compressed and not isinstance(method, gradzip.DGC):  # which wants to send the velocity, too
                torch.testing.assert_close(seen.wanted, wanted, rtol=1e-5, atol=1e-5)
            if not compressed:
                assert (error(seen), seen.nbytes) == (0, x.nbytes) or method.changes_uncompressed


@pytest.mark.parametrize("spec", params())
def test_gradients_that_are_not_finite(spec):
    x = gradient("v", 0, 0)
    x[3, 2, 1, 0] = math.inf
    assert not math.isfinite(error(replay(gradzip.parse(spec), "v", x)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_and_strides(dtype):
    x = gradient("v", 0, 0).to(dtype).to(memory_format=torch.channels_last)
    seen = replay(gradzip.TopK(theta=0.5), "v", x)
    assert error(seen) == pytest.approx(error(replay(gradzip.TopK(theta=0.5), "v", x.float().contiguous())))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", [gradzip.NoCompression(), gradzip.TopK(theta=0.5), gradzip.Cast()], ids=repr)
def test_bytes_are_those_of_a_step(method, dtype):
    for name in SHAPES:
        x = gradient(name, 0, 0).to(dtype)
        assert replay(method, name, x).nbytes == gradzip.roundtrip(method, x, name)[1]


def test_zeros():
    x = torch.zeros(64, 64)
    seen = replay(gradzip.TopK(), "w", x)
    assert (error(seen), cosine_of(seen), int(seen.sent.count_nonzero())) == (0, 1, 0)
    seen = replay(gradzip.SignSGD(error_feedback=False), "w", x)
    assert (error(seen), cosine_of(seen)) == (math.inf, 0) and seen.sent.all()

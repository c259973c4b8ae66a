"""QSGD and TernGrad: expectation and variance, sizes, shared scales and overflow."""

import numpy as np
import pytest
import torch

import gradzip
from gradzip import ops
from gradzip.memory.state import Key
from gradzip.methods.base.gather import CodedSum
from reference import padded, resnet20_gradients
from single import decode, encode
from unbiased import SHAPE, assert_unbiased, gradients

GRADIENTS = gradients()


# --- QSGD


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("arguments", [{}, {"bits": 2, "norm": "max"}, {"bits": 3, "bucket": 2000, "coding": "packed"}])
def test_qsgd_is_unbiased_with_the_papers_variance(name, arguments):
    codec, grad = gradzip.QSGD(**arguments), GRADIENTS[name]
    x = grad.reshape(-1).double().numpy()
    s = 2 ** (codec.bits - 1) - 1
    order = {"l2": 2, "max": np.inf}[codec.norm]
    buckets = [x[i : i + codec.bucket] for i in range(0, x.size, codec.bucket)]
    norms = np.concatenate([np.full(b.size, np.linalg.norm(b, order)) for b in buckets])
    level = np.divide(s * np.abs(x), norms, out=np.zeros_like(x), where=norms > 0)
    fraction = level - np.floor(level)
    fraction[np.minimum(fraction, 1 - fraction) < 1e-6] = 0  # whole numbers, up to rounding
    assert_unbiased(codec, grad, x, norms / s, fraction)


@pytest.mark.parametrize("shape", [(32, 32), (33, 31), (64, 700)])
def test_qsgd_bytes(shape):
    grad = torch.randn(shape)
    n = grad.numel()
    for bits, bucket in ((2, 512), (4, 512), (8, 64), (16, 100000)):
        packed = gradzip.QSGD(bits=bits, bucket=bucket, coding="packed", min_numel=0)
        limit = padded(48 + 4 * -(-n // bucket) + -(-n * bits // 8))
        approximation, nbytes = gradzip.roundtrip(packed, grad)
        assert nbytes == limit
        for norm in ("l2", "max"):
            elias = gradzip.QSGD(bits=bits, bucket=bucket, norm=norm, min_numel=0)
            stream, _ = ops.elias_quantize(grad, bits, bucket, norm, Key(0, 0, "gradient", 0).bits)
            approximated, nbytes = gradzip.roundtrip(elias, grad)
            assert nbytes == min(limit, padded(48 + 4 * -(-n // bucket) + stream.numel()))
            assert norm == "max" or torch.equal(approximated, approximation)  # both codings code the same levels


def test_elias_bytes_of_real_gradients():
    """Most levels are 0, so they take less than 2 bits an element, headers included, instead of 4."""
    grads = resnet20_gradients()
    numel = sum(g.numel() for g in grads.values())
    nbytes = sum(gradzip.roundtrip(gradzip.QSGD(bits=4), g)[1] for g in grads.values())
    assert 1.0 < 8 * nbytes / numel < 2.0
    for g in grads.values():
        assert 8 * gradzip.roundtrip(gradzip.QSGD(bits=4), g)[1] <= 4 * g.numel()


def test_elias_falls_back_to_packed_levels():
    grad = torch.where(torch.randn(64, 64) > 0, 1.0, -1.0)  # all levels are +s or -s
    payload = gradzip.QSGD(norm="max").encode(grad, Key(0, 0, "w", 0))
    assert payload.numel() == padded(48 + 4 * 8 + 64 * 64 // 2)
    assert torch.equal(decode(gradzip.QSGD(norm="max"), [payload], (64, 64)), grad)


def test_elias_codes_and_packed_levels_are_added_in_rank_order():
    qsgd = gradzip.QSGD(norm="max", bucket=64)
    dense, sparse = torch.where(torch.randn(64, 64) > 0, 1.0, -1.0), torch.randn(64, 64) ** 9
    grads = [sparse, dense, 2 * dense, 3 * sparse, -sparse, dense / 3]
    payloads = [qsgd.encode(grad.view(-1), Key(0, 0, "w", rank)) for rank, grad in enumerate(grads)]
    packed = 48 + 4 * 64 + 64 * 64 // 2
    assert [payload.numel() == packed for payload in payloads] == [False, True, True, False, False, True]
    expected = torch.zeros(64, 64)
    for payload in payloads:
        expected += decode(qsgd, [payload], (64, 64)) * torch.tensor(1 / 6)
    torch.testing.assert_close(decode(qsgd, payloads, (64, 64)), expected, rtol=0, atol=0)
    opened = qsgd.open_all(payloads, [64 * 64] * 6, 6)
    for body, problem in ((256, "do not code its levels"), (0, "norm is negative")):
        opened[3].body[body : body + 4] = 255
        with pytest.raises(gradzip.PayloadError, match=problem) as refused:
            qsgd.sum_all([CodedSum([torch.empty(64 * 64)], opened, 1 / 6)])
        assert refused.value.index == 3
    opened[4].body[:4] = opened[1].body[:4] = 255
    with pytest.raises(gradzip.PayloadError, match="the norm of a bucket is negative") as refused:
        qsgd.sum_all([CodedSum([torch.empty(64 * 64)], opened, 1 / 6)])
    assert refused.value.index == 1


# --- TernGrad


def clipped(x, clip):
    return x if clip is None else np.clip(x, -clip * np.sqrt((x**2).mean()), clip * np.sqrt((x**2).mean()))


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("clip", [2.5, None, 1])
def test_terngrad_is_unbiased_about_the_clipped_gradient(name, clip):
    grad = GRADIENTS[name]
    mean = clipped(grad.reshape(-1).double().numpy(), clip)
    p = np.abs(mean) / np.abs(mean).max()
    assert_unbiased(gradzip.TernGrad(clip=clip), grad, mean, np.abs(mean).max(), p)


@pytest.mark.parametrize("shared", [True, False])
def test_constant_gradients_are_exact(shared):
    grad = torch.full((64, 64), -1e-3)
    for average in gradzip.simulate(gradzip.TernGrad(shared_scale=shared), [grad, grad, grad]):
        torch.testing.assert_close(average, grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shared_scale_is_the_maximum_over_ranks(size):
    grads = [(rank + 1) * torch.randn(SHAPE) for rank in range(size)]
    scales = [np.abs(clipped(g.double().numpy(), 2.5)).max() for g in grads]
    average = gradzip.simulate(gradzip.TernGrad(), grads)[0].double().numpy() * size / max(scales)
    assert np.abs(average - average.round()).max() < 1e-5  # integers: all ranks used one scale
    assert np.abs(average).max() <= size + 1e-5
    if size > 1:
        own = gradzip.simulate(gradzip.TernGrad(shared_scale=False), grads)[0].double().numpy() * size / max(scales)
        assert np.abs(own - own.round()).max() > 1e-3


def test_shared_scale_averages_are_unbiased():
    """The gradients differ by a factor of 10. Mean and variance are those of the mean of clipped gradients."""
    a, b = GRADIENTS["normal"], GRADIENTS["normal"].flip(0) / 10
    group, steps = gradzip.LocalGroup(gradzip.TernGrad(), 2), 300
    total = sum(group.average([a, b], "w")[0].double() for _ in range(steps)).numpy()
    parts = [clipped(g.double().numpy(), 2.5) for g in (a, b)]
    scale = max(np.abs(c).max() for c in parts)
    variance = sum(np.abs(c) * (scale - np.abs(c)) for c in parts) / 4
    error = steps * (total / steps - sum(parts) / 2) ** 2
    assert abs(error.sum() / variance.sum() - 1) < 5 * np.sqrt(2 * 1.2 * (variance**2).sum()) / variance.sum()


def test_owners_of_partitions_do_not_clip_averages():
    """A sparse gradient has a small sigma, and would lose a third. Tested by its projection, to within a tenth."""
    grads = [GRADIENTS["mostly zero"] + 0.01 * torch.randn(SHAPE) for _ in range(3)]
    partitions = zip(*[np.array_split(g.double().numpy(), 3) for g in grads])  # each partition is clipped separately
    mean = np.concatenate([sum(clipped(partition, 2.5) for partition in of_ranks) / 3 for of_ranks in partitions])
    group = gradzip.LocalGroup(gradzip.TernGrad(shared_scale=False, exchange="scatter_reduce"), 3)
    along = [(group.average(grads, "w")[0].double().numpy() * mean).sum() / (mean**2).sum() for _ in range(100)]
    error = 5 * np.std(along) / np.sqrt(len(along))
    assert error < 0.1
    assert abs(np.mean(along) - 1) < error


@pytest.mark.parametrize("shape", [(32, 32), (31, 37), (64, 700)])
def test_terngrad_bytes(shape):
    grad = torch.randn(shape)
    own = 48 + padded(4) + padded(-(-grad.numel() // 5))
    assert gradzip.roundtrip(gradzip.TernGrad(shared_scale=False, min_numel=0), grad)[1] == own
    assert gradzip.roundtrip(gradzip.TernGrad(min_numel=0), grad)[1] == own + 48 + padded(4)


def test_terngrad_bytes_of_real_gradients():
    """In one payload: 1.6 bits for each element, padded by 16 bytes for each gradient, and two headers with scales."""
    grads = resnet20_gradients()
    group = gradzip.LocalGroup(gradzip.TernGrad(), 1)
    group.step([grads])
    numel, n = sum(g.numel() for g in grads.values()), len(grads)
    assert numel / 5 < group.bytes_sent < numel / 5 + 16 * n + 2 * (48 + padded(4 * n)) < 1.7 / 8 * numel


def test_non_finite_gradient_sends_two_headers():
    """All ranks see it in the gathered scales, and send no more than a header in the second round."""
    grads = [torch.randn(64, 64), torch.randn(64, 64)]
    grads[1][5, 5] = float("nan")
    group = gradzip.LocalGroup(gradzip.TernGrad(), 2)
    assert group.average(grads, "w")[0].isnan().all()
    assert group.bytes_sent == 48 + padded(4) + 48


@pytest.mark.parametrize("shared", [True, False])
def test_overflow_of_the_norm_is_non_finite(shared):
    """The norm of 64 x 64 equal numbers is 64 times that number. It is needed for sigma only, so not without clip."""
    for size, clip, finite in ((2.0**121, 2.5, True), (2.0**122, 2.5, False), (2.0**122, None, True)):
        grad = torch.full((64, 64), size)
        for average in gradzip.simulate(gradzip.TernGrad(clip=clip, shared_scale=shared), [grad, grad]):
            assert torch.equal(average, grad) if finite else average.isnan().all()


# --- both


@pytest.mark.parametrize("spec", ["qsgd", "qsgd:coding=packed", "terngrad", "terngrad:shared_scale=False"])
def test_random_draws_depend_on_every_part_of_the_key(spec):
    codec, grad = gradzip.parse(spec), torch.randn(64, 64)
    keys = [Key(0, 0, "w", 0), Key(0, 0, "w", 1), Key(0, 1, "w", 0), Key(0, 0, "v", 0), Key(1, 0, "w", 0)]
    bodies = {encode(codec, grad, key)[48:].numpy().tobytes() for key in keys}
    assert len(bodies) == len(keys)


@pytest.mark.parametrize("spec", ["qsgd", "qsgd:coding=packed", "terngrad"])
def test_corrupt_payloads_are_refused(spec):
    codec, grad = gradzip.parse(spec), torch.randn(64, 64)
    payload = encode(codec, grad, Key(0, 0, "w", 0))
    fields = bytes(payload[32:48].tolist())
    shorter = codec.seal(ops.Seal(payload[:-16].clone(), grad.numel(), fields))
    with pytest.raises(gradzip.PayloadError, match="from rank 0 of 1: corrupt payload: got .* after the header"):
        decode(codec, [shorter], (64, 64))
    if spec == "terngrad":  # its fields are empty, and the scales at the beginning of the body
        payload[48:52] = 0xFF
    with pytest.raises(gradzip.PayloadError, match="from rank 0 of 1: corrupt payload"):
        decode(codec, [codec.seal(ops.Seal(payload, grad.numel(), b"\xff" * 16))], (64, 64))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: gradzip.QSGD(bits=1), "QSGD: got bits = 1, expected an integer from 2 to 16"),
        (lambda: gradzip.QSGD(bits=17), "QSGD: got bits = 17"),
        (lambda: gradzip.QSGD(bucket=0), "QSGD: got bucket = 0, expected an integer >= 1"),
        (lambda: gradzip.QSGD(norm="l1"), "QSGD: got norm = 'l1', expected 'l2' or 'max'"),
        (
            lambda: gradzip.QSGD(coding="huffman"),
            "QSGD: got coding = 'huffman', expected 'elias', 'packed' or 'always_elias'",
        ),
        (lambda: gradzip.TernGrad(clip=0), "TernGrad: got clip = 0, expected None or a number > 0"),
        (lambda: gradzip.TernGrad(clip=float("nan")), "TernGrad: got clip = nan"),
        (lambda: gradzip.TernGrad(shared_scale=1), "TernGrad: got shared_scale = 1, expected True or False"),
    ],
)
def test_invalid_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""Golden payloads of every codec, in tests/golden, detect changes of the wire format.

An intended change increments the version in csrc/common/payload.h and gradzip/ops/payload.py, gets a "wire format" line
in CHANGELOG.md, and rewrites the golden files: `python tests/test_wire_format.py`.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import gradzip
from gradzip import ops
from gradzip.gather import GatherCompressor
from gradzip.registry import registered
from gradzip.state import Key

GOLDEN = Path(__file__).parent / "golden"
CODECS = {name: name for name, method in sorted(registered().items()) if issubclass(method, GatherCompressor)}
CODECS |= {
    "atomo": "atomo:atoms=entry,budget=100",
    "atomo-svd": "atomo",
    "atomo-fourier": "atomo:atoms=fourier,budget=50",
    "dct-range-kernels": "dct-range",
    "fft-range-spectra": "fft-range:block=None",
}
SHAPE = (40, 30)
SHAPES = {"dct-range-kernels": (10, 8, 3, 5)}
NUMEL = 1200
# Payloads of float32 numbers from LAPACK or an FFT library, whose rounding differs between libraries.
FROM_LIBRARIES = ("atomo-svd", "atomo-fourier")


def gradient():
    """Numbers of various magnitudes and signs, computed without a random generator."""
    i = torch.arange(NUMEL, dtype=torch.float64)
    return (torch.sin(i * i / 7) / (1 + i % 17)).float().reshape(SHAPE)


def golden_payload(name):
    return torch.from_numpy(np.fromfile(GOLDEN / f"{name}.payload", dtype=np.uint8))


def golden_decoded(name):
    return torch.from_numpy(np.fromfile(GOLDEN / f"{name}.decoded", dtype=np.float32))


def encode(name):
    return gradzip.parse(CODECS[name]).encode(gradient().reshape(SHAPES.get(name, SHAPE)), Key(0, 0, "golden", 0))


def decode(name, payload):
    return gradzip.parse(CODECS[name]).decode([payload], NUMEL).view(-1)


@pytest.mark.parametrize("name", CODECS)
def test_golden_payloads_decode_to_golden_values(name):
    # Up to the rounding of the transform library.
    torch.testing.assert_close(decode(name, golden_payload(name)), golden_decoded(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CODECS if name not in FROM_LIBRARIES])
def test_encoding_gives_the_golden_payload(name):
    """Rounding may change a code by one: one or two bytes, and the checksum. Nothing else may differ."""
    new, golden = encode(name).numpy(), golden_payload(name).numpy()
    assert new.shape == golden.shape
    checksum = range(24, 28)
    different = [i for i in np.flatnonzero(new != golden) if i not in checksum]
    assert len(different) <= 4, f"bytes {different} differ: did the wire format change?"


def test_encoding_gives_the_golden_fourier_payload():
    """Numbers of atoms are equal, and decoded values up to the rounding of the transform library."""
    name = "atomo-fourier"
    new, golden = encode(name), golden_payload(name)
    assert_equal_headers(new, golden)
    assert torch.equal(new[36:48], golden[36:48])
    torch.testing.assert_close(decode(name, new), golden_decoded(name), rtol=1e-4, atol=1e-5)


def assert_equal_headers(new, golden):
    """Equal lengths, and equal headers but for the checksum and the method's own fields."""
    assert new.shape == golden.shape
    assert torch.equal(new[:24], golden[:24]) and torch.equal(new[28:32], golden[28:32])


def svd_atoms(decoded):
    """A decoded gradient in the float64 singular vectors of `gradient()`: coefficients, and the norm of the rest."""
    left, _, right = np.linalg.svd(gradient().double().numpy(), full_matrices=False)
    decoded = decoded.double().numpy().reshape(SHAPE)
    coefficients = np.diag(left.T @ decoded @ right.T)
    return coefficients, np.linalg.norm(decoded - (left * coefficients) @ right)


def test_encoding_gives_the_golden_svd_payload():
    """The atoms drawn are those of the golden payload, to the accuracy that any LAPACK has.

    A computed decomposition is that of g + E, with |E| = c eps sigma_1 for a modest c (LAPACK Users' Guide, section
    4.9); c = 10 here. It changes singular values by |E| at most, and the vectors of atom k by an angle of
    |E| / gap_k each (Wedin), where gap_k is the distance of sigma_k from the next singular value. All p are below 1, so
    p_k = budget sigma_k / sum sigma, and each atom is sent with the coefficient sigma_k / p_k = sum sigma / budget.
    """
    sigma = np.linalg.svd(gradient().double().numpy(), compute_uv=False)
    budget = gradzip.parse(CODECS["atomo-svd"]).budget
    assert budget * sigma[0] < sigma.sum()  # all p < 1
    sent = sigma.sum() / budget
    gap = np.abs(sigma[:, None] - sigma + np.diag(np.full(len(sigma), np.inf))).min(1)
    error = 10 * 2.0**-23 * sigma[0]
    new, golden = encode("atomo-svd"), golden_payload("atomo-svd")
    assert_equal_headers(new, golden)
    assert torch.equal(new[32:48], golden[32:48])  # rows, number of atoms
    drawn = svd_atoms(decode("atomo-svd", golden))[0] > sent / 2
    angles = math.sqrt(2) * error / gap[drawn]  # of both vectors
    # The bounds are tight enough to be of use.
    assert angles.max() < 2e-4
    for payload in (golden, new):
        coefficients, rest = svd_atoms(decode("atomo-svd", payload))
        rounding = 8 * 2.0**-24  # of factors, products and their sum
        # The errors of sum sigma, of sigma_k / p_k, and of the cosines of the angles.
        relative = len(sigma) * error / sigma.sum() + 2 * error / sigma[drawn] + angles**2 + rounding
        assert (np.abs(coefficients[drawn] / sent - 1) <= relative).all()
        assert np.abs(coefficients[~drawn]).max() <= sent * ((angles**2).sum() + rounding)
        assert rest <= sent * (np.sqrt((angles**2).sum()) + rounding)


def test_method_numbers_are_unique():
    """Payloads of another method are detected by its number."""
    numbers = [method.number for method in registered().values() if hasattr(method, "number")]
    assert len(numbers) > 1
    assert len(set(numbers)) == len(numbers), sorted(numbers)


def block_float_payload(bits):
    return ops.block_float_encode(gradient(), bits, key=Key(0, 0, "golden", 0).bits)


def block_float_values(payload, bits):
    out = torch.empty(NUMEL)
    ops.block_float_decode([payload], out, bits)
    return out


@pytest.mark.parametrize("bits", [4, 8])
def test_golden_payloads_without_a_header(bits):
    """The sine of a library may differ in its last bit: a code or a step by one."""
    golden = golden_payload(f"block-float-{bits}")
    assert torch.equal(block_float_values(golden, bits), golden_decoded(f"block-float-{bits}"))
    different = (block_float_payload(bits) != golden).nonzero()
    assert len(different) <= 4, f"bytes {different} differ: did the wire format change?"


def write():
    GOLDEN.mkdir(exist_ok=True)
    for name in CODECS:
        payload = encode(name)
        payload.numpy().tofile(GOLDEN / f"{name}.payload")
        decode(name, payload).numpy().tofile(GOLDEN / f"{name}.decoded")
    for bits in (4, 8):
        payload = block_float_payload(bits)
        payload.numpy().tofile(GOLDEN / f"block-float-{bits}.payload")
        block_float_values(payload, bits).numpy().tofile(GOLDEN / f"block-float-{bits}.decoded")


if __name__ == "__main__":
    write()

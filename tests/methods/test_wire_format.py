"""Golden payloads of every method that sends payloads, in tests/methods/golden, detect changes of the wire format.

An intended change increments the version in csrc/common/payload.h and gradzip/ops/payload.py, gets a "wire format" line
in CHANGELOG.md, and new golden files. This script writes those that are missing (CONTRIBUTING.md).
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import gradzip
import kinds
from gradzip import ops
from gradzip.collectives import Gather
from gradzip.collectives.routines import Done, advance
from gradzip.engines.local import run
from gradzip.methods.base.group import averaged
from gradzip.methods.base.registry import registered

GOLDEN = Path(__file__).parent / "golden"
SHAPE = (40, 30)
KERNELS = (10, 8, 3, 5)
NUMEL = 1200


def gradient():
    """Numbers of various magnitudes and signs, computed without a random generator."""
    i = torch.arange(NUMEL, dtype=torch.float64)
    return (torch.sin(i * i / 7) / (1 + i % 17)).float().reshape(SHAPE)


def step(spec, shape, others=()):
    """A step of one rank alone: its payloads with more than a header, in order, and the average.

    others: payloads in place of those that the rank sends, by their number.
    """
    routine, payloads, answer = averaged(gradzip.parse(spec), gradient().view(shape), "golden", 0, 1), [], None
    while not isinstance(collective := advance(routine, answer), Done):
        (answer,) = run([collective])
        if isinstance(collective, Gather) and collective.tensor.numel() > ops.HEADER_NBYTES:
            if len(payloads) in others:
                answer = [others[len(payloads)]]
            payloads.append(collective.tensor.clone())
    return payloads, collective.result.view(-1)


def goldens():
    """Specs and shapes by the name of their files. Kernels, if they are sent in another way than a matrix."""
    found = {}
    for spec in kinds.examples(lambda compressor: compressor.parts == [compressor]):
        payloads, _ = step(spec, SHAPE)
        if payloads:
            name = spec.replace(":", "-")
            found[name] = spec, SHAPE
            if not torch.equal(step(spec, KERNELS)[0][-1], payloads[-1]):
                found[f"{name}-kernels"] = spec, KERNELS
    return found


NAMES = goldens()
# Payloads of float32 numbers from LAPACK or an FFT library, whose rounding differs between libraries.
SVD = [name for name, (spec, _) in NAMES.items() if getattr(gradzip.parse(spec), "atoms", None) == "svd"]
FOURIER = [name for name, (spec, _) in NAMES.items() if getattr(gradzip.parse(spec), "atoms", None) == "fourier"]


def golden_payload(name):
    return torch.from_numpy(np.fromfile(GOLDEN / f"{name}.payload", dtype=np.uint8))


def golden_decoded(name):
    return torch.from_numpy(np.fromfile(GOLDEN / f"{name}.decoded", dtype=np.float32))


def encode(name):
    """The payload of the last round. With TernGrad, scales are sent before it."""
    return step(*NAMES[name])[0][-1]


def decode(name, payload):
    rounds = len(step(*NAMES[name])[0])
    return step(*NAMES[name], {rounds - 1: payload})[1]


def test_every_file_belongs_to_a_method():
    assert {path.name for path in GOLDEN.iterdir()} == {
        f"{name}.{of}" for name in NAMES for of in ("payload", "decoded")
    }


@pytest.mark.parametrize("name", NAMES)
def test_golden_payloads_decode_to_golden_values(name):
    # Up to the rounding of the transform library.
    torch.testing.assert_close(decode(name, golden_payload(name)), golden_decoded(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SVD + FOURIER])
def test_encoding_gives_the_golden_payload(name):
    """Rounding may change a code by one: one or two bytes, and the checksum. Nothing else may differ."""
    new, golden = encode(name).numpy(), golden_payload(name).numpy()
    assert new.shape == golden.shape
    checksum = range(24, 28)
    different = [i for i in np.flatnonzero(new != golden) if i not in checksum]
    assert len(different) <= 4, f"bytes {different} differ: did the wire format change?"


@pytest.mark.parametrize("name", FOURIER)
def test_encoding_gives_the_golden_fourier_payload(name):
    """Numbers of atoms are equal, and decoded values up to the rounding of the transform library."""
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


@pytest.mark.parametrize("name", SVD)
def test_encoding_gives_the_golden_svd_payload(name):
    """The atoms drawn are those of the golden payload, to the accuracy that any LAPACK has.

    A computed decomposition is that of g + E, with |E| = c eps sigma_1 for a modest c (LAPACK Users' Guide, section
    4.9); c = 10 here. It changes singular values by |E| at most, and the vectors of atom k by an angle of
    |E| / gap_k each (Wedin), where gap_k is the distance of sigma_k from the next singular value. All p are below 1, so
    p_k = sigma_k / sent, and each atom is sent with the coefficient sigma_k / p_k = sent: sum sigma / budget, or with
    budget="l2" the norm of sigma.
    """
    sigma = np.linalg.svd(gradient().double().numpy(), compute_uv=False)
    budget = gradzip.parse(NAMES[name][0]).budget
    sent, total = (np.linalg.norm(sigma),) * 2 if budget == "l2" else (sigma.sum() / budget, sigma.sum())
    assert sigma[0] < sent  # all p < 1
    gap = np.abs(sigma[:, None] - sigma + np.diag(np.full(len(sigma), np.inf))).min(1)
    error = 10 * 2.0**-23 * sigma[0]
    new, golden = encode(name), golden_payload(name)
    assert_equal_headers(new, golden)
    assert torch.equal(new[32:48], golden[32:48])  # rows, number of atoms
    drawn = svd_atoms(decode(name, golden))[0] > sent / 2
    angles = math.sqrt(2) * error / gap[drawn]  # of both vectors
    # The bounds are tight enough to be of use.
    assert angles.max() < 2e-4
    for payload in (golden, new):
        coefficients, rest = svd_atoms(decode(name, payload))
        rounding = 8 * 2.0**-24  # of factors, products and their sum
        # The errors of sum sigma, of sigma_k / p_k, and of the cosines of the angles.
        relative = len(sigma) * error / total + 2 * error / sigma[drawn] + angles**2 + rounding
        assert (np.abs(coefficients[drawn] / sent - 1) <= relative).all()
        assert np.abs(coefficients[~drawn]).max() <= sent * ((angles**2).sum() + rounding)
        assert rest <= sent * (np.sqrt((angles**2).sum()) + rounding)


def test_method_numbers_are_unique():
    """Payloads of another method are detected by its number."""
    numbers = [method.number for method in registered().values() if hasattr(method, "number")]
    assert len(numbers) > 1
    assert len(set(numbers)) == len(numbers), sorted(numbers)


def write_missing():
    for name in NAMES:
        path = GOLDEN / f"{name}.payload"
        if not path.exists():
            payload = encode(name)
            payload.numpy().tofile(path)
            decode(name, payload).numpy().tofile(path.with_suffix(".decoded"))


if __name__ == "__main__":
    write_missing()

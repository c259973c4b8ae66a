"""Payloads of every codec, kept in tests/golden: the wire format cannot change unnoticed.

A change on purpose raises the version in csrc/common/payload.h and gradzip/ops/payload.py, gets a "wire format" line in
CHANGELOG.md, and writes the files anew: `python tests/test_wire_format.py`.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import gradzip
from gradzip.gather import GatherCompressor
from gradzip.registry import registered
from gradzip.state import Key

GOLDEN = Path(__file__).parent / "golden"
CODECS = {name: name for name, method in sorted(registered().items()) if issubclass(method, GatherCompressor)}
CODECS |= {
    "atomo": "atomo:atoms=entry,budget=100",
    "atomo-svd": "atomo",
    "atomo-fourier": "atomo:atoms=fourier,budget=50",
}
# Of float32 numbers from a library, whose last bits may differ.
FROM_LIBRARIES = ("atomo-svd", "atomo-fourier")


def gradient():
    """40 x 30 numbers of mixed sizes and signs that need no generator."""
    i = torch.arange(1200, dtype=torch.float64)
    return (torch.sin(i * i / 7) / (1 + i % 17)).float().reshape(40, 30)


@pytest.mark.parametrize("name", CODECS)
def test_old_payloads_decode_to_what_they_always_did(name):
    codec = gradzip.parse(CODECS[name])
    payload = torch.from_numpy(np.fromfile(GOLDEN / f"{name}.payload", dtype=np.uint8))
    decoded = torch.from_numpy(np.fromfile(GOLDEN / f"{name}.decoded", dtype=np.float32))
    # To the rounding of whichever transform library is at work.
    torch.testing.assert_close(codec.decode([payload], 1200).view(-1), decoded, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CODECS)
def test_new_payloads_are_the_old_ones(name):
    """Where rounding goes another way a code may differ by one: a byte or two, the checksum, and nothing else."""
    codec = gradzip.parse(CODECS[name])
    payload = codec.encode(gradient(), Key(0, 0, "golden", 0))
    new, old = payload.numpy(), np.fromfile(GOLDEN / f"{name}.payload", dtype=np.uint8)
    assert new.shape == old.shape
    if name in FROM_LIBRARIES:
        decoded = torch.from_numpy(np.fromfile(GOLDEN / f"{name}.decoded", dtype=np.float32))
        torch.testing.assert_close(codec.decode([payload], 1200).view(-1), decoded, rtol=1e-4, atol=1e-5)
        return
    checksum = range(24, 28)
    different = [i for i in np.flatnonzero(new != old) if i not in checksum]
    assert len(different) <= 4, f"bytes {different} differ: did the wire format change?"


def test_no_two_methods_share_a_number():
    """By it a payload of another method is told."""
    numbers = [method.number for method in registered().values() if hasattr(method, "number")]
    assert len(numbers) > 1
    assert len(set(numbers)) == len(numbers), sorted(numbers)


def write():
    GOLDEN.mkdir(exist_ok=True)
    for name, spec in CODECS.items():
        codec = gradzip.parse(spec)
        payload = codec.encode(gradient(), Key(0, 0, "golden", 0))
        payload.numpy().tofile(GOLDEN / f"{name}.payload")
        codec.decode([payload], 1200).numpy().tofile(GOLDEN / f"{name}.decoded")


if __name__ == "__main__":
    write()

"""Corrupt payloads with a valid checksum: every codec decodes them or raises PayloadError."""

import numpy as np
import pytest
import torch

import gradzip
import kinds
from gradzip.memory.state import Key
from gradzip.methods.base.gather import GatherCompressor
from single import decode, encode

CODECS = kinds.examples(lambda compressor: isinstance(compressor, GatherCompressor))


@pytest.mark.parametrize("spec", kinds.params(CODECS, kinds.FIRST))
def test_corrupt_payloads_are_decoded_or_refused(spec):
    codec, rng = gradzip.parse(spec), np.random.default_rng(1)
    numel = 33 * 41
    refused = 0
    for trial in range(105):
        grad = torch.randn(33, 41, generator=torch.Generator().manual_seed(trial))
        valid = encode(codec, grad, Key(0, trial, "w", 0))
        data = valid.numpy().copy()
        # Corrupt 1 to 3 bytes: of the method's own fields, of the first bytes of the body, or anywhere.
        begin, end = ((32, 48), (48, 64), (32, data.size))[trial % 3]
        end = min(end, data.size)
        for _ in range(rng.integers(1, 4)):
            if begin < end:
                data[rng.integers(begin, end)] = rng.integers(256)
        if trial % 10 == 0:
            data[32:48] = rng.integers(256, size=16)
        if trial % 7 == 0:
            data = data[: 48 + 16 * rng.integers(0, (data.size - 48) // 16 + 1)]
        corrupt = torch.from_numpy(data)
        codec.seal(gradzip.ops.Seal(corrupt, numel, data[32:48].tobytes()))
        for payloads in ([corrupt], [valid, corrupt]):
            try:
                assert decode(codec, payloads, (33, 41)).numel() == numel
            except gradzip.PayloadError:
                refused += 1
    assert refused > 12  # wrong lengths are always detected

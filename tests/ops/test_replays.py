"""Draws of captured steps: on a device, a number makes another key of each, here on a stand-in for one."""

import contextlib
import shutil
from unittest import mock

import numpy as np
import pytest
import torch

import philox
from benchmarks.device_ops.stand_in import DEVICE, stand_in
from gradzip import ops
from gradzip.ops import groups, replays

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")

N = 1000
X = torch.cat([torch.zeros(N // 4), torch.randn(N - N // 4, generator=torch.Generator().manual_seed(0))])
KEYS = [5, 2**64 - 1]
OWN = groups.keys_of(KEYS[:1], [2])  # of two parts


def bitmap(device=None, nbytes=-(-N // 8)):
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def packed_signs(x, of):
    out = bitmap(x.device)
    ops.pack_signs_all([(x, of(KEYS[0]), out)])
    return out


def majority(x, of):  # all signs tie
    votes = [bitmap(x.device), torch.full_like(bitmap(x.device), 255)]
    return ops.majority(votes, N, of(KEYS[0]))


def range_float(x, of):
    out = torch.zeros(ops.packed_nbytes(N, 6), dtype=torch.uint8, device=x.device)
    ops.RangeFloat.fit(x, 6).encode_packed(x, out, of(KEYS[0]))
    return out


def rows_of_levels(x, of):
    payloads = torch.zeros(2, 2048, dtype=torch.uint8, device=x.device)
    ops.quantize_packed_all(torch.stack([x, x]), 4, 64, "max", list(map(of, KEYS)), payloads)
    return payloads


def group_of_signs(x, of):
    outs = torch.zeros(2, 128, dtype=torch.uint8, device=x.device)
    groups.pack_signs([x, x], np.array(list(map(of, OWN)), np.uint64), groups.addresses(list(outs)))
    return outs


def group_of_trits(x, of):
    outs, scales = torch.zeros(2, 256, dtype=torch.uint8, device=x.device), torch.full((2,), 4.0, device=x.device)
    keys = np.array(list(map(of, OWN)), np.uint64)
    groups.ternary_packed([x, x], scales, scales, keys, groups.addresses(list(outs)))
    return outs


def group_of_rows(x, of):
    outs, means = torch.zeros(2, 128, dtype=torch.uint8, device=x.device), torch.zeros(2, 2, device=x.device)
    keys, rows = np.array(list(map(of, OWN)), np.uint64), np.array([1, 1])
    groups.one_bit_packed([x, x], rows, keys, groups.addresses(list(outs)), groups.addresses(list(means)))
    return outs


# What methods draw with: the results, given a tensor and what makes the key of a draw from its own.
DRAWS = {
    "natural_encode": lambda x, of: ops.natural_encode(x, of(KEYS[0]))[0],
    "quantize_packed": lambda x, of: ops.quantize_packed(x, 4, key=of(KEYS[0]))[0],
    "quantize_packed_all": rows_of_levels,
    "random_indices": lambda x, of: ops.random_indices(10 * N, N, of(KEYS[0]), x.device),
    "block_float_encode": lambda x, of: ops.block_float_encode(x, 4, key=of(KEYS[0])),
    "block_float_encode_all": lambda x, of: ops.block_float_encode_all(torch.stack([x, x]), 8, 64, list(map(of, KEYS))),
    "groups.block_float_encode": lambda x, of: groups.block_float_encode(x, 4, 256, of(KEYS[0]), 4, None, None),
    "ternary_packed": lambda x, of: ops.ternary_packed(x, 4.0, key=of(KEYS[0])),
    "groups.ternary_packed": group_of_trits,
    "pack_signs": packed_signs,
    "groups.pack_signs": group_of_signs,
    "majority": majority,
    "one_bit_packed": lambda x, of: ops.one_bit_packed(x.view(10, -1), of(KEYS[0]))[0],
    "groups.one_bit_packed": group_of_rows,
    "range_float": range_float,
}


@contextlib.contextmanager
def capturing(device, numbers):
    with device.capturing(), mock.patch.object(replays.current, "numbers", numbers):
        yield


def key_in_replay(replay):
    """The key of a draw in a replay: two draws by its own key."""
    return lambda key: int(philox.words(int(key), 2, first=4 * replay).astype("<u4").view("<u8")[0])


@pytest.mark.parametrize("name", DRAWS)
def test_replays_draw_other_numbers(name):
    """Those of the keys of the replay, also of replays after the launch: the number is read when the kernel runs."""
    draw = DRAWS[name]
    expected = [draw(X, key_in_replay(replay)) for replay in (0, 3)]
    own = draw(X, int)
    with stand_in() as device:
        x, number = device.tensor(X.clone()), device.tensor(torch.tensor([0]))
        assert torch.equal(draw(x, int).host, own), "without a number"
        with capturing(device, {DEVICE: number}):
            got = [draw(x, int).host]
            number.fill_(3)
            got.append(draw(x, int).host)
            assert torch.equal(draw(X, int), own), "on the CPU"
        with mock.patch.object(replays.current, "numbers", {DEVICE: number}):
            assert torch.equal(draw(x, int).host, own), "not captured"
    assert all(map(torch.equal, got, expected))
    assert not any(torch.equal(*pair) for pair in [(own, got[0]), (own, got[1]), (got[0], got[1])])


def test_nearest_rounding_draws_nothing():
    with stand_in() as device:
        x, number = device.tensor(X.clone()), device.tensor(torch.tensor([1]))
        with capturing(device, {DEVICE: number}):
            assert torch.equal(ops.block_float_encode(x, 4).host, ops.block_float_encode(X, 4))


def test_a_device_without_a_number():
    refused = pytest.raises(RuntimeError, match="step to capture that draws.*expected a step before it")
    with stand_in() as device, capturing(device, {}), refused:
        ops.natural_encode(device.tensor(X.clone()), 1)

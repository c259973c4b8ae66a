"""Block-scaled integers: a float32 step for each block of numbers, and a code of 2, 4 or 8 bits for each number."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _native, groups, replays
from .errors import PayloadError

_LARGEST_BLOCK = 4096


def check_block_float(bits: int, block: int, what: str) -> None:
    """Raise ValueError unless there are codes of `bits` bits and blocks of `block` elements."""
    if bits not in (2, 4, 8):
        raise ValueError(f"{what}: got bits = {bits!r}, expected 2, 4 or 8")
    if not (isinstance(block, int) and 32 <= block <= _LARGEST_BLOCK and block % 32 == 0):
        raise ValueError(f"{what}: got block = {block!r}, expected a multiple of 32 from 32 to {_LARGEST_BLOCK}")


def block_float_nbytes(blocks: int, bits: int, block: int = 256) -> int:
    """Return the bytes of a payload of so many blocks."""
    return blocks * (4 + block * bits // 8)


def block_float_encode(
    x: Tensor,
    bits: int,
    block: int = 256,
    key: int | None = None,
    *,
    blocks: int | None = None,
    residual: Tensor | None = None,
    error: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Encode x + residual in one pass. Return the payload, uint8 of `block_float_nbytes(blocks, bits, block)`.

    The step of a block is max \\|x\\| / s, where s = 2^(bits - 1) - 1, and codes are x / step, rounded to nearest, ties
    to even; or, with a key, floor(x / step + u), u uniform in [0, 1) of 16 bits: half i % 2 of draw i // 2 of the key
    for element i. Then x / step is cut to 16 bits first: the expectation of a decoded element is off by less than
    2^-16 steps. Codes are in [-s, s]. With bits = 2, the step is max \\|x\\| / 3, and a code from -2 to 1 stands for
    half a step more: +-1/2 and +-3/2 steps, whichever is nearest. Zero goes up in elements of even index, down in
    others.
    Each block is its step (float32), and then its codes in two's complement, a little-endian bit stream.

    x: n elements, any shape, float32, float16 or bfloat16. block: elements of a block, a multiple of 32, 4096 at most.
    key: 64-bit key of the random generator, with 4 or 8 bits; None rounds to nearest. blocks: of the payload, at least
    ceil(n / block), which is the default; zeros follow x. residual: n elements, float32, and then `error` is needed.
    error: n elements, float32, for x + residual - decoded; may be x if that is float32. out: the payload's memory.

    If an element is not finite, its block decodes to NaN, and its `error` is NaN. If all magnitudes of a block
    are below 2^-100, its step is 2^-100 / s. Deterministic. Does not wait for the device.

    >>> payload = block_float_encode(torch.tensor([7.0, -3.0, 0.6]), bits=4, block=32)
    >>> payload.numel(), hex(payload[4]), hex(payload[5])
    (20, '0xd7', '0x1')
    """
    what = "block_float_encode"
    check_block_float(bits, block, what)
    if bits == 2 and key is not None:
        raise ValueError(f"{what}: got a key with bits = 2, whose codes are rounded to nearest, expected None")
    keys = array("Q", [] if key is None else [_native.check_key(key, what)])
    x = _native.check(x, _native.FLOATS, f"{what}: x")
    n = x.numel()
    least = -(-n // block)
    blocks = least if blocks is None else blocks
    if blocks < least:
        raise ValueError(f"{what}: got blocks = {blocks}, expected at least {least} for {n} elements")
    residual, error = _check_feedback(residual, error, x, what)
    out = _native.output(out, block_float_nbytes(blocks, bits, block), torch.uint8, x.device, f"{what}: out")
    arguments = (*_native.floats(x), _native.address(residual), 1, n, blocks, bits, block, keys.buffer_info()[0])
    _native.run(
        "block_float_encode", x, *arguments, replays.address(x, key is not None), _native.address(error), out.data_ptr()
    )
    return out


def _check_feedback(
    residual: Tensor | None, error: Tensor | None, x: Tensor, what: str
) -> tuple[Tensor | None, Tensor | None]:
    if residual is not None:
        residual = _native.check(residual, torch.float32, f"{what}: residual", x.numel(), x.device)
        if error is None:
            raise ValueError(f"{what}: got a residual and no tensor for the error, expected both; error may be x")
    if error is not None:
        error = _native.in_place(error, torch.float32, f"{what}: error", x.numel(), x.device)
    return residual, error


def block_float_encode_all(
    x: Tensor,
    bits: int,
    block: int = 256,
    keys: Sequence[int] | None = None,
    out: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    error: Tensor | None = None,
) -> Tensor:
    """`block_float_encode` for each row of a matrix, in one call.

    x: (rows, n), float32, float16 or bfloat16; residual and error: (rows, n), float32; keys: of each row, with 4 or 8
    bits; None rounds to nearest. Returns the payload of each row, (rows, block_float_nbytes(ceil(n / block), bits,
    block)), uint8, in `out` if given. Deterministic. Does not wait for the device.

    >>> payloads = block_float_encode_all(torch.tensor([[7.0, -3.0], [14.0, 0.0]]), bits=4, block=32)
    >>> payloads.shape, [hex(payload[4]) for payload in payloads]
    (torch.Size([2, 20]), ['0xd7', '0x7'])
    """
    what = "block_float_encode_all"
    check_block_float(bits, block, what)
    if bits == 2 and keys is not None:
        raise ValueError(f"{what}: got keys with bits = 2, whose codes are rounded to nearest, expected None")
    row_keys = _native.row_keys(x, keys, what)
    x = _native.check(x, _native.FLOATS, f"{what}: x")
    rows, n = x.shape
    blocks = -(-n // block)
    nbytes = block_float_nbytes(blocks, bits, block)
    residual, error = _check_feedback(residual, error, x, what)
    out = _native.output(out, rows * nbytes, torch.uint8, x.device, f"{what}: out").view(rows, nbytes)
    arguments = (*_native.floats(x), _native.address(residual), rows, n, blocks, bits, block, row_keys.buffer_info()[0])
    replay = replays.address(x, keys is not None)
    _native.run("block_float_encode", x, *arguments, replay, _native.address(error), out.data_ptr())
    return out


def block_float_decode(payloads: Sequence[Tensor], out: Tensor, bits: int, block: int = 256) -> None:
    """Decode payloads of consecutive elements, of equally many blocks each, to `out`, in one pass.

    out: n elements, float32, float16 or bfloat16, in place; payload k has those from k * blocks * block on.
    Deterministic. Does not wait for the device. Any bytes decode; raises PayloadError if the lengths of the payloads
    differ, or are not of whole blocks, or have fewer elements than `out`.
    """
    _decode(payloads, 1, out, bits, block, 1.0, None)


def block_float_decode_sum(
    payloads: Sequence[Tensor],
    out: Tensor,
    bits: int,
    block: int = 256,
    weight: float = 1.0,
    residual: Tensor | None = None,
) -> None:
    """Write weight * the sum of decoded payloads, added in order, plus the residual, to `out`, in one pass.

    out: n elements, float32, or with at most 240 payloads float16 or bfloat16, to which the sum is rounded once;
    residual: n elements, float32, may be out. Else as `block_float_decode`.
    """
    _decode(payloads, len(payloads), out, bits, block, weight, residual)


def block_float_max_step(payloads: Sequence[Tensor], bits: int, block: int = 256) -> Tensor:
    """Return the largest magnitude of a step, as a float32 tensor of 1 element on the device of the payloads.

    No payload decodes to a magnitude above 2^(bits - 1) times that. It is not finite if a decoded element is NaN. Does
    not wait for the device.
    """
    words = block_float_nbytes(1, bits, block) // 4
    steps = torch.cat([payload.view(torch.float32)[::words] for payload in payloads])
    return torch.linalg.vector_norm(steps, math.inf, dim=0, keepdim=True)


def _decode(
    payloads: Sequence[Tensor], each: int, out: Tensor, bits: int, block: int, weight: float, start: Tensor | None
) -> None:
    what = "block_float_decode"
    check_block_float(bits, block, what)
    out = _native.sum_of(each, out, f"{what}: out")
    n, record = out.numel(), block_float_nbytes(1, bits, block)
    if start is not None:
        start = _native.check(start, torch.float32, f"{what}: residual", n, out.device)
    checked = [_native.check(p, torch.uint8, f"{what}: payload", device=out.device) for p in payloads]
    lengths = sorted({p.numel() for p in checked})
    shards = len(checked) // each if each else 0
    if len(lengths) != 1 or lengths[0] % record or shards * (lengths[0] // record) * block < n:
        raise PayloadError(
            f"{what}: got payloads of {lengths} bytes, expected equally long ones of blocks of {record} bytes, for {n} "
            f"elements of {bits} bits in blocks of {block}"
        )
    if out.is_cuda:  # which reads words
        checked = [p.clone() if p.data_ptr() % 4 else p for p in checked]
    groups.block_float_decode(checked, each, out, bits, block, weight, start)

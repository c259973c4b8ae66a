"""Primitives over torch tensors: checked here, computed by C++ kernels (csrc/) on torch.get_num_threads() threads.
Where the tensors are on a CUDA device, CUDA kernels compute them, on its current stream.

All are deterministic: the same input gives the same bits whatever the number of threads, the instruction set or the
device. On CUDA nothing waits for the device, unless a docstring says so.
"""

from .abs_max import abs_max, abs_max_tensor
from .compact import bitmap, bitmap_nbytes, compact, expand, gather_marked
from .pack_bits import pack_bits, packed_nbytes, unpack_bits
from .payload import (
    HEADER_NBYTES,
    NON_FINITE,
    PAYLOAD_ALIGN,
    Payload,
    PayloadError,
    new_payload,
    open_payload,
    seal,
    split_payloads,
)
from .range_float import RangeFloat, check_format
from .select import select, select_threshold
from .spectrum import spectrum_decode_add, spectrum_power

__all__ = [
    "HEADER_NBYTES",
    "NON_FINITE",
    "PAYLOAD_ALIGN",
    "Payload",
    "PayloadError",
    "RangeFloat",
    "abs_max",
    "abs_max_tensor",
    "bitmap",
    "bitmap_nbytes",
    "check_format",
    "compact",
    "expand",
    "gather_marked",
    "new_payload",
    "open_payload",
    "pack_bits",
    "packed_nbytes",
    "seal",
    "select",
    "select_threshold",
    "spectrum_decode_add",
    "spectrum_power",
    "split_payloads",
    "unpack_bits",
]

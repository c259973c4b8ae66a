"""Primitives over torch tensors: checked here, computed by C++ kernels (csrc/) on torch.get_num_threads() threads.

All are deterministic: the same input gives the same bits whatever the number of threads or the instruction set.
"""

from .abs_max import abs_max
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
from .quantize import dequantize, num_buckets, quantize, quantize_packed, quantized_decode_add
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
    "bitmap",
    "bitmap_nbytes",
    "check_format",
    "compact",
    "dequantize",
    "expand",
    "gather_marked",
    "new_payload",
    "num_buckets",
    "open_payload",
    "pack_bits",
    "packed_nbytes",
    "quantize",
    "quantize_packed",
    "quantized_decode_add",
    "seal",
    "select",
    "select_threshold",
    "spectrum_decode_add",
    "spectrum_power",
    "split_payloads",
    "unpack_bits",
]

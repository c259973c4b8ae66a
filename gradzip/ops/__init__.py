"""Primitives over torch tensors: checked here, computed by C++ kernels (csrc/) on torch.get_num_threads() threads.

All are deterministic: the same input gives the same bits whatever the number of threads or the instruction set.
"""

from .abs_max import abs_max
from .atom_probabilities import atom_probabilities
from .compact import bitmap, bitmap_nbytes, compact, expand, gather_marked
from .elias import elias_capacity, elias_decode, elias_decode_add, elias_encode, quantize_elias
from .one_bit import one_bit_decode_add, one_bit_packed
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
from .signs import majority, pack_signs, signs_decode_add
from .spectrum import spectrum_decode_add, spectrum_power
from .ternary import ternary_decode_add, ternary_nbytes, ternary_packed

__all__ = [
    "HEADER_NBYTES",
    "NON_FINITE",
    "PAYLOAD_ALIGN",
    "Payload",
    "PayloadError",
    "RangeFloat",
    "abs_max",
    "atom_probabilities",
    "bitmap",
    "bitmap_nbytes",
    "check_format",
    "compact",
    "dequantize",
    "elias_capacity",
    "elias_decode",
    "elias_decode_add",
    "elias_encode",
    "expand",
    "gather_marked",
    "majority",
    "new_payload",
    "num_buckets",
    "one_bit_decode_add",
    "one_bit_packed",
    "open_payload",
    "pack_bits",
    "pack_signs",
    "packed_nbytes",
    "quantize",
    "quantize_elias",
    "quantize_packed",
    "quantized_decode_add",
    "seal",
    "select",
    "select_threshold",
    "signs_decode_add",
    "spectrum_decode_add",
    "spectrum_power",
    "split_payloads",
    "ternary_decode_add",
    "ternary_nbytes",
    "ternary_packed",
    "unpack_bits",
]

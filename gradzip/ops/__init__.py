"""Primitives over torch tensors: checked here, computed by C++ kernels (csrc/) on torch.get_num_threads() threads.

All are deterministic: the same input gives the same bits whatever the number of threads or the instruction set.
"""

from .abs_max import abs_max
from .compact import bitmap, bitmap_nbytes, compact, expand, gather_marked
from .index_code import decode_indices, encode_indices, encoded_indices_nbytes, open_indices, sparse_decode_add
from .low_rank import low_rank_expand, low_rank_project, low_rank_subtract
from .orthogonalize import orthogonalize_
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
from .topk import marked_indices, sampled_threshold, topk_abs

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
    "decode_indices",
    "encode_indices",
    "encoded_indices_nbytes",
    "expand",
    "gather_marked",
    "low_rank_expand",
    "low_rank_project",
    "low_rank_subtract",
    "marked_indices",
    "new_payload",
    "open_indices",
    "open_payload",
    "orthogonalize_",
    "pack_bits",
    "packed_nbytes",
    "sampled_threshold",
    "seal",
    "select",
    "select_threshold",
    "sparse_decode_add",
    "spectrum_decode_add",
    "spectrum_power",
    "split_payloads",
    "topk_abs",
    "unpack_bits",
]

"""Primitives over torch tensors: checked here, computed by C++ kernels (csrc/) on torch.get_num_threads() threads.
Where the tensors are on a CUDA device, CUDA kernels compute them, on its current stream.

All are deterministic: the same input gives the same bits whatever the number of threads, the instruction set or the
device. On CUDA nothing waits for the device, unless a docstring says so.
"""

from .abs_max import abs_max, abs_max_tensor
from .atom_probabilities import atom_probabilities
from .bernoulli import bernoulli
from .bucket_norm import bucket_norms
from .compact import bitmap, bitmap_nbytes, compact, count_marked, expand, gather_marked
from .elias import elias_capacity, elias_decode, elias_decode_add, elias_encode, quantize_elias
from .index_code import decode_indices, encode_indices, encoded_indices_nbytes, open_indices, sparse_decode_add
from .low_rank import low_rank_expand, low_rank_project, low_rank_settle, low_rank_subtract
from .one_bit import one_bit_decode_add, one_bit_packed
from .orthogonalize import orthogonalize_
from .pack_bits import pack_bits, packed_nbytes, unpack_bits
from .payload import (
    HEADER_NBYTES,
    NON_FINITE,
    PAYLOAD_ALIGN,
    Payload,
    PayloadError,
    first_payload,
    new_payload,
    open_payload,
    seal,
    split_payloads,
)
from .quantize import check_quantizer, dequantize, num_buckets, quantize, quantize_packed, quantized_decode_add
from .random_indices import random_indices
from .range_float import RangeFloat, check_format
from .select import select, select_threshold
from .signs import majority, pack_signs, signs_decode_add
from .spectrum import spectrum_decode_add, spectrum_power
from .ternary import ternary_decode_add, ternary_nbytes, ternary_packed
from .topk import marked_indices, sampled_threshold, topk_abs

__all__ = [
    "HEADER_NBYTES",
    "NON_FINITE",
    "PAYLOAD_ALIGN",
    "Payload",
    "PayloadError",
    "RangeFloat",
    "abs_max",
    "abs_max_tensor",
    "atom_probabilities",
    "bernoulli",
    "bitmap",
    "bitmap_nbytes",
    "bucket_norms",
    "check_format",
    "check_quantizer",
    "compact",
    "count_marked",
    "decode_indices",
    "dequantize",
    "elias_capacity",
    "elias_decode",
    "elias_decode_add",
    "elias_encode",
    "encode_indices",
    "encoded_indices_nbytes",
    "expand",
    "first_payload",
    "gather_marked",
    "low_rank_expand",
    "low_rank_project",
    "low_rank_settle",
    "low_rank_subtract",
    "majority",
    "marked_indices",
    "new_payload",
    "num_buckets",
    "one_bit_decode_add",
    "one_bit_packed",
    "open_indices",
    "open_payload",
    "orthogonalize_",
    "pack_bits",
    "pack_signs",
    "packed_nbytes",
    "quantize",
    "quantize_elias",
    "quantize_packed",
    "quantized_decode_add",
    "random_indices",
    "sampled_threshold",
    "seal",
    "select",
    "select_threshold",
    "signs_decode_add",
    "sparse_decode_add",
    "spectrum_decode_add",
    "spectrum_power",
    "split_payloads",
    "ternary_decode_add",
    "ternary_nbytes",
    "ternary_packed",
    "topk_abs",
    "unpack_bits",
]

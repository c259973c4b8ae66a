"""The primitives as the package's own code calls them: for torch tensors alone."""

from .abs_max import abs_max, abs_max_all, abs_max_columns, abs_max_tensor
from .atom_probabilities import atom_probabilities
from .bernoulli import bernoulli
from .bitmap import bitmap, bitmap_count, bitmap_indices, bitmap_nbytes
from .bitmap_code import (
    bitmap_code_capacity,
    bitmap_code_decode,
    bitmap_code_decode_all,
    bitmap_code_encode,
    bitmap_code_write,
)
from .block_float import (
    block_float_decode,
    block_float_decode_sum,
    block_float_encode,
    block_float_encode_all,
    block_float_max_step,
    block_float_nbytes,
    check_block_float,
)
from .bucket_norms import bucket_norms, num_buckets
from .chunk_topk import (
    check_chunk,
    chunk_topk,
    chunk_topk_count,
    chunk_topk_max_level,
    chunk_topk_nbytes,
    chunk_topk_values,
)
from .compact import compact, compact_values, expand
from .device import all_finite, finite_if_all, is_capturing, known_non_finite, on_device
from .elias import elias_capacity, elias_decode, elias_decode_add, elias_encode, elias_quantize
from .errors import PayloadError
from .index_code import (
    index_code_capacity,
    index_code_decode,
    index_code_decode_add,
    index_code_decode_add_all,
    index_code_encode,
    index_code_open,
    index_code_write,
)
from .low_rank import (
    AverageUpdate,
    low_rank_apply_average_all,
    low_rank_expand,
    low_rank_project,
    low_rank_project_all,
    low_rank_subtract,
)
from .natural import natural_decode_sum, natural_encode, natural_nbytes
from .one_bit import one_bit_decode_add, one_bit_decode_add_all, one_bit_packed, one_bit_packed_all
from .orthogonalize import orthogonalize_
from .pack_bits import pack_bits, packed_nbytes, unpack_bits
from .payload import (
    HEADER_NBYTES,
    NON_FINITE,
    PAYLOAD_ALIGN,
    Payload,
    Seal,
    Stream,
    attach_inspections,
    inspect_payloads,
    join_payloads,
    new_payload,
    new_payloads,
    open_payload,
    open_payloads,
    seal_payloads,
    split_all_payloads,
    split_payloads,
)
from .quantize import (
    check_quantizer,
    dequantize,
    quantize,
    quantize_decode_add,
    quantize_decode_sum,
    quantize_packed,
    quantize_packed_all,
)
from .random_indices import random_indices
from .range_float import RangeFloat, check_format, words_of_wire
from .select import select, select_threshold
from .select_sampled import select_sampled
from .signs import majority, majority_all, pack_signs, pack_signs_all, signs_decode_add, signs_decode_add_all
from .ternary import (
    ternary_decode_add,
    ternary_decode_add_all,
    ternary_nbytes,
    ternary_packed,
    ternary_packed_all,
)
from .topk_abs import topk_abs
from .transform import (
    Transform,
    TransformPart,
    transform,
    transform_decode,
    transform_inverse,
    transform_scratch_numel,
    transform_select,
)
from .weighted_sum import WeightedSum

__all__ = [
    "HEADER_NBYTES", "NON_FINITE", "PAYLOAD_ALIGN", "AverageUpdate", "Payload", "PayloadError", "RangeFloat",
    "Seal", "Stream", "Transform", "TransformPart", "WeightedSum", "abs_max", "abs_max_all", "abs_max_columns",
    "abs_max_tensor", "all_finite", "atom_probabilities", "attach_inspections", "bernoulli", "bitmap",
    "bitmap_code_capacity", "bitmap_code_decode", "bitmap_code_decode_all", "bitmap_code_encode",
    "bitmap_code_write", "bitmap_count", "bitmap_indices", "bitmap_nbytes", "block_float_decode",
    "block_float_decode_sum", "block_float_encode", "block_float_encode_all", "block_float_max_step",
    "block_float_nbytes", "bucket_norms", "check_block_float", "check_chunk", "check_format", "check_quantizer",
    "chunk_topk", "chunk_topk_count", "chunk_topk_max_level", "chunk_topk_nbytes", "chunk_topk_values", "compact",
    "compact_values", "dequantize", "elias_capacity", "elias_decode", "elias_decode_add", "elias_encode",
    "elias_quantize", "expand", "finite_if_all", "index_code_capacity", "index_code_decode",
    "index_code_decode_add", "index_code_decode_add_all", "index_code_encode", "index_code_open",
    "index_code_write", "inspect_payloads", "is_capturing", "join_payloads", "known_non_finite",
    "low_rank_apply_average_all", "low_rank_expand", "low_rank_project", "low_rank_project_all",
    "low_rank_subtract", "majority", "majority_all", "natural_decode_sum", "natural_encode", "natural_nbytes",
    "new_payload", "new_payloads", "num_buckets", "on_device", "one_bit_decode_add", "one_bit_decode_add_all",
    "one_bit_packed", "one_bit_packed_all", "open_payload", "open_payloads", "orthogonalize_", "pack_bits",
    "pack_signs", "pack_signs_all", "packed_nbytes", "quantize", "quantize_decode_add", "quantize_decode_sum",
    "quantize_packed", "quantize_packed_all", "random_indices", "seal_payloads", "select", "select_sampled",
    "select_threshold", "signs_decode_add", "signs_decode_add_all", "split_all_payloads", "split_payloads",
    "ternary_decode_add", "ternary_decode_add_all", "ternary_nbytes", "ternary_packed", "ternary_packed_all",
    "topk_abs", "transform", "transform_decode", "transform_inverse", "transform_scratch_numel", "transform_select",
    "unpack_bits", "words_of_wire",
]  # fmt: skip

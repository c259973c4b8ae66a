// gradzip._C.cuda: one line per primitive of csrc/cuda/ops.h.
#pragma once

#include "cuda/ops.h"
#include "primitive.h"

namespace gradzip::cuda {

inline void bind(py::module_& m) {
  def<abs_max>(m, "abs_max");
  def<select_workspace>(m, "select_workspace");
  def<select>(m, "select");
  def<bitmap_workspace>(m, "bitmap_workspace");
  def<bitmap>(m, "bitmap");
  def<compact_workspace>(m, "compact_workspace");
  def<compact>(m, "compact");
  def<expand_workspace>(m, "expand_workspace");
  def<expand>(m, "expand");
  def<range_float_fit_workspace>(m, "range_float_fit_workspace");
  def<range_float_fit>(m, "range_float_fit");
  def<range_float_encode>(m, "range_float_encode");
  def<range_float_encode_packed>(m, "range_float_encode_packed");
  def<range_float_decode>(m, "range_float_decode");
  def<pack_bits>(m, "pack_bits");
  def<unpack_bits>(m, "unpack_bits");
  def<bernoulli>(m, "bernoulli");
  def<bucket_norms_workspace>(m, "bucket_norms_workspace");
  def<bucket_norms>(m, "bucket_norms");
  def<quantize_workspace>(m, "quantize_workspace");
  def<quantize>(m, "quantize");
  def<quantize_packed_workspace>(m, "quantize_packed_workspace");
  def<quantize_packed>(m, "quantize_packed");
  def<dequantize>(m, "dequantize");
  def<quantized_decode_add>(m, "quantized_decode_add");
  def<ternary_packed>(m, "ternary_packed");
  def<ternary_decode_add>(m, "ternary_decode_add");
  def<pack_signs>(m, "pack_signs");
  def<majority>(m, "majority");
  def<signs_decode_add>(m, "signs_decode_add");
  def<one_bit_packed_workspace>(m, "one_bit_packed_workspace");
  def<one_bit_packed>(m, "one_bit_packed");
  def<one_bit_decode_add>(m, "one_bit_decode_add");
  def<atom_probabilities_float_workspace>(m, "atom_probabilities_float_workspace");
  def<atom_probabilities_float>(m, "atom_probabilities_float");
  def<atom_probabilities_double_workspace>(m, "atom_probabilities_double_workspace");
  def<atom_probabilities_double>(m, "atom_probabilities_double");
  def<elias_encode_workspace>(m, "elias_encode_workspace");
  def<elias_encode>(m, "elias_encode");
  def<elias_decode_workspace>(m, "elias_decode_workspace");
  def<elias_decode>(m, "elias_decode");
  def<quantize_elias_workspace>(m, "quantize_elias_workspace");
  def<quantize_elias>(m, "quantize_elias");
  def<elias_decode_add_workspace>(m, "elias_decode_add_workspace");
  def<elias_decode_add>(m, "elias_decode_add");
  def<spectrum_power>(m, "spectrum_power");
  def<spectrum_decode_add_workspace>(m, "spectrum_decode_add_workspace");
  def<spectrum_decode_add>(m, "spectrum_decode_add");
  def<payload_checksum_workspace>(m, "payload_checksum_workspace");
  def<payload_checksum>(m, "payload_checksum");
  def<payload_seal_workspace>(m, "payload_seal_workspace");
  def<payload_seal>(m, "payload_seal");
  def<payload_inspect>(m, "payload_inspect");
  def<low_rank_project_workspace>(m, "low_rank_project_workspace");
  def<low_rank_project>(m, "low_rank_project");
  def<low_rank_expand>(m, "low_rank_expand");
  def<low_rank_settle>(m, "low_rank_settle");
  def<orthogonalize_workspace>(m, "orthogonalize_workspace");
  def<orthogonalize>(m, "orthogonalize");
  def<count_marked_workspace>(m, "count_marked_workspace");
  def<count_marked>(m, "count_marked");
  def<marked_indices_workspace>(m, "marked_indices_workspace");
  def<marked_indices>(m, "marked_indices");
  def<random_indices>(m, "random_indices");
  def<encode_indices_workspace>(m, "encode_indices_workspace");
  def<encode_indices>(m, "encode_indices");
  def<decode_indices_workspace>(m, "decode_indices_workspace");
  def<decode_indices>(m, "decode_indices");
  def<sparse_decode_add_workspace>(m, "sparse_decode_add_workspace");
  def<sparse_decode_add>(m, "sparse_decode_add");
  def<select_sampled_workspace>(m, "select_sampled_workspace");
  def<select_sampled>(m, "select_sampled");
}

}  // namespace gradzip::cuda

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
  def<orthogonalize_workspace>(m, "orthogonalize_workspace");
  def<orthogonalize>(m, "orthogonalize");
  def<count_marked_workspace>(m, "count_marked_workspace");
  def<count_marked>(m, "count_marked");
  def<marked_indices_workspace>(m, "marked_indices_workspace");
  def<marked_indices>(m, "marked_indices");
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

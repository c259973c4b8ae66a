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
}

}  // namespace gradzip::cuda

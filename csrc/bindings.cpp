// gradzip._C: one line per primitive of csrc/cpu/ops.h, over addresses and sizes; gradzip._C.cuda holds those of
// csrc/cuda/ops.h. Tensors are checked in gradzip/ops, which is the only caller; no torch header is needed here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "cpu/ops.h"
#include "cpu/simd.h"
#include "primitive.h"
#ifdef GRADZIP_CUDA
#include "cuda/bindings.h"
#include "cuda/device.h"
#endif

namespace py = pybind11;
using namespace gradzip;

namespace {

constexpr const char* kSimdNames[] = {"scalar", "avx2", "avx512"};

std::vector<std::string> simd_levels() { return {kSimdNames, kSimdNames + int(cpu::best_simd()) + 1}; }

void set_simd(const std::string& name) {
  for (int level = 0; level < 3; ++level)
    if (name == kSimdNames[level]) return cpu::set_simd(cpu::Simd(level));
  throw py::value_error("unknown SIMD level '" + name + "', expected scalar, avx2 or avx512");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  // --- what was built
  m.attr("compiler") = "g++ " __VERSION__;
  m.def("simd", [] { return kSimdNames[int(cpu::simd())]; });
  m.def("simd_levels", simd_levels);
  m.def("set_simd", set_simd);
#ifdef GRADZIP_CUDA
  m.attr("cuda_built") = true;
  m.attr("cuda_archs") = GRADZIP_CUDA_ARCHS;
  m.def("cuda_runtime_version", cuda::runtime_version);
  m.def("cuda_driver_version", cuda::driver_version);
  m.def("cuda_devices", [] {
    py::list list;
    for (const auto& d : cuda::devices())
      list.append(py::dict(py::arg("name") = d.name, py::arg("major") = d.major, py::arg("minor") = d.minor,
                           py::arg("memory") = d.memory));
    return list;
  });
#else
  m.attr("cuda_built") = false;
  m.attr("cuda_archs") = "";
  m.def("cuda_runtime_version", [] { return 0; });
  m.def("cuda_driver_version", [] { return 0; });
  m.def("cuda_devices", [] { return py::list(); });
#endif

  // --- primitives
#ifdef GRADZIP_CUDA
  auto on_device = m.def_submodule("cuda", "The primitives on device memory; each takes a stream.");
  cuda::bind(on_device);
#endif
  def<cpu::abs_max>(m, "abs_max");
  def<cpu::select>(m, "select");
  def<cpu::select_sampled>(m, "select_sampled");
  def<cpu::bitmap>(m, "bitmap");
  def<cpu::compact>(m, "compact");
  def<cpu::expand>(m, "expand");
  def<cpu::count_marked>(m, "count_marked");
  def<cpu::marked_indices>(m, "marked_indices");
  def<cpu::random_indices>(m, "random_indices");
  def<cpu::encoded_indices_nbytes>(m, "encoded_indices_nbytes");
  def<cpu::encode_indices>(m, "encode_indices");
  def<cpu::decode_indices>(m, "decode_indices");
  def<cpu::sparse_decode_add>(m, "sparse_decode_add");
  def<cpu::range_float_make>(m, "range_float_make");
  def<cpu::range_float_fit>(m, "range_float_fit");
  def<cpu::range_float_encode>(m, "range_float_encode");
  def<cpu::range_float_encode_packed>(m, "range_float_encode_packed");
  def<cpu::range_float_decode>(m, "range_float_decode");
  def<cpu::low_rank_project>(m, "low_rank_project");
  def<cpu::low_rank_expand>(m, "low_rank_expand");
  def<cpu::low_rank_settle>(m, "low_rank_settle");
  def<cpu::pack_bits>(m, "pack_bits");
  def<cpu::unpack_bits>(m, "unpack_bits");
  def<cpu::bernoulli>(m, "bernoulli");
  def<cpu::bucket_norms>(m, "bucket_norms");
  def<cpu::quantize>(m, "quantize");
  def<cpu::quantize_packed>(m, "quantize_packed");
  def<cpu::dequantize>(m, "dequantize");
  def<cpu::quantized_decode_add>(m, "quantized_decode_add");
  def<cpu::ternary_packed>(m, "ternary_packed");
  def<cpu::ternary_decode_add>(m, "ternary_decode_add");
  def<cpu::pack_signs>(m, "pack_signs");
  def<cpu::majority>(m, "majority");
  def<cpu::signs_decode_add>(m, "signs_decode_add");
  def<cpu::one_bit_packed>(m, "one_bit_packed");
  def<cpu::one_bit_decode_add>(m, "one_bit_decode_add");
  def<cpu::atom_probabilities_float>(m, "atom_probabilities_float");
  def<cpu::atom_probabilities_double>(m, "atom_probabilities_double");
  def<cpu::elias_encode>(m, "elias_encode");
  def<cpu::elias_decode>(m, "elias_decode");
  def<cpu::quantize_elias>(m, "quantize_elias");
  def<cpu::elias_decode_add>(m, "elias_decode_add");
  def<cpu::orthogonalize>(m, "orthogonalize");
  def<cpu::spectrum_power>(m, "spectrum_power");
  def<cpu::spectrum_decode_add>(m, "spectrum_decode_add");
  def<cpu::payload_checksum>(m, "payload_checksum");
}

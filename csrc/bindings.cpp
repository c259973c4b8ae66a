// gradzip._C: the kernels of kernels.h on the CPU, over addresses and sizes; gradzip._C.cuda: those on CUDA. Only
// gradzip/ops calls them, and it checks the tensors; no torch header is needed here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bind.h"
#include "cpu/ops.h"
#include "cpu/simd.h"
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
#ifdef GRADZIP_NVRTC
  m.attr("cuda_nvrtc") = true;
  m.attr("cuda_archs") = "";  // compiled for the device where they run
#else
  m.attr("cuda_nvrtc") = false;
  m.attr("cuda_archs") = GRADZIP_CUDA_ARCHS;
#endif
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
  m.attr("cuda_nvrtc") = false;
  m.attr("cuda_archs") = "";
  m.def("cuda_runtime_version", [] { return 0; });
  m.def("cuda_driver_version", [] { return 0; });
  m.def("cuda_devices", [] { return py::list(); });
#endif

  // --- kernels
#define KERNEL(name, ...) bind_cpu<cpu::name>(m, #name)
#define KERNEL_WITH_WORKSPACE KERNEL
#include "kernels.h"
#ifdef GRADZIP_CUDA
  auto on_device = m.def_submodule("cuda", "The kernels on device memory.");
  cuda::bind(on_device);
#endif
}

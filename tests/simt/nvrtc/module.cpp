// The CUDA launchers of a build without nvcc as a Python module, with the functions of gradzip._C.cuda.
#include "cuda/bindings.h"
#include "cuda/device.h"

PYBIND11_MODULE(nvrtc_cuda, m) {
  gradzip::cuda::bind(m);
  m.def("driver_version", gradzip::cuda::driver_version);
  m.def("devices", [] {
    pybind11::list found;
    for (const auto& d : gradzip::cuda::devices())
      found.append(pybind11::make_tuple(d.name, d.major, d.minor, d.memory));
    return found;
  });
}

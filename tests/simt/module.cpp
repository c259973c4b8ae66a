// The CUDA launchers as a Python module on host memory, with the functions of gradzip._C.cuda. The compiler's command line
// includes all csrc/cuda/*.cu (tests/support/simt_build.py).
#include <pybind11/stl.h>

#include "cuda_runtime.h"

#include "cuda/bindings.h"

PYBIND11_MODULE(simt_cuda, m) {
  gradzip::cuda::bind(m);
  // From now on, count what launchers queue on a device of so many multiprocessors, and run nothing; 0: run again.
  m.def("count_only", [](int multiprocessors) {
    simt::options.dry = multiprocessors > 0;
    simt::options.multiprocessors = multiprocessors > 0 ? multiprocessors : simt::Options().multiprocessors;
  });
  // Call a function, and return a line for each launch and memory fill that it queued.
  m.def("recorded", [](const pybind11::function& call) {
    simt::recorded.clear();
    simt::record = true;
    call();
    simt::record = false;
    return simt::recorded;
  });
  // The kernels and memory fills queued so far.
  m.def("queued", [] { return simt::launches + simt::memsets; });
}

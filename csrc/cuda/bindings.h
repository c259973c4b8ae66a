// gradzip._C.cuda: the kernels of kernels.h on CUDA.
#pragma once

#include "bind.h"
#include "cuda/ops.h"
#ifdef GRADZIP_NVRTC
#include "nvrtc/bindings.h"
#endif

namespace gradzip::cuda {

inline void bind(py::module_& m) {
#define KERNEL(name, ...) bind_cuda<name>(m, #name)
#define KERNEL_WITH_WORKSPACE KERNEL
#include "kernels.h"
#ifdef GRADZIP_NVRTC
  driver::bind(m);
#endif
}

}  // namespace gradzip::cuda

// gradzip._C.cuda: the kernels of csrc/cuda/ops.h.
#pragma once

#include "bind.h"
#include "cuda/ops.h"
#include "kernels.h"
#ifdef GRADZIP_NVRTC
#include "nvrtc/bindings.h"
#endif

namespace gradzip::cuda {

inline void bind(py::module_& m) {
#define KERNEL(name) bind_cuda<name>(m, #name);
  GRADZIP_KERNELS(KERNEL)
#undef KERNEL
#ifdef GRADZIP_NVRTC
  driver::bind(m);
#endif
}

}  // namespace gradzip::cuda

// The CUDA kernels: those of kernels.h. Work is queued on `stream` of the current device. A kernel neither waits for
// the device, nor allocates, nor copies to the host.
//
// Kernels that need scratch memory follow CUB's two-phase convention: called with a null workspace they return the
// number of bytes they need and queue nothing; called with a workspace of that size, aligned to 16 bytes, they queue
// the work and return 0. A kernel that turns out to need no scratch memory runs and returns 0 in the first call.
//
// Plain C++: the bindings include this header without the CUDA headers.
#pragma once

#include <cstdint>

#include "kernels.h"

using cudaStream_t = struct CUstream_st*;

namespace gradzip::cuda {

#define KERNEL(name, ...) void name(__VA_ARGS__, cudaStream_t stream)
#define KERNEL_WITH_WORKSPACE(name, ...) int64_t name(void* workspace, __VA_ARGS__, cudaStream_t stream)
#include "kernels.h"

}  // namespace gradzip::cuda

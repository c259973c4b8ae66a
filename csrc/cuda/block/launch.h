// Launches kernels on the caller's stream with a grid that fits the device. Throws launch errors.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

namespace gradzip::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // clears it: torch would report it as that of its own next kernel launch
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The number of blocks for `pieces` of work in a grid-stride loop: at most one per piece, and at most as many as run at
// a time. Eight blocks of 256 threads fill a multiprocessor.
inline unsigned grid_for(int64_t pieces, int blocks_per_multiprocessor = 8) {
  int device = 0, multiprocessors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const int64_t most = int64_t(multiprocessors) * blocks_per_multiprocessor;
  return unsigned(pieces < 1 ? 1 : pieces < most ? pieces : most);
}

// `kernel<f>` is the kernel f as a value of type Kernel<P...>, with P the types of its parameters.
#ifdef GRADZIP_NVRTC
using driver::Kernel;
using driver::kernel;
#else
template <class... P>
using Kernel = void (*)(P...);
template <auto function>
constexpr auto kernel = function;
#endif

template <class... P, class... A>
void launch(cudaStream_t stream, dim3 grid, unsigned threads, Kernel<P...> function, A... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim.x = threads;
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, function, P(arguments)...), "kernel launch");
}

inline dim3 grid_of(unsigned x, unsigned y = 1) {
  dim3 grid;
  grid.x = x;
  grid.y = y;
  return grid;
}

// The blocks along x for `pieces` of work of each of `count` vectors that share a launch: those of all run at a time.
inline unsigned grid_for_each(int64_t count, int64_t pieces, int blocks_per_multiprocessor = 8) {
  const int64_t most = grid_for(std::numeric_limits<int64_t>::max(), blocks_per_multiprocessor);
  return grid_for(std::min(pieces, ceil_div(most, std::max<int64_t>(count, 1))), blocks_per_multiprocessor);
}

inline void clear(void* memory, int64_t nbytes, cudaStream_t stream) {
  check(cudaMemsetAsync(memory, 0, size_t(nbytes), stream), "cudaMemsetAsync");
}

// Cuts a workspace into arrays, each aligned to 16 bytes. A launcher takes all its arrays first, whether the workspace
// is null or not, then returns nbytes() if it is null: both phases run the same lines, so they agree on the size.
class Arena {
 public:
  explicit Arena(void* workspace) : memory_(static_cast<char*>(workspace)) {}

  template <class T>
  T* take(int64_t count) {
    char* at = memory_ ? memory_ + used_ : nullptr;
    used_ += ceil_div(count * int64_t(sizeof(T)), 16) * 16;
    return reinterpret_cast<T*>(at);
  }
  // Bytes taken so far; never 0, which would mean that no second call is needed.
  int64_t nbytes() const { return used_ > 0 ? used_ : 16; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

}  // namespace gradzip::cuda

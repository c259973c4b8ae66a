#include "cuda/device.h"

#include <cuda_runtime.h>

namespace gradzip::cuda {

int runtime_version() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

int driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

std::vector<Device> devices() {
  std::vector<Device> found;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) == cudaSuccess) {
      found.push_back({properties.name, properties.major, properties.minor, properties.totalGlobalMem});
    }
  }
  // Clear the last error: torch would report it as that of its own next kernel launch.
  (void)cudaGetLastError();
  return found;
}

}  // namespace gradzip::cuda

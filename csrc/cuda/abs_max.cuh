#pragma once

#include "cuda/block.cuh"

namespace gradzip::cuda {

// *most = the bits of max |x|, which order as magnitudes do, with every NaN above infinity. *most is 0 at launch.
__global__ void __launch_bounds__(kBlock) abs_max_kernel(const float* x, int64_t n, uint32_t* most) {
  uint32_t largest = 0;
  for_each(x, n, [&](float value) {
    const uint32_t m = magnitude(value);
    largest = largest > m ? largest : m;
  });
  largest = warp_max(largest);
  if (lane() == 0 && largest > 0) atomicMax(most, largest);
}

}  // namespace gradzip::cuda

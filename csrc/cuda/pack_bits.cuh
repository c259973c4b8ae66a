#pragma once

#include "cuda/block/bit_stream.cuh"

namespace gradzip::cuda {

__global__ void __launch_bounds__(kBlock) pack_bits_kernel(const int32_t* codes, int64_t n, int bits, uint8_t* packed) {
  __shared__ uint32_t tile[kPackTile];
  const CodeWidth width(bits);
  const uint32_t mask = bits == 32 ? ~0u : (1u << bits) - 1;
  for (int64_t first = int64_t(blockIdx.x) * kPackTile; first < n; first += int64_t(gridDim.x) * kPackTile) {
    const int count = int(n - first < kPackTile ? n - first : kPackTile);
#pragma unroll
    for (int j = 0; j < kPackTile / kBlock; ++j) {
      const int i = j * kBlock + int(threadIdx.x);
      if (i < count) tile[i] = uint32_t(__ldg(codes + first + i)) & mask;
    }
    __syncthreads();
    pack_tile(tile, count, width, packed + first / 8 * bits);
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kBlock)
    unpack_bits_kernel(const uint8_t* packed, int64_t n, int bits, int32_t* codes) {
  const int64_t nbytes = (n * bits + 7) / 8;
  for (int64_t i = grid_thread(); i < n; i += grid_threads())
    codes[i] = int32_t(read_bits(packed, nbytes, i * bits, bits));
}

}  // namespace gradzip::cuda

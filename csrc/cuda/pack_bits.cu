#include "cuda/pack_bits.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

void pack_bits(const int32_t* codes, int64_t n, int bits, uint8_t* packed, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, kPackTile))), kBlock, kernel<pack_bits_kernel>, codes, n, bits, packed);
}

void pack_bits_unpack(const uint8_t* packed, int64_t n, int bits, int32_t* codes, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, kBlock))), kBlock, kernel<unpack_bits_kernel>, packed, n, bits, codes);
}

}  // namespace gradzip::cuda

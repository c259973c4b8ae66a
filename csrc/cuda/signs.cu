#include "cuda/signs.cuh"

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

void signs_pack(const float* x, int64_t n, uint64_t key, uint8_t* packed, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, kTile))), kBlock, signs_pack_kernel, x, n, key, packed);
}

void signs_majority(const uint8_t* const* votes, int voters, int64_t n, uint64_t key, uint8_t* packed,
                    cudaStream_t stream) {
  const auto kernel = voters < 1 << 4   ? signs_majority_kernel<4>
                      : voters < 1 << 8 ? signs_majority_kernel<8>
                                        : signs_majority_kernel<16>;
  launch(stream, grid_of(grid_for(ceil_div(n, 32 * kBlock))), kBlock, kernel, votes, voters, n, key, packed);
}

void signs_decode_add(const uint8_t* packed, int64_t n, float scale, float* out, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, 4 * kBlock))), kBlock, signs_decode_add_kernel, packed, n, scale, out);
}

}  // namespace gradzip::cuda

#include "cuda/ternary.cuh"

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

unsigned trit_grid(int64_t n) { return grid_for(ceil_div(n, 4 * kDigits * kBlock)); }

}  // namespace

void ternary_packed(const float* x, int64_t n, const float* scale, const float* clip, uint64_t key, uint8_t* packed,
                    cudaStream_t stream) {
  launch(stream, grid_of(trit_grid(n)), kBlock, ternary_packed_kernel, x, n, scale, clip, key, packed);
}

void ternary_decode_add(const uint8_t* packed, int64_t n, const float* scale, double weight, float* out,
                        int32_t* failed, cudaStream_t stream) {
  launch(stream, grid_of(trit_grid(n)), kBlock, ternary_decode_add_kernel, packed, n, scale, weight, out, failed);
}

}  // namespace gradzip::cuda

#include "cuda/range_float.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

int64_t range_float_fit(void* workspace, RangeFloat* format, const float* x, int64_t n, int bits, int mantissa,
                        float vmin, float vmax, cudaStream_t stream) {
  Arena arena(workspace);
  auto* state = arena.take<FitState>(1);
  if (!workspace) return arena.nbytes();
  clear(state, sizeof *state, stream);
  if (vmin > vmax)
    launch(stream, grid_of(grid_for(ceil_div(n, 16 * kBlock))), kBlock, kernel<range_kernel>, x, n, state);
  if (mantissa < 0)
    launch(stream, grid_of(grid_for(ceil_div(n, histogram_step(n)), 1)), kBlock, kernel<histogram_kernel>, x, n, state);
  launch(stream, grid_of(1), kFitBlock, kernel<fit_kernel>, state, bits, mantissa, vmin, vmax, format);
  return 0;
}

void range_float_encode(const RangeFloat* format, const float* x, int64_t n, bool stochastic, uint64_t key,
                        int32_t* codes, int64_t* outside, cudaStream_t stream) {
  clear(outside, sizeof *outside, stream);
  launch(stream, grid_of(grid_for(ceil_div(n, 4 * kBlock))), kBlock,
         stochastic ? kernel<encode_kernel<true>> : kernel<encode_kernel<false>>, format, x, n, key, codes, outside);
}

void range_float_encode_packed(const RangeFloat* format, const float* x, int64_t n, int bits, bool stochastic,
                               uint64_t key, const int64_t* replays, uint8_t* packed, int64_t* outside,
                               cudaStream_t stream) {
  clear(outside, sizeof *outside, stream);
  launch(stream, grid_of(grid_for(ceil_div(n, kPackTile))), kBlock,
         stochastic ? kernel<encode_packed_kernel<true>> : kernel<encode_packed_kernel<false>>, format, x, n, bits, key,
         replays, packed, outside);
}

void range_float_decode(const RangeFloat* format, const int32_t* codes, int64_t n, float* x, int32_t* failed,
                        cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, kBlock))), kBlock, kernel<decode_kernel>, *format, codes, n, x, failed);
}

void range_float_decode_wire(const uint8_t* wire, int bits, const int32_t* codes, int64_t n, float* x, int32_t* failed,
                             cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, kBlock))), kBlock, kernel<decode_wire_kernel>, wire, bits, codes, n, x,
         failed);
}

}  // namespace gradzip::cuda

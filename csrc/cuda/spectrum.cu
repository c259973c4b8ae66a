#include "cuda/spectrum.cuh"

#include "cuda/bitmap.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

void spectrum_power(const float* spectrum, int64_t rows, int64_t length, const float* amax, float* power,
                    cudaStream_t stream) {
  const int64_t tiles = rows * ceil_div(length / 2 + 1, kRowTile);
  launch(stream, grid_of(grid_for(tiles)), kBlock, power_kernel, reinterpret_cast<const float2*>(spectrum), rows,
         length, amax, power);
}

int64_t spectrum_decode_add_workspace(int64_t n) {
  Arena arena(nullptr);
  BitmapOffsets tiles(arena, n);
  return arena.used() + 16;
}

void spectrum_decode_add(const RangeFloat* format, const uint8_t* bitmap, const uint8_t* packed, int64_t packed_bytes,
                         int64_t count, float weight, float* spectrum, int64_t n, int32_t* failed, void* workspace,
                         cudaStream_t stream) {
  Arena arena(workspace);
  const BitmapOffsets tiles(arena, n);
  tiles.count(bitmap, n, arena.take<int64_t>(1), stream);
  launch(stream, grid_of(tiles.grid()), kBlock, decode_add_kernel, format, bitmap, tiles.offsets, packed, packed_bytes,
         count, weight, spectrum, n, failed);
}

}  // namespace gradzip::cuda

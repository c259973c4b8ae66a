#include "cuda/natural.cuh"

#include <algorithm>

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

void natural_encode(const float* x, int64_t n, uint64_t key, const int64_t* replays, uint8_t* packed, float* most,
                    cudaStream_t stream) {
  if (most) clear(most, sizeof *most, stream);
  launch(stream, grid_of(grid_for(ceil_div(n, kNaturalTile))), kBlock, kernel<natural_encode_kernel>, x, n, key,
         replays, packed, reinterpret_cast<uint32_t*>(most));
}

void natural_decode_sum(const uint8_t* const* payloads, int64_t count, int64_t n, float weight, bool add, float* out,
                        int32_t* failed, cudaStream_t stream) {
  int64_t first = 0;
  do {
    NaturalPayloads batch{};
    const int64_t some = std::min<int64_t>(count - first, kNaturalBatch);
    std::copy_n(payloads + first, some, batch.of);
    launch(stream, grid_of(grid_for(ceil_div(n, 4 * kBlock))), kBlock, kernel<natural_decode_sum_kernel>, batch, some,
           n, weight, add || first > 0, out, failed);
    first += some;
  } while (first < count);
}

}  // namespace gradzip::cuda

#include "cuda/natural.cuh"

#include <algorithm>

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

template <class T>
void encode(const T* x, int64_t n, uint64_t key, const int64_t* replays, uint8_t* packed, float* most,
            cudaStream_t stream) {
  if (most) clear(most, sizeof *most, stream);
  launch(stream, grid_of(grid_for(ceil_div(n, kNaturalTile))), kBlock, kernel<natural_encode_kernel<T>>, x, n, key,
         replays, packed, reinterpret_cast<uint32_t*>(most));
}

template <class T>
void decode_sum(const uint8_t* const* payloads, int64_t count, int64_t n, float weight, bool add, T* out,
                int32_t* failed, cudaStream_t stream) {
  int64_t first = 0;
  do {
    NaturalPayloads batch{};
    const int64_t some = std::min<int64_t>(count - first, kNaturalBatch);
    std::copy_n(payloads + first, some, batch.of);
    launch(stream, grid_of(grid_for(ceil_div(n, 4 * kBlock))), kBlock, kernel<natural_decode_sum_kernel<T>>, batch,
           some, n, weight, add || first > 0, out, failed);
    first += some;
  } while (first < count);
}

}  // namespace

void natural_encode(const void* x, int dtype, int64_t n, uint64_t key, const int64_t* replays, uint8_t* packed,
                    float* most, cudaStream_t stream) {
  typed(x, dtype, [&](auto* of) { encode(of, n, key, replays, packed, most, stream); });
}

void natural_decode_sum(const uint8_t* const* payloads, int64_t count, int64_t n, float weight, bool add, void* out,
                        int dtype, int32_t* failed, cudaStream_t stream) {
  typed(out, dtype, [&](auto* to) { decode_sum(payloads, count, n, weight, add, to, failed, stream); });
}

}  // namespace gradzip::cuda

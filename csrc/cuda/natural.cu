#include "cuda/natural.cuh"

#include "cuda/block/launch.h"
#include "cuda/block/parts.h"
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
void decode_sum(const uint8_t* const* payloads, int64_t count, int64_t parts, int64_t n, float weight, bool add, T* out,
                int32_t* failed, cudaStream_t stream) {
  const Parts all = parts_of(n, parts);
  const int64_t pieces = ceil_div(all.length(0), 4 * kBlock);
  for_parts<NaturalPayloads>(
      payloads, count, parts, [&](const auto& batch, int64_t some, int64_t part, unsigned number, bool more) {
        launch(stream, grid_of(grid_for_each(number, pieces), number), kBlock, kernel<natural_decode_sum_kernel<T>>,
               batch, some, all.from(part), weight, add || more, out + all.begin(part), failed);
      });
}

}  // namespace

void natural_encode(const void* x, int dtype, int64_t n, uint64_t key, const int64_t* replays, uint8_t* packed,
                    float* most, cudaStream_t stream) {
  typed(x, dtype, [&](auto* of) { encode(of, n, key, replays, packed, most, stream); });
}

void natural_decode_sum(const uint8_t* const* payloads, int64_t count, int64_t parts, int64_t n, float weight, bool add,
                        void* out, int dtype, int32_t* failed, cudaStream_t stream) {
  typed(out, dtype, [&](auto* to) { decode_sum(payloads, count, parts, n, weight, add, to, failed, stream); });
}

}  // namespace gradzip::cuda

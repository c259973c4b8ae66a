#include "cuda/natural.cuh"

#include "cuda/block/launch.h"
#include "cuda/block/parts.h"
#include "cuda/block/table.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

// Vectors of Ts.
template <class T>
void encode(const T*, const std::vector<NaturalSource>& table, const int64_t* replays, float* most,
            cudaStream_t stream) {
  int64_t longest = 0;
  for (const NaturalSource& source : table) longest = std::max(longest, source.n);
  if (most) clear(most, int64_t(table.size() * sizeof *most), stream);
  for_each_batch<kNaturalSources>(table, [&](const auto& batch, unsigned some) {
    launch(stream, grid_of(grid_for_each(some, ceil_div(longest, kNaturalTile)), some), kBlock,
           kernel<natural_encode_kernel<T>>, batch, replays, reinterpret_cast<uint32_t*>(most));
    if (most) most += some;
  });
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

void natural_encode(const NaturalSource* table, int64_t count, int dtype, const int64_t* replays, float* most,
                    cudaStream_t stream) {
  const void* const any = nullptr;
  typed(any, dtype, [&](auto* of) { encode(of, {table, table + count}, replays, most, stream); });
}

void natural_decode_sum(const uint8_t* const* payloads, int64_t count, int64_t parts, int64_t n, float weight, bool add,
                        void* out, int dtype, int32_t* failed, cudaStream_t stream) {
  typed(out, dtype, [&](auto* to) { decode_sum(payloads, count, parts, n, weight, add, to, failed, stream); });
}

}  // namespace gradzip::cuda

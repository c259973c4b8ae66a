#include "cuda/quantize.cuh"

#include <numeric>

#include "cuda/block/launch.h"
#include "cuda/block/parts.h"
#include "cuda/block/table.h"
#include "cuda/bucket_norms.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

// The size of a tile of whole buckets that is a multiple of 8; 0 if there is none.
int tile_of_buckets(int64_t bucket) {
  if (bucket > kMostTile) return 0;
  const int64_t together = std::lcm<int64_t>(bucket, 8);
  return int(kMostTile / together * together);
}

// Vectors of Ts.
template <class T>
void pack(const T*, const std::vector<QuantizeSource>& table, int64_t longest, int bits, int64_t bucket, int norm,
          const int64_t* replays, float* most, cudaStream_t stream) {
  const int whole = tile_of_buckets(bucket), tile = whole ? whole : kMostTile;
  for_each_batch<kQuantizeBatch>(table, [&](const auto& batch, unsigned some) {
    launch(stream, grid_of(grid_for_each(some, ceil_div(longest, tile)), some), kBlock,
           whole ? kernel<quantize_packed_kernel<T, true>> : kernel<quantize_packed_kernel<T, false>>, batch, bits,
           bucket, Norm(norm), replays, tile, reinterpret_cast<uint32_t*>(most));
    if (most) most += some;
  });
}

template <class T>
void decode_sum(const QuantizedTerm* terms, int64_t count, int64_t parts, int64_t n, int bits, int64_t bucket,
                float weight, bool add, T* out, int32_t* failed, cudaStream_t stream) {
  const Parts all = parts_of(n, parts);
  const int64_t tiles = ceil_div(all.length(0), kMostTile);
  for_parts<QuantizedTerms>(
      terms, count, parts, [&](const auto& batch, int64_t some, int64_t part, unsigned number, bool more) {
        launch(stream, grid_of(grid_for_each(number, tiles), number), kBlock, kernel<quantize_decode_sum_kernel<T>>,
               batch, some, all.from(part), bits, bucket, weight, add || more, out + all.begin(part), failed);
      });
}

}  // namespace

// The norms of a tile are computed with it if tiles can be whole buckets, all norms first otherwise.
int64_t quantize(void* workspace, const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key,
                 int32_t* codes, float* norms, cudaStream_t stream) {
  const Quantizer<float> q{x, n, bucket, bits, Norm(norm), key, norms};
  const int whole = tile_of_buckets(bucket), tile = whole ? whole : kMostTile;
  if (!whole) {
    const int64_t nbytes = bucket_norms(workspace, x, int(Dtype::float32), n, bucket, norm, norms, stream);
    if (!workspace) return nbytes;
  }
  launch(stream, grid_of(grid_for(ceil_div(n, tile))), kBlock,
         whole ? kernel<quantize_kernel<true>> : kernel<quantize_kernel<false>>, q, tile, codes);
  return 0;
}

int64_t quantize_packed(void* workspace, const QuantizeSource* table, int64_t count, int dtype, int bits,
                        int64_t bucket, int norm, const int64_t* replays, float* most, cudaStream_t stream) {
  const std::vector<QuantizeSource> sources(table, table + count);
  std::vector<NormsSource> with_norms;
  int64_t longest = 0;
  for (const QuantizeSource& source : sources) {
    longest = std::max(longest, source.n);
    with_norms.push_back({source.x, source.n, source.norms});
  }
  if (!tile_of_buckets(bucket)) {
    const int64_t nbytes = bucket_norms_all(workspace, with_norms, dtype, bucket, norm, stream);
    if (!workspace) return nbytes;
  }
  if (most) clear(most, count * int64_t(sizeof *most), stream);
  const void* const any = nullptr;
  typed(any, dtype, [&](auto* of) { pack(of, sources, longest, bits, bucket, norm, replays, most, stream); });
  return 0;
}

void quantize_decode(const int32_t* codes, const float* norms, int64_t n, int bits, int64_t bucket, float* x,
                     int32_t* failed, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, kMostTile))), kBlock, kernel<quantize_decode_kernel>, codes, norms, n,
         bits, bucket, x, failed);
}

void quantize_decode_sum(const QuantizedTerm* terms, int64_t count, int64_t parts, int64_t n, int bits, int64_t bucket,
                         float weight, bool add, void* out, int dtype, int32_t* failed, cudaStream_t stream) {
  typed(out, dtype,
        [&](auto* to) { decode_sum(terms, count, parts, n, bits, bucket, weight, add, to, failed, stream); });
}

}  // namespace gradzip::cuda

#include "cuda/quantize.cuh"

#include <algorithm>
#include <numeric>

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

// The size of a tile of whole buckets that is a multiple of 8; 0 if there is none.
int tile_of_buckets(int64_t bucket) {
  if (bucket > kMostTile) return 0;
  const int64_t together = std::lcm<int64_t>(bucket, 8);
  return int(kMostTile / together * together);
}

// Computes the norms of each tile with it if the tile can be whole buckets, all norms first otherwise.
template <class T>
int64_t quantize_with(void* workspace, Kernel<Quantizer, int, T*> with_norms, Kernel<Quantizer, int, T*> alone,
                      const Quantizer& q, T* out, cudaStream_t stream) {
  const int tile = tile_of_buckets(q.bucket);
  if (tile > 0) {
    launch(stream, grid_of(grid_for(ceil_div(q.n, tile))), kBlock, with_norms, q, tile, out);
    return 0;
  }
  const int64_t nbytes = bucket_norms(workspace, q.x, q.n, q.bucket, int(q.norm), q.norms, stream);
  if (!workspace) return nbytes;
  launch(stream, grid_of(grid_for(ceil_div(q.n, kMostTile))), kBlock, alone, q, kMostTile, out);
  return 0;
}

}  // namespace

int64_t quantize(void* workspace, const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key,
                 int32_t* codes, float* norms, cudaStream_t stream) {
  const Quantizer q{x, n, bucket, bits, Norm(norm), key, norms};
  return quantize_with(workspace, kernel<quantize_kernel<true>>, kernel<quantize_kernel<false>>, q, codes, stream);
}

int64_t quantize_packed(void* workspace, const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key,
                        uint8_t* packed, float* norms, cudaStream_t stream) {
  const Quantizer q{x, n, bucket, bits, Norm(norm), key, norms};
  return quantize_with(workspace, kernel<quantize_packed_kernel<true>>, kernel<quantize_packed_kernel<false>>, q,
                       packed, stream);
}

void quantize_decode(const int32_t* codes, const float* norms, int64_t n, int bits, int64_t bucket, float* x,
                     int32_t* failed, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, kMostTile))), kBlock, kernel<quantize_decode_kernel>, codes, norms, n,
         bits, bucket, x, failed);
}

void quantize_decode_sum(const QuantizedTerm* terms, int64_t count, int64_t n, int bits, int64_t bucket, float weight,
                         bool add, float* out, int32_t* failed, cudaStream_t stream) {
  int64_t first = 0;
  do {
    QuantizedTerms batch{};
    const int64_t some = std::min<int64_t>(count - first, kTermsBatch);
    std::copy_n(terms + first, some, batch.of);
    launch(stream, grid_of(grid_for(ceil_div(n, kMostTile))), kBlock, kernel<quantize_decode_sum_kernel>, batch, some,
           n, bits, bucket, weight, add || first > 0, out, failed);
    first += some;
  } while (first < count);
}

}  // namespace gradzip::cuda

#include "cuda/quantize.cuh"

#include <numeric>

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

// The elements of a tile of whole buckets that begins at multiples of 8; 0 where there is none.
int tile_of_buckets(int64_t bucket) {
  if (bucket > kMostTile) return 0;
  const int64_t together = std::lcm<int64_t>(bucket, 8);
  return int(kMostTile / together * together);
}

// Tiles whose norms are computed with them, or norms first.
template <class T>
void quantize_with(void (*with_norms)(Quantizer, int, T*), void (*alone)(Quantizer, int, T*), const Quantizer& q,
                   T* out, void* workspace, cudaStream_t stream) {
  const int tile = tile_of_buckets(q.bucket);
  if (tile > 0) return launch(stream, grid_of(grid_for(ceil_div(q.n, tile))), kBlock, with_norms, q, tile, out);
  bucket_norms(q.x, q.n, q.bucket, int(q.norm), q.norms, workspace, stream);
  launch(stream, grid_of(grid_for(ceil_div(q.n, kMostTile))), kBlock, alone, q, kMostTile, out);
}

}  // namespace

int64_t quantize_workspace(int64_t n) { return bucket_norms_workspace(n); }

void quantize(const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key, int32_t* codes, float* norms,
              void* workspace, cudaStream_t stream) {
  const Quantizer q{x, n, bucket, bits, Norm(norm), key, norms};
  quantize_with(quantize_kernel<true>, quantize_kernel<false>, q, codes, workspace, stream);
}

int64_t quantize_packed_workspace(int64_t n) { return bucket_norms_workspace(n); }

void quantize_packed(const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key, uint8_t* packed,
                     float* norms, void* workspace, cudaStream_t stream) {
  const Quantizer q{x, n, bucket, bits, Norm(norm), key, norms};
  quantize_with(quantize_packed_kernel<true>, quantize_packed_kernel<false>, q, packed, workspace, stream);
}

void dequantize(const int32_t* codes, const float* norms, int64_t n, int bits, int64_t bucket, float* x,
                int32_t* failed, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, kMostTile))), kBlock, dequantize_kernel, codes, norms, n, bits, bucket, x,
         failed);
}

void quantized_decode_add(const uint8_t* packed, const float* norms, int64_t n, int bits, int64_t bucket, float weight,
                          float* out, int32_t* failed, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, kMostTile))), kBlock, quantized_decode_add_kernel, packed, norms, n, bits,
         bucket, weight, out, failed);
}

}  // namespace gradzip::cuda

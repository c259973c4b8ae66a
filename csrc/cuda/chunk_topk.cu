#include "cuda/chunk_topk.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

template <class T>
void encode(const T* x, int64_t n, int64_t chunk, int64_t k, int32_t* indices, uint8_t* records, cudaStream_t stream) {
  const int64_t chunks = ceil_div(n, chunk);
  launch(stream, grid_of(grid_for(chunks)), kBlock, kernel<chunk_topk_kernel<T>>, x, n, chunks, chunk, k, indices,
         reinterpret_cast<uint32_t*>(records));
}

}  // namespace

void chunk_topk(const void* x, int dtype, int64_t n, int64_t chunk, int64_t k, int32_t* indices, uint8_t* records,
                cudaStream_t stream) {
  typed(x, dtype, [&](auto* of) { encode(of, n, chunk, k, indices, records, stream); });
}

void chunk_topk_values(const uint8_t* records, int64_t n, int64_t chunk, int64_t k, float* values, int32_t* failed,
                       cudaStream_t stream) {
  const int64_t last = n % chunk, numel = n / chunk * k + (last ? chunk_count(last, chunk, k) : 0);
  launch(stream, grid_of(grid_for(ceil_div(numel, kBlock))), kBlock, kernel<chunk_topk_values_kernel>,
         reinterpret_cast<const uint32_t*>(records), k, numel, values, failed);
}

}  // namespace gradzip::cuda

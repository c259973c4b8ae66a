#include "cuda/block_float.cuh"

#include <algorithm>
#include <type_traits>

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

template <class T>
void encode(const T* x, const float* residual, int64_t rows, int64_t n, int64_t blocks, int bits, int64_t block,
            const uint64_t* keys, const int64_t* replays, float* error, uint8_t* payloads, cudaStream_t stream) {
  const auto once = kernel<block_float_encode_kernel<T, true>>, twice = kernel<block_float_encode_kernel<T, false>>;
  for (int64_t row = 0; row < rows; row += kKeysBatch) {
    Keys batch{};
    const int64_t count = std::min<int64_t>(rows - row, kKeysBatch);
    if (keys) std::copy_n(keys + row, count, batch.of);
    launch(stream, grid_of(grid_for(ceil_div(blocks, kBlock / kLanes)), unsigned(count)), kBlock,
           block <= kEight * kLanes ? once : twice, x + row * n, residual ? residual + row * n : nullptr, n, blocks,
           bits, block, keys != nullptr, batch, replays, error ? error + row * n : nullptr,
           reinterpret_cast<uint32_t*>(payloads + row * blocks * block_float_nbytes(bits, block)));
  }
}

template <class T>
void decode(const uint8_t* const* payloads, int64_t shards, int64_t each, int64_t blocks, int64_t n, int bits,
            int64_t block, float weight, const float* start, T* out, cudaStream_t stream) {
  const int64_t shard_numel = blocks * block;
  const int64_t together = each < kTableSize ? kTableSize / (each < 1 ? 1 : each) : 1;  // shards of a launch
  for (int64_t shard = 0; shard * shard_numel < n; shard += together) {
    const int64_t first = shard * shard_numel, left = n - first;
    const int64_t numel = left < together * shard_numel ? left : together * shard_numel;
    const float* from = start ? start + first : nullptr;
    for (int64_t p = 0; p < each; p += kTableSize) {
      const int64_t some = each - p < kTableSize ? each - p : kTableSize;  // all, if there are several shards
      const int64_t count = some * (shards - shard < together ? shards - shard : together);
      PayloadTable batch{};
      for (int64_t i = 0; i < count; ++i)
        batch.of[i] = reinterpret_cast<const uint32_t*>(payloads[shard * each + p + i]);
      launch(stream, grid_of(grid_for(ceil_div(numel, kEight * kBlock))), kBlock, kernel<block_float_decode_kernel<T>>,
             batch, some, blocks, numel, bits, block, weight, from, out + first);
      if constexpr (std::is_same_v<T, float>) from = out + first;
    }
  }
}

}  // namespace

void block_float_encode(const void* x, int dtype, const float* residual, int64_t rows, int64_t n, int64_t blocks,
                        int bits, int64_t block, const uint64_t* keys, const int64_t* replays, float* error,
                        uint8_t* payloads, cudaStream_t stream) {
  typed(x, dtype,
        [&](auto* of) { encode(of, residual, rows, n, blocks, bits, block, keys, replays, error, payloads, stream); });
}

void block_float_decode(const uint8_t* const* payloads, int64_t shards, int64_t each, int64_t blocks, int64_t n,
                        int bits, int64_t block, float weight, const float* start, void* out, int dtype,
                        cudaStream_t stream) {
  typed(out, dtype,
        [&](auto* to) { decode(payloads, shards, each, blocks, n, bits, block, weight, start, to, stream); });
}

}  // namespace gradzip::cuda

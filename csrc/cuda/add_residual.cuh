// A thread takes quads of four neighbouring elements, a block apart.
#pragma once

#include "common/add_residual.h"
#include "cuda/block/quads.cuh"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

constexpr int kAddQuads = 2;  // of a thread, all loaded before the first is written
constexpr int64_t kAddTile = 4 * kAddQuads * kBlock;  // elements of a block
constexpr int kAddBatch = 80;  // entries whose table fits the 4 KB of kernel arguments

struct AddEntry {
  ResidualSum sum;
  uint32_t first_block;
};
struct AddTable {
  int32_t count;
  AddEntry entries[kAddBatch];
};
static_assert(sizeof(AddTable) < 4000, "it fits the 4 KB that a kernel may have");

__global__ void __launch_bounds__(kBlock) add_residual_kernel(AddTable table) {
  const auto [sum, first_block] = table.entries[entry_of_block(table)];
  const auto [x, residual, out, n, dtype] = sum;
  const int64_t first = int64_t(blockIdx.x - first_block) * kAddTile + 4 * int64_t(threadIdx.x);
  typed_in(x, dtype, [residual = residual, out = out, n = n, first](auto* from) {
    float value[kAddQuads][4], more[kAddQuads][4];
#pragma unroll
    for (int q = 0; q < kAddQuads; ++q) {
      const int64_t at = first + 4 * kBlock * q;
      if constexpr (sizeof(*from) == sizeof(float))
        load4_changing(from, at, n, value[q]);
      else
        load4(from, at, n, value[q]);
      load4(residual, at, n, more[q]);
    }
#pragma unroll
    for (int q = 0; q < kAddQuads; ++q) {
#pragma unroll
      for (int j = 0; j < 4; ++j) value[q][j] += more[q][j];
      store4(out, first + 4 * kBlock * q, n, value[q]);
    }
  });
}

}  // namespace gradzip::cuda

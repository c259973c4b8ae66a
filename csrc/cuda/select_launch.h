// The launches of exact selections, for launchers that share its kernels.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/block/table.h"
#include "cuda/select.cuh"

namespace gradzip::cuda {
namespace {

class SelectLaunch {
 public:
  // vectors: without their candidates.
  // A block's counters have 32 bits; clearing and summing them costs as much as reading several thousand values. There
  // is room for an eighth of the values: a few percent of a gradient share the leading 11 bits of the k-th largest.
  SelectLaunch(Arena& arena, std::vector<SelectEntry> vectors) : vectors_(std::move(vectors)) {
    int64_t longest = 1;
    for (const SelectEntry& vector : vectors_) longest = std::max(longest, vector.n);
    blocks_ = grid_for_each(std::min<int64_t>(kMostVectors, vectors_.size()), ceil_div(longest, 1 << 14), 4);
    for (SelectEntry& vector : vectors_) {
      const int64_t room = ceil_div(vector.n, 8 * int64_t(blocks_));
      vector.candidates = {arena.take<uint32_t>(room * blocks_), arena.take<uint32_t>(blocks_), room};
    }
  }

  // state: zero.
  void launch_on(cudaStream_t stream) const {
    for_each_batch(vectors_, [&](const Batch<SelectEntry>& table, unsigned count) {
      const dim3 grid = grid_of(blocks_, count);
      launch(stream, grid, kSelectBlock, kernel<select_kernel<0>>, table);
      launch(stream, grid, kSelectBlock, kernel<select_kernel<1>>, table);
      launch(stream, grid, kSelectBlock, kernel<select_kernel<2>>, table);
    });
  }

 private:
  std::vector<SelectEntry> vectors_;
  unsigned blocks_;
};

}  // namespace
}  // namespace gradzip::cuda

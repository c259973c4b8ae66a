#include "cuda/abs_max.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

namespace {

template <class T>
void largest(const T* x, int64_t n, float* most, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(n, 16 * kBlock))), kBlock, kernel<abs_max_kernel<T>>, x, n,
         reinterpret_cast<uint32_t*>(most));
}

}  // namespace

void abs_max(const void* x, int dtype, int64_t n, float* most, cudaStream_t stream) {
  clear(most, sizeof *most, stream);
  typed(x, dtype, [&](auto* of) { largest(of, n, most, stream); });
}

void abs_max_columns(const Matrix* matrices, int64_t count, int dtype, float* most, cudaStream_t stream) {
  int64_t columns_of_all = 0;
  for (int64_t i = 0; i < count; ++i) columns_of_all += matrices[i].columns;
  if (columns_of_all == 0) return;
  clear(most, columns_of_all * int64_t(sizeof *most), stream);
  for (int64_t at = 0; at < count;) {
    ColumnsTable table{};
    table.dtype = dtype;
    int64_t blocks = 0;
    for (; at < count && table.count < kColumnsBatch; ++at) {
      const auto [data, rows, columns] = matrices[at];
      const int64_t n = rows * columns;
      if (n > 0) {
        const unsigned own = grid_for(ceil_div(n, 16 * kBlock));
        table.entries[table.count++] = {data, n, columns, reinterpret_cast<uint32_t*>(most), uint32_t(blocks), own};
        blocks += own;
      }
      most += columns;
    }
    if (table.count > 0) launch(stream, grid_of(unsigned(blocks)), kBlock, kernel<abs_max_columns_kernel>, table);
  }
}

}  // namespace gradzip::cuda

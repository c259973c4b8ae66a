#include "cuda/orthogonalize.cuh"

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

// The next matrices that go in one launch, from `matrices[*at]` on, with their scratch memory out of `arena`.
struct OrthoLaunch {
  OrthoTable table{};
  int64_t blocks = 0;
  bool tall = false;  // some have more than one block
  OrthoState* states;

  OrthoLaunch(const Matrix* matrices, int64_t count, int64_t* at, Arena& arena)
      : states(arena.take<OrthoState>(kOrthoBatch)) {
    for (; *at < count && table.count < kOrthoBatch; ++*at) {
      const auto [data, rows, columns] = matrices[*at];
      if (rows == 0 || columns == 0) continue;
      auto* scratch = arena.take<double>(ortho_scratch(rows, columns));
      table.matrices[table.count++] = {data, rows, scratch, int32_t(columns), uint32_t(blocks)};
      blocks += ortho_blocks(rows, columns);
      tall |= ortho_blocks(rows, columns) > 1;
    }
  }
};

}  // namespace

int64_t orthogonalize_workspace(const Matrix* matrices, int64_t count) {
  int64_t most = 0;
  for (int64_t at = 0; at < count;) {
    Arena arena(nullptr);
    OrthoLaunch(matrices, count, &at, arena);
    most = arena.used() > most ? arena.used() : most;
  }
  return most;
}

void orthogonalize(const Matrix* matrices, int64_t count, void* workspace, cudaStream_t stream) {
  for (int64_t at = 0; at < count;) {
    Arena arena(workspace);  // launches follow one another: they may use the same
    const OrthoLaunch next(matrices, count, &at, arena);
    if (next.table.count == 0) continue;
    clear(next.states, kOrthoBatch * int64_t(sizeof(OrthoState)), stream);
    for (int pass = 0; pass < (next.tall ? 2 : 1); ++pass)
      launch(stream, grid_of(unsigned(next.blocks)), kBlock, orthogonalize_kernel, next.table, next.states, pass);
  }
}

}  // namespace gradzip::cuda

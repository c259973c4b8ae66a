#include "cuda/orthogonalize.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

// The matrices of one launch, from `matrices[*at]` on, with their scratch memory from `arena`.
struct OrthoLaunch {
  OrthoTable table{};
  int64_t blocks = 0;
  bool tall = false;  // some matrix has more than one block
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

int64_t orthogonalize(void* workspace, const Matrix* matrices, int64_t count, cudaStream_t stream) {
  int64_t nbytes = 0;
  for (int64_t at = 0; at < count;) {
    Arena arena(workspace);  // launches run one after the other, so they share the workspace
    const OrthoLaunch next(matrices, count, &at, arena);
    nbytes = arena.nbytes() > nbytes ? arena.nbytes() : nbytes;
    if (!workspace || next.table.count == 0) continue;
    clear(next.states, kOrthoBatch * int64_t(sizeof(OrthoState)), stream);
    for (int pass = 0; pass < (next.tall ? 2 : 1); ++pass)
      launch(stream, grid_of(unsigned(next.blocks)), kBlock, kernel<orthogonalize_kernel>, next.table, next.states,
             pass);
  }
  return workspace ? 0 : nbytes;
}

}  // namespace gradzip::cuda

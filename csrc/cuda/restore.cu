#include "cuda/restore.cuh"

#include <algorithm>

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

void restore(const float* number, const Restoration* table, int64_t count, cudaStream_t stream) {
  constexpr int64_t kPiece = 64 * kBlock;  // bytes
  for (int64_t at = 0; at < count;) {
    RestoreTable batch{};
    int64_t pieces = 0, blocks = 0;
    for (; at < count && batch.count < kRestoreBatch; ++at) {
      if (table[at].nbytes == 0) continue;
      batch.entries[batch.count++].restoration = table[at];
      pieces += ceil_div(table[at].nbytes, kPiece);
    }
    if (batch.count == 0) continue;
    // As many blocks as run at a time, shared out by size: if they have nothing to do, each costs more than it saves.
    const int64_t most = grid_for(pieces);
    for (int i = 0; i < batch.count; ++i) {
      RestoreEntry& entry = batch.entries[i];
      const int64_t own = ceil_div(entry.restoration.nbytes, kPiece) * most / pieces;
      entry.first_block = uint32_t(blocks);
      entry.blocks = uint32_t(std::max<int64_t>(own, 1));
      blocks += entry.blocks;
    }
    launch(stream, grid_of(unsigned(blocks)), kBlock, kernel<restore_kernel>, number, batch);
  }
}

}  // namespace gradzip::cuda

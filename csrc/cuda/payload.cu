#include "cuda/payload.cuh"

#include <algorithm>

#include "cuda/block/launch.h"
#include "cuda/block/table.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

int64_t payload_seal(void* workspace, const PayloadSeal* table, int64_t count, cudaStream_t stream) {
  std::vector<SealEntry> entries;
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t own = ceil_div(int64_t(table[i].header.nbytes), kChecksumTile);
    entries.push_back({table[i], 0, 0, uint32_t(own), blocks});
    blocks += own;
  }
  Arena arena(workspace);
  auto* on_device = upload(arena, entries, stream);
  if (!workspace) return arena.nbytes();
  if (count == 0) return 0;
  launch(stream, grid_of(unsigned(count)), kBlock, kernel<header_kernel>, on_device);
  launch(stream, grid_of(unsigned(blocks)), kBlock, kernel<checksum_kernel>, on_device, count);
  return 0;
}

void payload_inspect(const PayloadBuffer* buffers, int64_t count, int64_t each, PayloadInspection* table,
                     cudaStream_t stream) {
  clear(table, count * each * int64_t(sizeof *table), stream);
  for (int64_t at = 0; at < count; at += kPayloadBatch) {
    PayloadBatch batch{};
    batch.count = int(std::min<int64_t>(count - at, kPayloadBatch));
    int64_t longest = 0;
    for (int b = 0; b < batch.count; ++b) {
      batch.of[b] = buffers[at + b];
      longest = std::max(longest, batch.of[b].nbytes);
    }
    launch(stream, grid_of(1), kPayloadBatch, kernel<walk_kernel>, batch, each, table + at * each);
    const unsigned y = unsigned(std::clamp<int64_t>(batch.count * each, 1, 1024));
    const unsigned x = grid_for(ceil_div(longest, std::max<int64_t>(each, 1) * 64 * kBlock));
    launch(stream, grid_of(x, y), kBlock, kernel<sums_kernel>, batch, each, table + at * each);
  }
}

}  // namespace gradzip::cuda

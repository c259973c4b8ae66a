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

void payload_verify(const PayloadExpectation* expected, int64_t count, PayloadInspection* table, float* numbers,
                    cudaStream_t stream) {
  if (count == 0) return;
  clear(table, count * int64_t(sizeof *table), stream);
  for (int64_t at = 0; at < count; at += kVerifyBatch) {
    VerifyTable batch{};
    batch.count = int32_t(std::min<int64_t>(count - at, kVerifyBatch));
    int64_t pieces = 0, blocks = 0;
    for (int i = 0; i < batch.count; ++i) pieces += ceil_div(expected[at + i].nbytes, kChecksumTile);
    const int64_t most = grid_for(pieces);  // shared out by size
    for (int i = 0; i < batch.count; ++i) {
      const int64_t own = ceil_div(expected[at + i].nbytes, kChecksumTile) * most / std::max<int64_t>(pieces, 1);
      batch.entries[i] = {expected[at + i], uint32_t(blocks), uint32_t(std::max<int64_t>(own, 1))};
      blocks += batch.entries[i].blocks;
    }
    launch(stream, grid_of(unsigned(blocks)), kBlock, kernel<verify_kernel>, batch, table + at, numbers + at);
  }
}

}  // namespace gradzip::cuda

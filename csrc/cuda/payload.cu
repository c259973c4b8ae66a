#include "cuda/payload.cuh"

#include <algorithm>
#include <cstddef>

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

static_assert(offsetof(PayloadHeader, checksum) == kChecksumBytes, "the wire format");

int64_t payload_seal(void* workspace, uint8_t* payload, const PayloadHeader* header, const PayloadResults* results,
                     cudaStream_t stream) {
  Arena arena(workspace);
  auto* state = arena.take<ChecksumState>(1);
  if (!workspace) return arena.nbytes();
  const int64_t nbytes = int64_t(header->nbytes);
  launch(stream, grid_of(1), kBlock, header_kernel, payload, *header, *results);
  clear(state, sizeof *state, stream);
  launch(stream, grid_of(grid_for(ceil_div(nbytes, 64 * kBlock))), kBlock, checksum_kernel, payload, nbytes, state,
         payload + kChecksumBytes);
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
    launch(stream, grid_of(1), kPayloadBatch, walk_kernel, batch, each, table + at * each);
    const unsigned y = unsigned(std::clamp<int64_t>(batch.count * each, 1, 1024));
    const unsigned x = grid_for(ceil_div(longest, std::max<int64_t>(each, 1) * 64 * kBlock));
    launch(stream, grid_of(x, y), kBlock, sums_kernel, batch, each, table + at * each);
  }
}

}  // namespace gradzip::cuda

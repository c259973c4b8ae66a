#include "cuda/payload.cuh"

#include <cstddef>

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

static_assert(offsetof(PayloadHeader, checksum) == kChecksumBytes, "the wire format");
static_assert(offsetof(PayloadHeader, fields) + sizeof PayloadHeader{}.fields == sizeof(PayloadHeader),
              "the number is the last word of the header");

int64_t payload_seal(void* workspace, uint8_t* payload, int64_t nbytes, const PayloadHeader* header,
                     const float* magnitudes, int64_t magnitude_count, const RangeFloat* number, cudaStream_t stream) {
  Arena arena(workspace);
  auto* state = arena.take<ChecksumState>(1);
  if (!workspace) return arena.nbytes();
  launch(stream, grid_of(1), kLanes, header_kernel, payload, *header, magnitudes, magnitude_count, number);
  clear(state, sizeof *state, stream);
  launch(stream, grid_of(grid_for(ceil_div(nbytes, 64 * kBlock))), kBlock, checksum_kernel, payload, nbytes, state,
         payload + kChecksumBytes);
  return 0;
}

void payload_inspect(const uint8_t* buffer, int64_t nbytes, int64_t count, PayloadInspection* table,
                     cudaStream_t stream) {
  clear(table, count * int64_t(sizeof *table), stream);
  launch(stream, grid_of(1), kLanes, walk_kernel, buffer, nbytes, count, table);
  const unsigned y = unsigned(count < 1 ? 1 : count < 1024 ? count : 1024);
  const unsigned x = grid_for(ceil_div(nbytes, int64_t(y) * 64 * kBlock));
  launch(stream, grid_of(x, y), kBlock, sums_kernel, buffer, nbytes, count, table);
}

}  // namespace gradzip::cuda

#include "cuda/payload.cuh"

#include <cstddef>

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

static_assert(offsetof(PayloadHeader, checksum) == kChecksumBytes, "the wire format");
static_assert(offsetof(PayloadHeader, fields) + sizeof PayloadHeader{}.fields == sizeof(PayloadHeader),
              "the number is the last word of the header");

int64_t payload_checksum_workspace(int64_t) { return sizeof(ChecksumState); }
int64_t payload_seal_workspace(int64_t) { return sizeof(ChecksumState); }

void payload_checksum(const uint8_t* payload, int64_t nbytes, uint32_t* checksum, void* workspace,
                      cudaStream_t stream) {
  auto* state = static_cast<ChecksumState*>(workspace);
  clear(state, sizeof *state, stream);
  launch(stream, grid_of(grid_for(ceil_div(nbytes, 64 * kBlock))), kBlock, checksum_kernel, payload, nbytes, state,
         reinterpret_cast<uint8_t*>(checksum));
}

void payload_seal(uint8_t* payload, int64_t nbytes, const PayloadHeader& header, const float* magnitudes,
                  int64_t magnitude_count, const RangeFloat* number, void* workspace, cudaStream_t stream) {
  launch(stream, grid_of(1), kLanes, header_kernel, payload, header, magnitudes, magnitude_count, number);
  auto* state = static_cast<ChecksumState*>(workspace);
  clear(state, sizeof *state, stream);
  launch(stream, grid_of(grid_for(ceil_div(nbytes, 64 * kBlock))), kBlock, checksum_kernel, payload, nbytes, state,
         payload + kChecksumBytes);
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

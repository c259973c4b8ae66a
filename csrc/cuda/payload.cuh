// Payload headers and checksums, so that a payload is written and checked on the device.
#pragma once

#include "common/payload.h"
#include "cuda/block/bytes.cuh"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

// The part of the sum of the checksum's terms that this block, of `threads` threads from `thread` on, computes: for its
// thread 0. nbytes is a multiple of 16.
GZ_DEVICE uint64_t checksum_part(const uint8_t* payload, int64_t nbytes, int64_t thread, int64_t threads) {
  __shared__ uint64_t partial[kLanes];
  const bool aligned = reinterpret_cast<uintptr_t>(payload) % 16 == 0;
  uint64_t sum = 0;
  for (int64_t i = thread; i < nbytes / 16; i += threads) {
    uint64_t first, second;
    if (aligned) {
      const ulonglong2 words = __ldg(reinterpret_cast<const ulonglong2*>(payload) + i);
      first = words.x, second = words.y;
    } else {
      first = load_bytes<uint64_t>(payload + 16 * i), second = load_bytes<uint64_t>(payload + 16 * i + 8);
    }
    if (2 * i + 1 == kChecksumWord) second &= ~uint64_t(0xffffffffu);
    sum += checksum_term(first, uint64_t(2 * i)) + checksum_term(second, uint64_t(2 * i + 1));
  }
  return block_sum(sum, partial);
}
static_assert(kChecksumWord % 2 == 1, "the second of two");

constexpr int64_t kChecksumTile = 64 * kBlock;  // bytes of a block
struct SealEntry {
  PayloadSeal seal;
  uint64_t sum;  // 0 at launch, as the ticket
  uint32_t ticket, blocks;
  int64_t first_block;
};

// Writes the headers without the checksums, and the zeros behind the last sections. One block per payload.
__global__ void __launch_bounds__(kBlock) header_kernel(const SealEntry* entries) {
  __shared__ int64_t end;
  const PayloadSeal& seal = entries[blockIdx.x].seal;
  if (threadIdx.x == 0) {
    PayloadHeader header;
    end = add_results(seal, &header);
    uint64_t words[sizeof header / 8];
    memcpy(words, &header, sizeof header);
    for (int i = 0; i < int(sizeof header / 8); ++i) store_bytes(seal.payload + 8 * i, words[i], 8);
  }
  __syncthreads();
  for (int64_t i = end + threadIdx.x; i < int64_t(seal.header.nbytes); i += kBlock) seal.payload[i] = 0;
}

// Writes the checksum of each payload, 4 bytes, to its header.
__global__ void __launch_bounds__(kBlock) checksum_kernel(SealEntry* entries, int64_t count) {
  SealEntry& entry = entries[entry_of_block(static_cast<const SealEntry*>(entries), count)];
  const unsigned blocks = entry.blocks;
  const int64_t thread = (blockIdx.x - entry.first_block) * kBlock + threadIdx.x;
  const auto nbytes = int64_t(entry.seal.header.nbytes);
  const uint64_t part = checksum_part(entry.seal.payload, nbytes, thread, int64_t(blocks) * kBlock);
  if (threadIdx.x == 0) atomic_add(&entry.sum, part);
  if (last_block(&entry.ticket, blocks) && threadIdx.x == 0)
    store_bytes(entry.seal.payload + kChecksumAt, checksum_fold(entry.sum), 4);
}

// The buffers of one launch.
constexpr int kPayloadBatch = 64;
struct PayloadBatch {
  int count;
  PayloadBuffer of[kPayloadBatch];
};

GZ_DEVICE void load_header(const uint8_t* payload, PayloadHeader* header) {
  uint64_t words[sizeof(PayloadHeader) / 8];
  for (int i = 0; i < int(sizeof words / 8); ++i) words[i] = load_bytes<uint64_t>(payload + 8 * i);
  memcpy(header, words, sizeof words);
}

// Finds the beginning of each of `each` payloads in each buffer, by the sizes that headers claim. The table is zero at
// launch.
__global__ void walk_kernel(PayloadBatch buffers, int64_t each, PayloadInspection* table) {
  for (int b = int(threadIdx.x); b < buffers.count; b += int(blockDim.x)) {
    const PayloadBuffer buffer = buffers.of[b];
    PayloadInspection* rows = table + b * each;
    int64_t begin = 0;
    for (int64_t r = 0; r < each && buffer.nbytes - begin >= int64_t(sizeof(PayloadHeader)); ++r) {
      load_header(buffer.bytes + begin, &rows[r].header);
      rows[r].begin = uint64_t(begin);
      const uint64_t claimed = rows[r].header.nbytes;
      const uint64_t left = uint64_t(buffer.nbytes - begin);
      if (!payload_fits(claimed, left)) break;
      begin += int64_t(claimed);
    }
  }
}

// The sums of the payloads that walk_kernel found; blocks with the same y share one payload.
__global__ void __launch_bounds__(kBlock) sums_kernel(PayloadBatch buffers, int64_t each, PayloadInspection* table) {
  for (int64_t r = blockIdx.y; r < buffers.count * each; r += gridDim.y) {
    const PayloadBuffer buffer = buffers.of[r / each];
    const uint64_t claimed = table[r].header.nbytes, left = uint64_t(buffer.nbytes) - table[r].begin;
    if (!payload_fits(claimed, left)) continue;
    const uint64_t part = checksum_part(buffer.bytes + table[r].begin, int64_t(claimed), grid_thread(), grid_threads());
    if (threadIdx.x == 0) atomic_add(&table[r].sum, part);
  }
}

// The payloads of one launch. `blocks` blocks work on each.
constexpr int kVerifyBatch = 70;
struct VerifyEntry {
  PayloadExpectation expected;
  uint32_t first_block, blocks;
};
struct VerifyTable {
  int32_t count;
  VerifyEntry entries[kVerifyBatch];
};
static_assert(sizeof(VerifyTable) < 4000, "it fits the 4 KB that a kernel may have");

// The table is zero at launch. The last block of a payload judges it; until then, `begin` is the ticket.
__global__ void __launch_bounds__(kBlock)
    verify_kernel(VerifyTable payloads, PayloadInspection* table, float* numbers) {
  const int index = entry_of_block(payloads);
  const auto& [expected, first_block, blocks] = payloads.entries[index];
  PayloadInspection* row = table + index;
  const bool whole = expected.nbytes >= int64_t(sizeof(PayloadHeader));
  const uint64_t claimed = whole ? load_bytes<uint64_t>(expected.payload + kNbytesAt) : 0;
  if (payload_fits(claimed, uint64_t(expected.nbytes))) {
    const int64_t thread = int64_t(blockIdx.x - first_block) * kBlock + threadIdx.x;
    const uint64_t part = checksum_part(expected.payload, int64_t(claimed), thread, int64_t(blocks) * kBlock);
    if (threadIdx.x == 0) atomic_add(&row->sum, part);
  }
  if (!last_block(reinterpret_cast<uint32_t*>(&row->begin), blocks) || threadIdx.x > 0) return;
  row->begin = 0;
  if (whole) load_header(expected.payload, &row->header);
  numbers[index] = payload_verdict(*row, expected);
}

}  // namespace gradzip::cuda

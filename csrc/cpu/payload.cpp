#include <cstddef>
#include <cstring>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

GZ_INLINE uint64_t checksum_body(const uint8_t* bytes, int64_t first, int64_t last) {
  uint64_t sum = 0;
  for (int64_t i = first; i < last; ++i) {
    uint64_t word;
    std::memcpy(&word, bytes + 8 * i, 8);
    sum += checksum_term(word, uint64_t(i));
  }
  return sum;
}
GZ_SIMD_DISPATCH(uint64_t, checksum, (const uint8_t* bytes, int64_t first, int64_t last), (bytes, first, last))

}  // namespace

uint32_t payload_checksum(const uint8_t* payload, int64_t nbytes, int threads) {
  PayloadHeader header;
  std::memcpy(&header, payload, sizeof header);
  header.checksum = 0;
  constexpr int64_t kHeaderWords = sizeof header / 8;
  std::vector<uint64_t> partial(ceil_div(nbytes / 8, kChunk), 0);
  parallel_chunks(nbytes / 8, kChunk, threads, [&](int64_t chunk, int64_t begin, int64_t end) {
    partial[chunk] = checksum(payload, begin < kHeaderWords ? kHeaderWords : begin, end);
  });
  uint64_t sum = checksum(reinterpret_cast<const uint8_t*>(&header), 0, kHeaderWords);
  for (uint64_t p : partial) sum += p;
  return checksum_fold(sum);
}

}  // namespace gradzip::cpu

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

static_assert(offsetof(PayloadHeader, nbytes) == kNbytesAt, "the wire format");
static_assert(offsetof(PayloadHeader, checksum) == kChecksumAt, "the wire format");

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

// The sum of the checksum's terms, to be folded. The checksum itself counts as 0.
uint64_t checksum_sum(const uint8_t* payload, int64_t nbytes, int threads) {
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
  return sum;
}

}  // namespace

void payload_seal(const PayloadSeal* table, int64_t count, int threads) {
  const auto nbytes_of = [&](int64_t i) { return int64_t(table[i].header.nbytes); };
  parallel_pieces(count, threads, nbytes_of, [&](int64_t i, int threads_of_one) {
    uint8_t* payload = table[i].payload;
    PayloadHeader sealed;
    const int64_t nbytes = nbytes_of(i), end = add_results(table[i], &sealed);
    std::fill(payload + end, payload + nbytes, uint8_t(0));
    std::memcpy(payload, &sealed, sizeof sealed);
    sealed.checksum = checksum_fold(checksum_sum(payload, nbytes, threads_of_one));
    std::memcpy(payload, &sealed, sizeof sealed);
  });
}

void payload_inspect(const PayloadBuffer* buffers, int64_t count, int64_t each, PayloadInspection* table, int threads) {
  std::fill(table, table + count * each, PayloadInspection{});
  for (int64_t b = 0; b < count; ++b) {
    const auto [bytes, nbytes] = buffers[b];
    PayloadInspection* rows = table + b * each;
    int64_t begin = 0;
    for (int64_t r = 0; r < each && nbytes - begin >= int64_t(sizeof(PayloadHeader)); ++r) {
      std::memcpy(&rows[r].header, bytes + begin, sizeof(PayloadHeader));
      rows[r].begin = uint64_t(begin);
      const uint64_t claimed = rows[r].header.nbytes;
      if (!payload_fits(claimed, uint64_t(nbytes - begin))) break;
      rows[r].sum = checksum_sum(bytes + begin, int64_t(claimed), threads);
      begin += int64_t(claimed);
    }
  }
}

void payload_verify(const PayloadExpectation* expected, int64_t count, PayloadInspection* table, float* numbers,
                    int threads) {
  const auto nbytes_of = [&](int64_t i) { return expected[i].nbytes; };
  parallel_pieces(count, threads, nbytes_of, [&](int64_t i, int threads_of_one) {
    const PayloadBuffer buffer{expected[i].payload, expected[i].nbytes};
    payload_inspect(&buffer, 1, 1, table + i, threads_of_one);
    numbers[i] = payload_verdict(table[i], expected[i]);
  });
}

}  // namespace gradzip::cpu

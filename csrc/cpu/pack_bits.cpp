#include "cpu/bit_stream.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

GZ_INLINE void pack_chunk_body(const int32_t* codes, int64_t n, int bits, uint8_t* packed) {
  const uint32_t mask = bits == 32 ? ~0u : (1u << bits) - 1;
  uint32_t block[kBitBlock];
  for (int64_t i = 0; i < n; i += kBitBlock) {
    const int count = int(n - i < kBitBlock ? n - i : kBitBlock);
    for (int j = 0; j < count; ++j) block[j] = uint32_t(codes[i + j]) & mask;
    pack_block(block, count, bits, packed + i / 8 * bits);
  }
}
GZ_SIMD_DISPATCH(void, pack_chunk, (const int32_t* codes, int64_t n, int bits, uint8_t* packed),
                 (codes, n, bits, packed))

}  // namespace

void pack_bits(const int32_t* codes, int64_t n, int bits, uint8_t* packed, int threads) {
  parallel_chunks(n, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    pack_chunk(codes + begin, end - begin, bits, packed + begin / 8 * bits);
  });
}

void pack_bits_unpack(const uint8_t* packed, int64_t n, int bits, int32_t* codes, int threads) {
  const int64_t nbytes = ceil_div(n * bits, 8);
  parallel_chunks(n, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) codes[i] = int32_t(uint32_t(read_bits(packed, nbytes, i * bits, bits)));
  });
}

}  // namespace gradzip::cpu

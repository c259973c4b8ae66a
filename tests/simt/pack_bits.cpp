// pack_bits and pack_bits_unpack.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/pack_bits.cu"

using namespace gradzip;

static void test(int64_t n, int bits) {
  std::mt19937 random(unsigned(n) + unsigned(bits));
  simt::Buffer<int32_t> codes(n), expected_codes(n);
  for (int64_t i = 0; i < n; ++i) codes[i] = int32_t(random());
  const int64_t nbytes = (n * bits + 7) / 8;
  const simt::Buffer<uint8_t> expected(nbytes);
  cpu::pack_bits(codes, n, bits, expected, 1);
  cpu::pack_bits_unpack(expected, n, bits, expected_codes, 1);
  simt::in_any_order(n, [&] {
    for (int64_t skip = 0; skip < (n > 10000 ? 2 : 4); ++skip) {
      const simt::Buffer<uint8_t> packed(nbytes, skip);
      const simt::Buffer<int32_t> back(n);
      cuda::pack_bits(codes, n, bits, packed, nullptr);
      simt::expect_equal(packed.get(), expected.get(), nbytes, "pack_bits, bits = " + std::to_string(bits));
      cuda::pack_bits_unpack(packed, n, bits, back, nullptr);
      simt::expect_equal(back.get(), expected_codes.get(), n, "pack_bits_unpack, bits = " + std::to_string(bits));
    }
  });
}

int main() {
  for (int64_t n : simt::kSizes)
    for (int bits : {1, 2, 3, 7, 8, 10, 13, 16, 17, 24, 31, 32})
      if (n < 50000 || bits == 10) test(n, bits);
}

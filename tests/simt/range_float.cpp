// range_float_fit, encode, encode_packed, decode; pack_bits and unpack_bits.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/pack_bits.cu"
#include "cuda/range_float.cu"

using namespace gradzip;

static void test_pack_bits(int64_t n, int bits) {
  std::mt19937 random(unsigned(n) + unsigned(bits));
  simt::Buffer<int32_t> codes(n), expected_codes(n);
  for (int64_t i = 0; i < n; ++i) codes[i] = int32_t(random());
  const int64_t nbytes = (n * bits + 7) / 8;
  const simt::Buffer<uint8_t> expected(nbytes);
  cpu::pack_bits(codes, n, bits, expected, 1);
  cpu::unpack_bits(expected, n, bits, expected_codes, 1);
  simt::in_any_order(n, [&] {
    for (int64_t skip = 0; skip < (n > 10000 ? 2 : 4); ++skip) {
      const simt::Buffer<uint8_t> packed(nbytes, skip);
      const simt::Buffer<int32_t> back(n);
      cuda::pack_bits(codes, n, bits, packed, nullptr);
      simt::expect_equal(packed.get(), expected.get(), nbytes, "pack_bits, bits = " + std::to_string(bits));
      cuda::unpack_bits(packed, n, bits, back, nullptr);
      simt::expect_equal(back.get(), expected_codes.get(), n, "unpack_bits, bits = " + std::to_string(bits));
    }
  });
}

static void test_fit(const simt::Buffer<float>& x, int64_t n, int bits, int mantissa, float vmin, float vmax) {
  RangeFloat expected;
  cpu::range_float_fit(&expected, x, n, bits, mantissa, vmin, vmax, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<RangeFloat> format(1);
    cuda::range_float_fit(format, x, n, bits, mantissa, vmin, vmax,
                          simt::workspace(cuda::range_float_fit_workspace(n)).get(), nullptr);
    simt::expect_equal(*format.get(), expected, "range_float_fit, bits = " + std::to_string(bits));
  });
}

static void test_encode(const simt::Buffer<float>& x, int64_t n, int bits, bool stochastic) {
  RangeFloat number;
  cpu::range_float_fit(&number, x, n, bits, -1, -0.7f, 1.5f, 1);
  if (number.positive + number.negative >= 1u << bits)
    std::fprintf(stderr, "codes of more than N bits\n"), std::exit(1);
  const simt::Buffer<RangeFloat> format(std::vector<RangeFloat>{number});
  const int64_t nbytes = (n * bits + 7) / 8;
  const simt::Buffer<int32_t> expected(n);
  const simt::Buffer<uint8_t> expected_packed(nbytes);
  const simt::Buffer<float> expected_values(n);
  const int64_t out = cpu::range_float_encode(number, x, n, stochastic, 42, expected, 1);
  cpu::range_float_encode_packed(number, x, n, stochastic, 42, expected_packed, 1);
  cpu::range_float_decode(number, expected, n, expected_values, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<int32_t> codes(n, n % 2), failed(std::vector<int32_t>{0});
    const simt::Buffer<int64_t> outside(std::vector<int64_t>{100});
    cuda::range_float_encode(format, x, n, stochastic, 42, codes, outside, nullptr);
    simt::expect_equal(codes.get(), expected.get(), n, "range_float_encode");
    simt::expect_equal(*outside.get(), 100 + out, "range_float_encode: outside");
    const simt::Buffer<uint8_t> packed(nbytes, n % 4);
    cuda::range_float_encode_packed(format, x, n, bits, stochastic, 42, packed, outside, nullptr);
    simt::expect_equal(packed.get(), expected_packed.get(), nbytes, "range_float_encode_packed");
    simt::expect_equal(*outside.get(), 100 + 2 * out, "range_float_encode_packed: outside");
    const simt::Buffer<float> values(n);
    cuda::range_float_decode(format, codes, n, values, failed, nullptr);
    simt::expect_equal(values.get(), expected_values.get(), n, "range_float_decode");
    simt::expect_equal(*failed.get(), 0, "range_float_decode: failed");
    if (n == 0) return;
    codes[n - 1] = int32_t(number.positive + number.negative + 1);
    cuda::range_float_decode(format, codes, n, values, failed, nullptr);
    simt::expect_equal(*failed.get(), 1, "range_float_decode of a code there is not: failed");
    simt::expect_equal(values[n - 1], 0.0f, "range_float_decode of a code there is not");
  });
}

int main() {
  for (int64_t n : simt::kSizes) {
    for (int bits : {1, 2, 3, 7, 8, 10, 13, 16, 17, 24, 31, 32})
      if (n < 50000 || bits == 10) test_pack_bits(n, bits);
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<float> x(simt::data(kind, n), n % 4);
      for (int bits : {2, 5, 8, 10, 16}) {
        if (n > 10000 && bits != 10) continue;
        // An infinite limit is nobody's format, but must not tell CPU and CUDA apart either.
        test_fit(x, n, bits, -1, 1.0f, -1.0f);
        test_fit(x, n, bits, bits / 2, 1.0f, -1.0f);
        test_fit(x, n, bits, -1, -0.5f, 2.0f);
        test_fit(x, n, bits, -1, 0.0f, 2.0f);
        for (bool stochastic : {false, true})
          if (n < 50000 || kind == simt::Kind::normal) test_encode(x, n, bits, stochastic);
      }
    }
  }
  // Long enough for the histogram to be that of a sample.
  const int64_t n = (1 << 19) + 4321;
  test_fit(simt::Buffer<float>(simt::data(simt::Kind::normal, n)), n, 10, -1, 1.0f, -1.0f);
}

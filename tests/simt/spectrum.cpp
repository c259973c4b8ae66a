// spectrum_power and spectrum_decode_add.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/spectrum.cu"

using namespace gradzip;

static void test_power(int64_t rows, int64_t length, simt::Kind kind) {
  const int64_t n = rows * (length / 2 + 1);
  const simt::Buffer<float2> spectrum(n);
  const auto values = simt::data(kind, 2 * n);
  if (n) std::memcpy(static_cast<void*>(spectrum.get()), values.data(), size_t(2 * n) * sizeof(float));
  const auto* parts = reinterpret_cast<const float*>(spectrum.get());
  for (float amax : {0.0f, 1e-40f, 3.5f, 3e38f, std::numeric_limits<float>::infinity()}) {
    const simt::Buffer<float> expected(n), at(std::vector<float>{amax});
    cpu::spectrum_power(parts, rows, length, &amax, expected, 1);
    simt::in_any_order(n, [&] {
      const simt::Buffer<float> power(n);
      cuda::spectrum_power(parts, rows, length, at, power, nullptr);
      simt::expect_equal(power.get(), expected.get(), n, "spectrum_power");
    });
  }
}

static void test_decode_add(int64_t n, int bits, int one_in) {
  std::mt19937 random(unsigned(n) + unsigned(bits));
  simt::Buffer<uint8_t> bitmap((n + 7) / 8, n % 4);
  int64_t count = 0;
  for (int64_t i = 0; i < bitmap.size(); ++i) bitmap[i] = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (random() % unsigned(one_in)) continue;
    bitmap[i / 8] |= uint8_t(1 << i % 8);
    ++count;
  }
  const int64_t nbytes = (2 * count * bits + 7) / 8;
  simt::Buffer<uint8_t> packed(nbytes, (n + 1) % 4);
  for (int64_t i = 0; i < nbytes; ++i) packed[i] = uint8_t(random());
  RangeFloat number;
  cpu::range_float_fit(&number, nullptr, 0, bits, bits / 2, -2.0f, 1.0f, 1);
  const simt::Buffer<RangeFloat> format(std::vector<RangeFloat>{number});

  // Aligned as complex numbers are.
  const auto start = simt::data(simt::Kind::normal, 2 * n);
  const auto fresh = [&] {
    simt::Buffer<float2> spectrum(n);
    if (n) std::memcpy(static_cast<void*>(spectrum.get()), start.data(), size_t(2 * n) * sizeof(float));
    return spectrum;
  };
  const auto floats = [](const simt::Buffer<float2>& b) { return reinterpret_cast<float*>(b.get()); };
  const auto expected = fresh();
  int32_t refused = 0;
  cpu::spectrum_decode_add(&number, bitmap, packed, nbytes, count, 0.3f, floats(expected), n, &refused, 1);
  simt::expect_equal(refused, 0, "spectrum_decode_add on the CPU: failed");
  simt::in_any_order(n, [&] {
    const auto spectrum = fresh();
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    simt::call(cuda::spectrum_decode_add, format, bitmap, packed, nbytes, count, 0.3f, floats(spectrum), n, failed);
    simt::expect_equal(floats(spectrum), floats(expected), 2 * n, "spectrum_decode_add");
    simt::expect_equal(*failed.get(), 0, "spectrum_decode_add: failed");
    simt::call(cuda::spectrum_decode_add, format, bitmap, packed, nbytes, count + 1, 0.3f, floats(spectrum), n, failed);
    simt::expect_equal(*failed.get(), 1, "spectrum_decode_add of another count: failed");
    for (int64_t i = 0; i < 2 * n; ++i)
      if (!std::isnan(floats(spectrum)[i])) std::fprintf(stderr, "another count gives a number\n"), std::exit(1);
  });
}

int main() {
  for (int64_t length : {1, 2, 3, 8, 63, 64, 4096, 5001})
    for (int64_t rows : {0, 1, 2, 7})
      for (simt::Kind kind : {simt::Kind::normal, simt::Kind::wild}) test_power(rows, length, kind);
  for (int64_t n : simt::kSizes)
    for (int bits : {2, 7, 10, 16})
      for (int one_in : {1, 6, 1000})
        if (n < 10000 || (bits == 10 && one_in == 6)) test_decode_add(n, bits, one_in);
}

// ternary_packed and ternary_decode_add.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/ternary.cu"

using namespace gradzip;

static void test(const simt::Buffer<float>& x, int64_t n, float scale, float clip) {
  const int64_t nbytes = (n + 4) / 5;
  const double weight = 1.0 / 3.0;
  const std::string what = "scale = " + std::to_string(scale) + ", clip = " + std::to_string(clip);
  const simt::Buffer<uint8_t> expected(nbytes);
  const simt::Buffer<float> expected_sum(simt::data(simt::Kind::normal, n));
  int32_t refused = 0;
  cpu::ternary_packed(x, n, &scale, std::isinf(clip) ? nullptr : &clip, 3, expected, 1);
  cpu::ternary_decode_add(expected, n, &scale, weight, expected_sum, &refused, 1);
  simt::expect_equal(refused, 0, "ternary_decode_add on the CPU: failed");
  simt::in_any_order(n, [&] {
    const simt::Buffer<float> scales(std::vector<float>{scale}), clips(std::vector<float>{clip});
    const simt::Buffer<uint8_t> packed(nbytes, n % 4);
    const simt::Buffer<float> sum(simt::data(simt::Kind::normal, n), n % 3);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    cuda::ternary_packed(x, n, scales, std::isinf(clip) ? nullptr : clips.get(), 3, packed, nullptr);
    simt::expect_equal(packed.get(), expected.get(), nbytes, "ternary_packed, " + what);
    cuda::ternary_decode_add(packed, n, scales, weight, sum, failed, nullptr);
    simt::expect_equal(sum.get(), expected_sum.get(), n, "ternary_decode_add, " + what);
    simt::expect_equal(*failed.get(), 0, "ternary_decode_add: failed, " + what);
    const simt::Buffer<float> unscaled(simt::data(simt::Kind::normal, n));
    cuda::ternary_decode_add(packed, n, nullptr, weight * double(scale), unscaled, nullptr, nullptr);
    simt::expect_equal(unscaled.get(), expected_sum.get(), n, "ternary_decode_add without a scale, " + what);
    if (n == 0) return;
    for (int64_t i : {int64_t(0), nbytes - 1}) {
      const simt::Buffer<float> spoilt(n);
      const uint8_t byte = packed[i];
      std::fill_n(spoilt.get(), n, 0.0f);
      packed[i] = 243;
      *failed.get() = 0;
      cuda::ternary_decode_add(packed, n, scales, weight, spoilt, failed, nullptr);
      simt::expect_equal(*failed.get(), 1, "ternary_decode_add of a byte there is not: failed");
      int64_t spoilt_count = 0;
      for (int64_t j = 0; j < n; ++j) spoilt_count += std::isnan(spoilt[j]);
      if (spoilt_count < 1 || spoilt_count > 5) simt::fail("%lld elements of a byte are NaN", (long long)spoilt_count);
      packed[i] = byte;
    }
    *scales.get() = -1.0f;
    *failed.get() = 0;
    cuda::ternary_decode_add(packed, n, scales, weight, sum, failed, nullptr);
    simt::expect_equal(*failed.get(), 1, "ternary_decode_add of a scale there is not: failed");
    for (int64_t i = 0; i < n; ++i)
      simt::expect_equal(std::isnan(sum[i]), true, "ternary_decode_add of a scale there is not");
  });
}

int main() {
  std::vector<int64_t> sizes(simt::kSizes, simt::kSizes + std::size(simt::kSizes));
  for (int64_t n : {319, 320, 321, 640, 959}) sizes.push_back(n);
  for (int64_t n : sizes)
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<float> x(simt::data(kind, n), n % 4);
      for (float scale : {0.0f, 1.0f, 2.5f, 3e38f, 1e-40f})
        for (float clip : {INFINITY, 1.25f})
          if (n < 10000 || scale == 2.5f) test(x, n, scale, clip);
    }
}

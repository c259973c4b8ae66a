// natural_encode and natural_decode_sum.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/natural.cu"

using namespace gradzip;

template <class T>
static void test(const simt::Buffer<T>& x, int64_t n) {
  const int dtype = dtype_of(x), kFloat = int(Dtype::float32);
  const int64_t nbytes = (n * kNaturalBits + 7) / 8;
  const simt::Buffer<uint8_t> expected(nbytes), other(nbytes);
  const simt::Buffer<T> expected_sum(n);
  const simt::Buffer<float> start(simt::data(simt::Kind::normal, n)), expected_added(simt::data(simt::Kind::normal, n));
  const int64_t* const replays = simt::replays_for(n);
  float expected_most = 1.0f;
  int32_t refused = 0;
  cpu::natural_encode(x, dtype, n, 7, replays, expected, &expected_most, 1);
  cpu::natural_encode(start, kFloat, n, 8, replays, other, nullptr, 1);
  const uint8_t* const payloads[] = {expected, other, expected};
  cpu::natural_decode_sum(payloads, 3, n, 0.3f, false, expected_sum, dtype, &refused, 1);
  cpu::natural_decode_sum(payloads, 2, n, 0.3f, true, expected_added, kFloat, &refused, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> packed(nbytes, n % 4), too(nbytes, 1);
    const simt::Buffer<T> sum(n, n % 3);
    const simt::Buffer<float> most(1), added(simt::data(simt::Kind::normal, n), n % 2);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    cuda::natural_encode(x, dtype, n, 7, replays, packed, most, nullptr);
    simt::expect_equal(packed.get(), expected.get(), nbytes, "natural_encode");
    simt::expect_equal(*most.get(), expected_most, "natural_encode: most");
    cuda::natural_encode(start, kFloat, n, 8, replays, too, nullptr, nullptr);
    simt::expect_equal(too.get(), other.get(), nbytes, "natural_encode without most");
    const uint8_t* const coded[] = {packed, too, packed};
    cuda::natural_decode_sum(coded, 3, n, 0.3f, false, sum, dtype, failed, nullptr);
    simt::expect_equal(sum.get(), expected_sum.get(), n, "natural_decode_sum");
    cuda::natural_decode_sum(coded, 2, n, 0.3f, true, added, kFloat, failed, nullptr);
    simt::expect_equal(added.get(), expected_added.get(), n, "natural_decode_sum onto other numbers");
    simt::expect_equal(*failed.get(), 0, "natural_decode_sum: failed");
    if (n == 0) return;
    packed[(n - 1) / 8 * kNaturalBits + (n - 1) % 8] = 0xff;  // all ones from the bit on where the last code begins
    packed[(n - 1) / 8 * kNaturalBits + (n - 1) % 8 + 1] = 0xff;
    cuda::natural_decode_sum(coded, 2, n, 0.3f, false, sum, dtype, failed, nullptr);
    simt::expect_equal(*failed.get(), 1, "natural_decode_sum of an exponent of infinity: failed");
    simt::expect_equal(bool(std::isfinite(to_float(sum[n - 1]))), false,
                       "natural_decode_sum of an exponent of infinity");
  });
}

// More payloads than one launch takes, and none.
static void test_many(int64_t count) {
  const int64_t n = 100;
  const simt::Buffer<float> x(simt::data(simt::Kind::normal, n)), expected(n), got(n);
  const simt::Buffer<uint8_t> packed((n * kNaturalBits + 7) / 8);
  cpu::natural_encode(x, 0, n, 7, nullptr, packed, nullptr, 1);
  const std::vector<const uint8_t*> payloads(size_t(count), packed.get());
  int32_t failed = 0;
  cpu::natural_decode_sum(payloads.data(), count, n, 0.1f, false, expected, 0, &failed, 1);
  cuda::natural_decode_sum(payloads.data(), count, n, 0.1f, false, got, 0, &failed, nullptr);
  simt::expect_equal(got.get(), expected.get(), n, "natural_decode_sum of many payloads");
  simt::expect_equal(failed, 0, "natural_decode_sum of many payloads: failed");
}

int main() {
  for (int64_t n : simt::kSizes)
    for (simt::Kind kind : simt::kKinds) {
      const std::vector<float> x = simt::data(kind, n);
      test(simt::Buffer<float>(x, n % 4), n);
      if (kind == simt::Kind::wild || n < 2000) {
        test(simt::Buffer<BFloat16>(simt::as<BFloat16>(x), n % 4), n);
        test(simt::Buffer<Float16>(simt::as<Float16>(x), n % 4), n);
      }
    }
  if (!simt::kRaces) test_many(0), test_many(1000);
}

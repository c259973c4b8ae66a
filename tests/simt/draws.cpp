// bernoulli and random_indices.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/bernoulli.cu"
#include "cuda/random_indices.cu"

using namespace gradzip;

static void test_bernoulli(simt::Kind kind, int64_t n) {
  std::vector<float> p = simt::data(kind, n);
  if (kind == simt::Kind::normal)
    for (auto& v : p) v = std::fabs(v) * 0.3f;
  const simt::Buffer<float> x(p, n % 4);
  const int64_t nbytes = (n + 7) / 8;
  const simt::Buffer<uint8_t> expected(nbytes);
  const uint64_t key = uint64_t(n) * 0x9E3779B97F4A7C15u;
  cpu::bernoulli(x, n, key, expected, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> bits(nbytes, n % 3);
    cuda::bernoulli(x, n, key, bits, nullptr);
    simt::expect_equal(bits.get(), expected.get(), nbytes, "bernoulli");
  });
}

static void test_random_indices(int64_t n, int64_t k, uint64_t key) {
  const simt::Buffer<int32_t> expected(k);
  cpu::random_indices(n, k, key, expected, 1);
  simt::in_any_order(k, [&] {
    const simt::Buffer<int32_t> indices(k, k % 4);
    cuda::random_indices(n, k, key, indices, nullptr);
    simt::expect_equal(indices.get(), expected.get(), k, "random_indices of " + std::to_string(n));
  });
}

int main() {
  for (int64_t n : simt::kSizes) {
    for (simt::Kind kind : simt::kKinds) test_bernoulli(kind, n);
    for (int64_t k : {int64_t(0), int64_t(1), n / 100, n / 3, n - 1, n})
      for (uint64_t key : {uint64_t(0), uint64_t(1), ~uint64_t(0)})
        if (0 <= k && k <= n) test_random_indices(n, k, key + uint64_t(n));
  }
  for (int64_t k : {1, 1000, 99991}) test_random_indices((int64_t(1) << 31) - 1, k, 7);
}

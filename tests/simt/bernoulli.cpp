// bernoulli.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/bernoulli.cu"

using namespace gradzip;

static void test(simt::Kind kind, int64_t n) {
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

int main() {
  for (int64_t n : simt::kSizes)
    for (simt::Kind kind : simt::kKinds) test(kind, n);
}

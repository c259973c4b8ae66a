// random_indices.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/random_indices.cu"

using namespace gradzip;

static void test(int64_t n, int64_t k, uint64_t key) {
  const simt::Buffer<int32_t> expected(k);
  cpu::random_indices(n, k, key, simt::replays_for(n + k), expected, 1);
  simt::in_any_order(k, [&] {
    const simt::Buffer<int32_t> indices(k, k % 4);
    cuda::random_indices(n, k, key, simt::replays_for(n + k), indices, nullptr);
    simt::expect_equal(indices.get(), expected.get(), k, "random_indices of " + std::to_string(n));
  });
}

int main() {
  for (int64_t n : simt::kSizes) {
    for (int64_t k : {int64_t(0), int64_t(1), n / 100, n / 3, n - 1, n})
      for (uint64_t key : {uint64_t(0), uint64_t(1), ~uint64_t(0)})
        if (0 <= k && k <= n) test(n, k, key + uint64_t(n));
  }
  for (int64_t k : {1, 1000, 99991}) test((int64_t(1) << 31) - 1, k, 7);
}

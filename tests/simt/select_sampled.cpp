// select_sampled.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/select.cu"
#include "cuda/select_sampled.cu"

using namespace gradzip;

int main() {
  for (int64_t n : {1, 33, 1000, 16384, 40000, 100003, 300001})
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<float> x(simt::data(kind, n), n % 4);
      for (int64_t k : {int64_t(1), n / 100, n / 7, n / 2, n}) {
        if (k < 1) continue;
        Selection expected;
        const uint64_t key = uint64_t(n) * 0x9E3779B97F4A7C15u + uint64_t(k);
        int64_t kept;
        cpu::select_sampled(x, n, k, key, &expected, &kept, 1);
        expected.unused = 0;
        simt::in_any_order(n > 50000 ? n : 20000, [&] {
          const simt::Buffer<Selection> selection(1);
          const simt::Buffer<int64_t> count(1);
          simt::call(cuda::select_sampled, x, n, k, key, selection, count);
          simt::expect_equal(*count.get(), kept, "select_sampled: count");
          simt::expect_equal(*selection.get(), expected, "select_sampled, k = " + std::to_string(k));
        });
      }
    }
}

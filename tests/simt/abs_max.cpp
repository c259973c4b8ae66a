// abs_max.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/abs_max.cu"

using namespace gradzip;

int main() {
  for (int64_t n : simt::kSizes)
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<float> x(simt::data(kind, n), n % 4);
      float expected;
      cpu::abs_max(x, n, &expected, 1);
      simt::in_any_order(n, [&] {
        const simt::Buffer<float> most(1);
        cuda::abs_max(x, n, most, nullptr);
        simt::expect_equal(*most.get(), expected, "abs_max");
      });
    }
}

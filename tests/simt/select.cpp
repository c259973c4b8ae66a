// select.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/select.cu"

using namespace gradzip;

int main() {
  for (int64_t n : simt::kSizes) {
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<float> x(simt::data(kind, n), n % 4);
      for (int64_t k : {int64_t(1), n / 7, n / 2, n - 1, n}) {
        if (k < 1 || k > n || (n > 50000 && k != n / 7 && kind != simt::Kind::ties)) continue;
        Selection expected;
        cpu::select(x, n, k, &expected, 1);
        simt::in_any_order(n, [&] {
          const simt::Buffer<Selection> selection(1);
          simt::call(cuda::select, x, n, k, selection);
          simt::expect_equal(*selection.get(), expected, "select, k = " + std::to_string(k));
        });
      }
    }
  }
}

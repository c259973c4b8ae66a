// bucket_norms.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/bucket_norms.cu"

using namespace gradzip;

template <class T>
static void test() {
  for (int64_t n : simt::kSizes) {
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<T> x(simt::as<T>(simt::data(kind, n)), n % 4);
      for (int64_t bucket : {int64_t(1), int64_t(7), int64_t(512), int64_t(8192), int64_t(8193), int64_t(40000), n}) {
        if (bucket < 1 || bucket > std::max<int64_t>(1, n) || (n > 20000 && bucket < 512)) continue;
        const int64_t buckets = (n + bucket - 1) / bucket;
        for (int norm : {0, 1, 2}) {
          const simt::Buffer<float> expected(buckets);
          cpu::bucket_norms(x, dtype_of(x), n, bucket, norm, expected, 1);
          simt::in_any_order(n, [&] {
            const simt::Buffer<float> norms(buckets);
            simt::call(cuda::bucket_norms, x.get(), dtype_of(x), n, bucket, norm, norms);
            simt::expect_equal(norms.get(), expected.get(), buckets,
                               "norms " + std::to_string(norm) + " of buckets of " + std::to_string(bucket));
          });
        }
      }
    }
  }
}

int main() {
  test<float>();
  if (!simt::kRaces) test<BFloat16>(), test<Float16>();
}

// one_bit_packed and one_bit_decode_add.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/one_bit.cu"
#include "cuda/signs.cu"

using namespace gradzip;

static void test(const simt::Buffer<float>& x, int64_t rows, int64_t columns) {
  const int64_t n = rows * columns, nbytes = (n + 7) / 8;
  const std::string what = std::to_string(rows) + " rows of " + std::to_string(columns);
  const simt::Buffer<uint8_t> expected(nbytes);
  const simt::Buffer<float> expected_means(2 * rows), expected_sum(simt::data(simt::Kind::normal, n));
  cpu::one_bit_packed(x, rows, columns, 5, expected, expected_means, 1);
  int32_t refused = 0;
  cpu::one_bit_decode_add(expected, expected_means, rows, columns, 0.3f, expected_sum, &refused, 1);
  simt::expect_equal(refused, 0, "one_bit_decode_add on the CPU: failed");
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> packed(nbytes, n % 4);
    const simt::Buffer<float> means(2 * rows), sum(simt::data(simt::Kind::normal, n), n % 3);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    simt::call(cuda::one_bit_packed, x, rows, columns, 5, packed, means);
    simt::expect_equal(packed.get(), expected.get(), nbytes, "one_bit_packed, " + what);
    simt::expect_equal(means.get(), expected_means.get(), 2 * rows, "one_bit_packed: means, " + what);
    cuda::one_bit_decode_add(packed, means, rows, columns, 0.3f, sum, failed, nullptr);
    simt::expect_equal(sum.get(), expected_sum.get(), n, "one_bit_decode_add, " + what);
    simt::expect_equal(*failed.get(), 0, "one_bit_decode_add: failed, " + what);
    if (n == 0) return;
    means[2 * rows - 1] = n % 2 ? NAN : INFINITY;
    cuda::one_bit_decode_add(packed, means, rows, columns, 0.3f, sum, failed, nullptr);
    simt::expect_equal(*failed.get(), 1, "one_bit_decode_add of a mean there is not: failed");
    for (int64_t i = n - columns; i < n; ++i)
      simt::expect_equal(std::isnan(sum[i]), true, "one_bit_decode_add of a mean there is not");
  });
}

int main() {
  for (int64_t n : simt::kSizes)
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<float> x(simt::data(kind, n), n % 4);
      for (int64_t columns : {1, 3, 32, 77, 500, 8192, 8193, 20000, 100003})
        if (columns <= n && (n < 2000 || (kind == simt::Kind::wild && (n < 10000 || columns > 8192))))
          test(x, n / columns, columns);
    }
  test(simt::Buffer<float>(0), 3, 0);
  test(simt::Buffer<float>(0), 0, 3);
}

// pack_signs, majority, signs_decode_add; one_bit_packed and one_bit_decode_add.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/one_bit.cu"
#include "cuda/signs.cu"

using namespace gradzip;

static void test_signs(const simt::Buffer<float>& x, int64_t n) {
  const int64_t nbytes = (n + 7) / 8;
  const simt::Buffer<uint8_t> expected(nbytes);
  const simt::Buffer<float> expected_sum(simt::data(simt::Kind::normal, n));
  cpu::pack_signs(x, n, 5, expected, 1);
  cpu::signs_decode_add(expected, n, 0.3f, expected_sum, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> packed(nbytes, n % 4);
    const simt::Buffer<float> sum(simt::data(simt::Kind::normal, n), n % 3);
    cuda::pack_signs(x, n, 5, packed, nullptr);
    simt::expect_equal(packed.get(), expected.get(), nbytes, "pack_signs");
    cuda::signs_decode_add(packed, n, 0.3f, sum, nullptr);
    simt::expect_equal(sum.get(), expected_sum.get(), n, "signs_decode_add");
  });
}

static void test_majority(int64_t n, int voters) {
  const int64_t nbytes = (n + 7) / 8;
  std::mt19937 random(unsigned(n) + unsigned(voters));
  std::vector<simt::Buffer<uint8_t>> ballots;
  std::vector<const uint8_t*> votes;
  for (int v = 0; v < voters; ++v) {
    // Bits past n are not looked at. Few distinct voters, so that there are ties.
    ballots.emplace_back(nbytes, v % 3);
    for (int64_t b = 0; b < nbytes; ++b) ballots.back()[b] = uint8_t(v % 2 ? ~ballots[size_t(v) - 1][b] : random());
    if (v % 2 && nbytes) ballots.back()[0] = uint8_t(random());
    votes.push_back(ballots.back());
  }
  const simt::Buffer<uint8_t> expected(nbytes);
  cpu::majority(votes.data(), voters, n, 11, expected, 1);
  const simt::Buffer<const uint8_t*> table(votes);
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> packed(nbytes, voters % 4);
    cuda::majority(table, voters, n, 11, packed, nullptr);
    simt::expect_equal(packed.get(), expected.get(), nbytes, "majority of " + std::to_string(voters));
  });
}

static void test_one_bit(const simt::Buffer<float>& x, int64_t rows, int64_t columns) {
  const int64_t n = rows * columns, nbytes = (n + 7) / 8;
  const std::string what = std::to_string(rows) + " rows of " + std::to_string(columns);
  const simt::Buffer<uint8_t> expected(nbytes);
  const simt::Buffer<float> expected_means(2 * rows), expected_sum(simt::data(simt::Kind::normal, n));
  cpu::one_bit_packed(x, rows, columns, 5, expected, expected_means, 1);
  cpu::one_bit_decode_add(expected, expected_means, rows, columns, 0.3f, expected_sum, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> packed(nbytes, n % 4);
    const simt::Buffer<float> means(2 * rows), sum(simt::data(simt::Kind::normal, n), n % 3);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    cuda::one_bit_packed(x, rows, columns, 5, packed, means, simt::workspace(cuda::one_bit_packed_workspace(n)).get(),
                         nullptr);
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
  for (int64_t n : simt::kSizes) {
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<float> x(simt::data(kind, n), n % 4);
      test_signs(x, n);
      for (int64_t columns : {1, 3, 32, 77, 500, 8192, 8193, 20000, 100003})
        if (columns <= n && (n < 2000 || (kind == simt::Kind::wild && (n < 10000 || columns > 8192))))
          test_one_bit(x, n / columns, columns);
    }
    for (int voters : {1, 2, 3, 4, 7, 8, 15, 16, 33, 300})
      if (n < 2000 || (n < 70000 && voters < 5)) test_majority(n, voters);
  }
  test_one_bit(simt::Buffer<float>(0), 3, 0);
  test_one_bit(simt::Buffer<float>(0), 0, 3);
}

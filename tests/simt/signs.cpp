// signs_pack, signs_majority and signs_decode_add.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/signs.cu"

using namespace gradzip;

static void test_signs(const simt::Buffer<float>& x, int64_t n) {
  const int64_t nbytes = (n + 7) / 8;
  const simt::Buffer<uint8_t> expected(nbytes);
  const simt::Buffer<float> expected_sum(simt::data(simt::Kind::normal, n));
  cpu::signs_pack(x, n, 5, expected, 1);
  cpu::signs_decode_add(expected, n, 0.3f, expected_sum, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> packed(nbytes, n % 4);
    const simt::Buffer<float> sum(simt::data(simt::Kind::normal, n), n % 3);
    cuda::signs_pack(x, n, 5, packed, nullptr);
    simt::expect_equal(packed.get(), expected.get(), nbytes, "signs_pack");
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
    // Bits past n are ignored. Few distinct votes, so that there are ties.
    ballots.emplace_back(nbytes, v % 3);
    for (int64_t b = 0; b < nbytes; ++b) ballots.back()[b] = uint8_t(v % 2 ? ~ballots[size_t(v) - 1][b] : random());
    if (v % 2 && nbytes) ballots.back()[0] = uint8_t(random());
    votes.push_back(ballots.back());
  }
  const simt::Buffer<uint8_t> expected(nbytes);
  cpu::signs_majority(votes.data(), voters, n, 11, expected, 1);
  simt::in_any_order(n, [&] {
    const simt::Buffer<uint8_t> packed(nbytes, voters % 4);
    simt::call(cuda::signs_majority, votes.data(), voters, n, 11, packed);
    simt::expect_equal(packed.get(), expected.get(), nbytes, "signs_majority of " + std::to_string(voters));
  });
}

int main() {
  for (int64_t n : simt::kSizes) {
    for (simt::Kind kind : simt::kKinds) {
      const simt::Buffer<float> x(simt::data(kind, n), n % 4);
      test_signs(x, n);
    }
    for (int voters : {1, 2, 3, 4, 7, 8, 15, 16, 33, 300})
      if (n < 2000 || (n < 70000 && voters < 5)) test_majority(n, voters);
  }
}

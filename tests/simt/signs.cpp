// signs_pack, signs_majority and signs_decode_add.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/signs.cu"

using namespace gradzip;

using Bits = simt::Buffer<uint8_t>;
using Floats = simt::Buffer<float>;

static int64_t nbytes_of(int64_t n) { return (n + 7) / 8; }

template <class T>
static void test_pack(const std::vector<simt::Buffer<T>>& tensors) {
  const int64_t count = int64_t(tensors.size());
  int64_t all = 0;
  for (const auto& x : tensors) all += x.size();
  const int64_t* const replays = simt::replays_for(all);
  // Of each tensor, and with the statistics of all.
  const auto pack_with = [&](auto kernel, const std::vector<Bits>* expected) {
    std::vector<Bits> packed;
    std::vector<SignsSource> table;
    for (const auto& x : tensors) {
      packed.emplace_back(nbytes_of(x.size()), expected ? int64_t(packed.size()) % 5 : 0);
      table.push_back({x, dtype_of(x), x.size(), 5 + uint64_t(packed.size()), packed.back()});
    }
    kernel(table.data());
    for (size_t i = 0; expected && i < packed.size(); ++i)
      simt::expect_equal(packed[i].get(), (*expected)[i].get(), packed[i].size(), "signs_pack");
    return packed;
  };
  const Floats expected_statistics(2 * count);
  const std::vector<Bits> expected = pack_with(
      [&](const SignsSource* table) { cpu::signs_pack(table, count, replays, expected_statistics, 1); }, nullptr);
  simt::in_any_order(all, [&] {
    const Floats statistics(2 * count);
    pack_with([&](const SignsSource* table) { simt::call(cuda::signs_pack, table, count, replays, statistics); },
              &expected);
    simt::expect_equal(statistics.get(), expected_statistics.get(), 2 * count, "signs_pack: statistics");
    pack_with([&](const SignsSource* table) { simt::call(cuda::signs_pack, table, count, replays, nullptr); },
              &expected);
  });
}

static void test_decode_add(const std::vector<int64_t>& sizes, int64_t terms_of_first) {
  std::vector<Bits> packed;
  std::vector<SignsTerm> terms;
  std::mt19937 random(unsigned(sizes.size()));
  const auto sum_with = [&](auto kernel, const std::vector<Floats>* expected) {
    std::vector<Floats> outs;
    std::vector<WeightedSum> table;
    for (int64_t n : sizes) {
      const int64_t i = int64_t(outs.size());
      outs.emplace_back(simt::data(simt::Kind::normal, n), expected ? i % 3 : 0);
      // Some of those that are not added to are 16-bit floats, in memory for float32.
      table.push_back({outs.back(), n, (terms_of_first + i) % 7, i % 2, i % 2 ? 0 : (terms_of_first + i / 2) % 3});
    }
    kernel(table.data(), terms.data());
    for (size_t i = 0; expected && i < outs.size(); ++i)
      simt::expect_equal(outs[i].get(), (*expected)[i].get(), outs[i].size(), "signs_decode_add");
    return outs;
  };
  int64_t all = 0;
  for (size_t i = 0; i < sizes.size(); ++i)
    for (int64_t t = 0; t < (terms_of_first + int64_t(i)) % 7; ++t) {
      packed.emplace_back(nbytes_of(sizes[i]), t % 5);
      for (int64_t b = 0; b < nbytes_of(sizes[i]); ++b) packed.back()[b] = uint8_t(random());
      static const float scale = 0.3f;
      terms.push_back({packed.back(), t % 2 ? &scale : nullptr, t % 3 == 2 ? -0.7 : 0.1 * double(t + 1)});
    }
  for (int64_t n : sizes) all += n;
  const int64_t count = int64_t(sizes.size());
  const std::vector<Floats> expected = sum_with(
      [&](const WeightedSum* table, const SignsTerm* of) { cpu::signs_decode_add(table, count, of, 1); }, nullptr);
  simt::in_any_order(all, [&] {
    sum_with(
        [&](const WeightedSum* table, const SignsTerm* of) { simt::call(cuda::signs_decode_add, table, count, of); },
        &expected);
  });
}

static void test_majority(const std::vector<int64_t>& sizes, int voters) {
  std::mt19937 random(unsigned(sizes[0]) + unsigned(voters));
  std::vector<Bits> ballots, expected;
  std::vector<const uint8_t*> votes;
  std::vector<SignsVote> table;
  int64_t all = 0;
  for (int64_t n : sizes) {
    for (int v = 0; v < voters; ++v) {
      // Bits past n are ignored. Few distinct votes, so that there are ties.
      const int64_t nbytes = nbytes_of(n);
      ballots.emplace_back(nbytes, v % 3);
      const size_t last = ballots.size() - 1;
      for (int64_t b = 0; b < nbytes; ++b) ballots[last][b] = uint8_t(v % 2 ? ~ballots[last - 1][b] : random());
      if (v % 2 && nbytes) ballots[last][0] = uint8_t(random());
      votes.push_back(ballots[last]);
    }
    expected.emplace_back(nbytes_of(n));
    table.push_back({n, 11 + uint64_t(n), expected.back()});
    all += n;
  }
  const int64_t count = int64_t(sizes.size());
  const int64_t* const replays = simt::replays_for(all);
  const simt::Buffer<int64_t> expected_against(count * voters);
  cpu::signs_majority(table.data(), count, votes.data(), voters, replays, expected_against, 1);
  simt::in_any_order(all, [&] {
    std::vector<Bits> packed;
    for (int64_t i = 0; i < count; ++i) {
      packed.emplace_back(nbytes_of(sizes[size_t(i)]), voters % 4);
      table[size_t(i)].packed = packed.back();
    }
    const simt::Buffer<int64_t> against(count * voters);
    const auto compare = [&] {
      for (size_t i = 0; i < packed.size(); ++i)
        simt::expect_equal(packed[i].get(), expected[i].get(), packed[i].size(),
                           "signs_majority of " + std::to_string(voters));
    };
    simt::call(cuda::signs_majority, table.data(), count, votes.data(), voters, replays, against);
    compare();
    simt::expect_equal(against.get(), expected_against.get(), against.size(), "signs_majority: against");
    simt::call(cuda::signs_majority, table.data(), count, votes.data(), voters, replays, nullptr);
    compare();
  });
}

template <class T>
static std::vector<simt::Buffer<T>> one(const std::vector<T>& x, int64_t skip) {
  std::vector<simt::Buffer<T>> buffers;
  buffers.emplace_back(x, skip);
  return buffers;
}

int main() {
  test_pack<float>({});
  std::vector<Floats> several;
  for (int64_t n : simt::kSizes) {
    for (simt::Kind kind : simt::kKinds) {
      const std::vector<float> x = simt::data(kind, n);
      test_pack(one(x, n % 4));
      test_pack(one(simt::as<BFloat16>(x), n % 4));
      test_pack(one(simt::as<Float16>(x), n % 3));
    }
    if (n < 70000) several.emplace_back(simt::data(simt::Kind::ties, n), n % 3);
    for (int64_t terms : {0, 1, 4}) test_decode_add({n}, terms);
    for (int voters : {1, 2, 3, 4, 7, 8, 15, 16, 33, 300})
      if (n < 2000 || (n < 70000 && voters < 5)) test_majority({n}, voters);
  }
  several.emplace_back(std::vector<float>(9, 3e38f));  // the sum overflows
  test_pack(several);
  test_majority({33, 0, 8193, 1, 40000}, 3);
  test_decode_add({33, 0, 8193, 1, 40000}, 2);
  if (simt::kRaces) return 0;
  // More than one launch takes to the device.
  std::vector<Floats> many;
  for (int64_t i = 0; i < 130; ++i) many.emplace_back(simt::data(simt::Kind::wild, i % 40));
  test_pack(many);
  test_decode_add(std::vector<int64_t>(100, 9), 6);
  test_majority(std::vector<int64_t>(200, 5), 3);
}

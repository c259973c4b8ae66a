// select_sampled, for tables of vectors.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/select.cu"
#include "cuda/select_sampled.cu"

using namespace gradzip;

using Floats = simt::Buffer<float>;

struct Results {
  simt::Buffer<Selection> selections;
  simt::Buffer<int64_t> counts;
  std::vector<SampledSource> table;

  Results(const std::vector<Floats>& vectors, const std::vector<int64_t>& ks, const std::vector<uint64_t>& keys)
      : selections(int64_t(ks.size())), counts(int64_t(ks.size())) {
    for (size_t i = 0; i < ks.size(); ++i)
      table.push_back({vectors[i], vectors[i].size(), ks[i], keys[i], selections + i, counts + i});
  }
};

static uint64_t some_key(int64_t n, int64_t k) { return uint64_t(n) * 0x9E3779B97F4A7C15u + uint64_t(k); }

static void test(const std::vector<Floats>& vectors, const std::vector<int64_t>& ks,
                 const std::vector<uint64_t>& keys) {
  const auto count = int64_t(ks.size());
  const Results expected(vectors, ks, keys);
  int64_t all = 0;
  for (int64_t i = 0; i < count; ++i) {
    cpu::select_sampled(&expected.table[size_t(i)], 1, 1);
    expected.selections[i].unused = 0;
    all += vectors[size_t(i)].size();
  }
  const std::string which = count == 1 ? "select_sampled, k = " + std::to_string(ks[0]) : "select_sampled of vectors";
  simt::in_any_order(all > 50000 ? all : 20000, [&] {
    const Results got(vectors, ks, keys);
    simt::call(cuda::select_sampled, got.table.data(), count);
    simt::expect_equal(got.counts.get(), expected.counts.get(), count, which + ": count");
    simt::expect_equal(got.selections.get(), expected.selections.get(), count, which);
  });
}

int main() {
  for (int64_t n : {1, 33, 1000, 16384, 40000, 100003, 300001})
    for (simt::Kind kind : simt::kKinds) {
      std::vector<Floats> one;
      one.emplace_back(simt::data(kind, n), n % 4);
      for (int64_t k : {int64_t(1), n / 100, n / 7, n / 2, n})
        if (k >= 1) test(one, {k}, {some_key(n, k)});
    }
  // More vectors than a launch takes, with samples in no round, in one, two and three, of every kind.
  constexpr int64_t kLengths[] = {300, 16384, 40000, 70001, 5, 17011};
  std::vector<Floats> many;
  std::vector<int64_t> ks;
  std::vector<uint64_t> keys;
  for (int64_t i = 0; i < cuda::kMostVectors + 5; ++i) {
    const int64_t n = i == 7 ? 300001 : kLengths[i % 6] + i;
    many.emplace_back(simt::data(simt::kKinds[size_t(i) % std::size(simt::kKinds)], n), i % 4);
    ks.push_back(1 + n / (2 + 13 * (i % 9)));
    keys.push_back(some_key(n, ks.back()));
  }
  // With these keys, the first samples miss, and the second ones do not.
  for (uint64_t key : {58, 61}) {
    many.emplace_back(simt::data(simt::Kind::normal, 66000));
    ks.push_back(6600);
    keys.push_back(key);
  }
  test(many, ks, keys);
  test({}, {}, {});
}

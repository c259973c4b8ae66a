// topk_abs, for tables of vectors.
#include <algorithm>

#include "check.h"

#include "cpu/ops.h"
#include "cuda/topk_abs.cu"

using namespace gradzip;

using Floats = simt::Buffer<float>;
using Indices = simt::Buffer<int32_t>;

struct Results {
  std::vector<Indices> indices;
  std::vector<Floats> values;
  std::vector<TopkSource> table;

  Results(const std::vector<Floats>& vectors, const std::vector<int64_t>& ks,
          const std::vector<const Selection*>& selections) {
    for (size_t i = 0; i < ks.size(); ++i) {
      indices.emplace_back(ks[i]);
      values.emplace_back(ks[i]);
      table.push_back({vectors[i], vectors[i].size(), ks[i], selections[i], indices[i], values[i]});
    }
  }
};

// selections: null for the largest.
static void test(const std::vector<Floats>& vectors, const std::vector<int64_t>& ks,
                 const std::vector<const Selection*>& selections) {
  const auto count = int64_t(ks.size());
  const Results expected(vectors, ks, selections);
  cpu::topk_abs(expected.table.data(), count, 1);
  int64_t all = 0;
  for (const Floats& x : vectors) all += x.size();
  simt::in_any_order(all, [&] {
    const Results got(vectors, ks, selections);
    simt::call(cuda::topk_abs, got.table.data(), count);
    for (size_t i = 0; i < ks.size(); ++i) {
      const std::string which = "topk_abs, k = " + std::to_string(ks[i]);
      simt::expect_equal(got.indices[i].get(), expected.indices[i].get(), ks[i], which + ": indices");
      simt::expect_equal(got.values[i].get(), expected.values[i].get(), ks[i], which + ": values");
    }
  });
}

int main() {
  for (int64_t n : simt::kSizes)
    for (simt::Kind kind : simt::kKinds)
      for (int64_t k : {int64_t(1), n / 7, n - 1, n}) {
        if (k < 1 || k > n || (n > 50000 && k != n / 7)) continue;
        std::vector<Floats> one;
        one.emplace_back(simt::data(kind, n), n % 4);
        test(one, {k}, {nullptr});
      }
  // More vectors than a launch takes, of every kind.
  std::vector<Floats> many;
  std::vector<int64_t> ks;
  simt::Buffer<Selection> selections(cuda::kMostVectors + 5);
  for (int64_t i = 0; i < cuda::kMostVectors + 5; ++i) {
    const int64_t n = i % 6 == 5 ? 17000 + i : 1 + 97 * i;
    many.emplace_back(simt::data(simt::kKinds[size_t(i) % std::size(simt::kKinds)], n), i % 4);
    ks.push_back(1 + n / (1 + i % 9) - (n / (1 + i % 9) == n));
  }
  const std::vector<const Selection*> none(ks.size(), nullptr);
  test(many, ks, none);
  // Some of their selections are given: those of k elements, or all elements that reach a threshold, maybe none.
  std::vector<const Selection*> given = none;
  for (size_t i = 0; i < ks.size(); ++i) {
    const int64_t n = many[i].size();
    if (i % 3 == 0) continue;
    if (i % 3 == 1) {
      cpu::select(many[i], n, ks[i], selections + i, 1);
    } else {
      const uint32_t threshold = i % 4 == 0 ? 0x7fffffffu : i % 4 == 1 ? 0u : float_bits(1.5f);
      selections[i] = {bits_float(threshold), 0, n};
      ks[i] = std::count_if(many[i].get(), many[i] + n,
                            [=](float x) { return (float_bits(x) & 0x7fffffffu) >= threshold; });
    }
    given[i] = selections + i;
  }
  test(many, ks, given);
  test({}, {}, {});
}

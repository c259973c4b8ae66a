// one_bit_packed and one_bit_decode_add.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/one_bit.cu"
#include "cuda/signs.cu"

using namespace gradzip;

using Bits = simt::Buffer<uint8_t>;
using Floats = simt::Buffer<float>;

struct Shape {
  int64_t rows, columns;
};

// Each sum has two terms: the packed tensor, and the same signs with other rows.
static void test(const std::vector<Floats>& tensors, const std::vector<Shape>& shapes) {
  const int64_t count = int64_t(shapes.size());
  std::vector<Bits> expected;
  std::vector<Floats> expected_means, expected_sums, other_means;
  int64_t all = 0;
  const auto sources = [&](std::vector<Bits>& packed, std::vector<Floats>& means, int64_t skip) {
    std::vector<OneBitSource> table;
    for (const auto [rows, columns] : shapes) {
      const size_t i = table.size();
      packed.emplace_back((rows * columns + 7) / 8, skip * int64_t(i % 4));
      means.emplace_back(2 * rows);
      table.push_back({tensors[i], rows, columns, 5 + i, packed.back(), means.back()});
    }
    return table;
  };
  const auto terms_of = [&](const std::vector<Bits>& packed, const std::vector<Floats>& means) {
    std::vector<OneBitTerm> terms;
    for (size_t i = 0; i < shapes.size(); ++i) {
      terms.push_back({packed[i], means[i], shapes[i].columns, 0.3});
      const bool even = shapes[i].columns % 2 == 0;
      terms.push_back({packed[i], other_means[i], even ? shapes[i].columns / 2 : shapes[i].columns, -0.7});
    }
    return terms;
  };
  const auto sums_of = [&](std::vector<Floats>& outs, int64_t skip) {
    std::vector<WeightedSum> table;
    for (const auto [rows, columns] : shapes) {
      const int64_t n = rows * columns, i = int64_t(table.size());
      outs.emplace_back(simt::data(simt::Kind::normal, n), skip * (n % 3));
      // Some of those that are not added to are 16-bit floats, in memory for float32.
      table.push_back({outs.back(), n, 2, (i + 1) % 2, i % 2 ? i / 2 % 3 : 0});
    }
    return table;
  };
  for (const auto [rows, columns] : shapes) {
    other_means.emplace_back(simt::data(simt::Kind::normal, 4 * rows));
    all += rows * columns;
  }
  const int64_t* const replays = simt::replays_for(all);
  const Floats expected_most(count);
  cpu::one_bit_packed(sources(expected, expected_means, 0).data(), count, replays, expected_most, 1);
  int32_t refused = 0;
  cpu::one_bit_decode_add(sums_of(expected_sums, 0).data(), count, terms_of(expected, expected_means).data(), &refused,
                          1);
  simt::expect_equal(refused, 0, "one_bit_decode_add on the CPU: failed");
  simt::in_any_order(all, [&] {
    std::vector<Bits> packed;
    std::vector<Floats> means, sums;
    const auto table = sources(packed, means, 1);
    const Floats most(count);
    const simt::Buffer<int32_t> failed(std::vector<int32_t>{0});
    simt::call(cuda::one_bit_packed, table.data(), count, replays, most);
    simt::expect_equal(most.get(), expected_most.get(), count, "one_bit_packed: most");
    const auto totals = sums_of(sums, 1);
    simt::call(cuda::one_bit_decode_add, totals.data(), count, terms_of(packed, means).data(), failed);
    simt::expect_equal(*failed.get(), 0, "one_bit_decode_add: failed");
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto [rows, columns] = shapes[i];
      const std::string what = std::to_string(rows) + " rows of " + std::to_string(columns);
      simt::expect_equal(packed[i].get(), expected[i].get(), packed[i].size(), "one_bit_packed, " + what);
      simt::expect_equal(means[i].get(), expected_means[i].get(), 2 * rows, "one_bit_packed: means, " + what);
      simt::expect_equal(sums[i].get(), expected_sums[i].get(), rows * columns, "one_bit_decode_add, " + what);
      if (rows * columns == 0 || i >= 12) continue;
      means[i][2 * rows - 1] = i % 2 ? NAN : INFINITY;
      const OneBitTerm bad{packed[i], means[i], columns, 0.3};
      const WeightedSum to{sums[i], rows * columns, 1, 1, 0};
      const simt::Buffer<int32_t> reported(std::vector<int32_t>{0});
      simt::call(cuda::one_bit_decode_add, &to, 1, &bad, reported);
      simt::expect_equal(*reported.get(), 1, "one_bit_decode_add of a mean there is not: failed");
      for (int64_t j = (rows - 1) * columns; j < rows * columns; ++j)
        simt::expect_equal(std::isnan(sums[i][j]), true, "one_bit_decode_add of a mean there is not");
    }
    std::vector<Floats> again;
    simt::call(cuda::one_bit_packed, sources(packed, again, 1).data(), count, replays, nullptr);
  });
}

int main() {
  test({}, {});
  std::vector<Floats> several;
  std::vector<Shape> shapes;
  const auto add = [&](simt::Kind kind, int64_t n, int64_t columns) {
    several.emplace_back(simt::data(kind, n), n % 4);
    shapes.push_back({columns ? n / columns : 3, columns});
  };
  for (int64_t n : simt::kSizes)
    for (simt::Kind kind : simt::kKinds)
      for (int64_t columns : {1, 3, 32, 77, 500, 8192, 8193, 20000, 100003})
        if (columns <= n && (n < 2000 || (kind == simt::Kind::wild && (n < 10000 || columns > 8192)))) {
          std::vector<Floats> one;
          one.emplace_back(simt::data(kind, n), n % 4);
          test(one, {{n / columns, columns}});
        }
  add(simt::Kind::ties, 0, 0);
  add(simt::Kind::normal, 33, 11);
  add(simt::Kind::ties, 16386, 8193);
  add(simt::Kind::wild, 0, 3);
  add(simt::Kind::wild, 9000, 3);
  add(simt::Kind::ties, 40000, 20000);
  add(simt::Kind::sparse, 1, 1);
  test(several, shapes);
  test({}, {});
  if (simt::kRaces) return 0;
  for (int i = 0; i < 60; ++i) add(simt::Kind::ties, 9, 3);  // more than one launch takes to the device
  test(several, shapes);
}

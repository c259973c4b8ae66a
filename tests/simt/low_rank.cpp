// low_rank_project, low_rank_expand and low_rank_apply_average.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/low_rank.cu"

using namespace gradzip;

using Floats = simt::Buffer<float>;

// Sums in another order than the CPU's differ by no more than rounding.
static void expect_close(const Floats& got, const Floats& x, int64_t rows, int64_t columns, const Floats& q,
                         int64_t rank, bool transpose) {
  const int64_t outputs = transpose ? columns : rows, length = transpose ? rows : columns;
  for (int64_t i = 0; i < outputs; ++i)
    for (int64_t k = 0; k < rank; ++k) {
      double sum = 0.0, size = 0.0;
      for (int64_t j = 0; j < length; ++j) {
        const double term = double(x[transpose ? j * columns + i : i * columns + j]) * double(q[j * rank + k]);
        sum += term, size += std::fabs(term);
      }
      // About length / 64 + 6 successive roundings, which are random, so the square root is generous.
      const double bound = 0x1p-24 * size * (2.0 + std::sqrt(double(length))), error = double(got[i * rank + k]) - sum;
      if (std::fabs(error) <= bound) continue;
      std::fprintf(stderr, "low_rank_project(%d): [%lld, %lld] of %lld x %lld, rank %lld: error %g, bound %g\n",
                   transpose, (long long)i, (long long)k, (long long)rows, (long long)columns, (long long)rank, error,
                   bound);
      std::exit(1);
    }
}

// A table of one matrix.
template <class T>
static Projection projection(const T* m, float* e, int64_t rows, int64_t columns, const float* factor, int64_t rank,
                             bool transpose, float* out) {
  return {m, dtype_of(m), e, rows, columns, factor, rank, transpose, out};
}

// 16-bit floats are read as the float32 numbers, and products are written to them rounded.
template <class T>
static void test_half(int64_t rows, int64_t columns, int64_t rank, int64_t skip) {
  const auto values = simt::data(simt::Kind::normal, rows * columns);
  const simt::Buffer<T> m(simt::as<T>(values), skip);
  const Floats p(simt::data(simt::Kind::normal, rows * rank)), q(simt::data(simt::Kind::ties, columns * rank), 1);
  std::vector<float> wide;
  for (const T value : simt::as<T>(values)) wide.push_back(to_float(value));
  const Floats x(wide, skip), product(rows * columns), less(rows * columns);
  for (bool transpose : {false, true}) {
    const int64_t outputs = transpose ? columns : rows;
    const Floats& factor = transpose ? p : q;
    const auto expect_same = [&](auto project) {
      const Floats expected(outputs * rank), out(outputs * rank);
      project(projection(x.get(), nullptr, rows, columns, factor, rank, transpose, expected));
      project(projection(m.get(), nullptr, rows, columns, factor, rank, transpose, out));
      simt::expect_equal(out.get(), expected.get(), out.size(), "low_rank_project of 16-bit floats");
    };
    expect_same([](const Projection& table) { cpu::low_rank_project(&table, 1, 1); });
    simt::in_any_order(rows * columns, [&] {
      expect_same([](const Projection& table) { simt::call(cuda::low_rank_project, &table, 1); });
    });
  }
  cpu::low_rank_expand(p, q, rows, columns, rank, nullptr, product, 1);
  cpu::low_rank_expand(p, q, rows, columns, rank, x, less, 1);
  const auto rounded = simt::as<T>(std::vector<float>(product.get(), product.get() + product.size()));
  for (bool has_e : {true, false}) {
    const auto expect_rounded = [&](auto apply) {
      const simt::Buffer<T> out(rows * columns, skip);
      const Floats e(rows * columns);
      const AverageUpdate table{out, dtype_of(out), has_e ? x.get() : nullptr, has_e ? e.get() : nullptr,
                                p,   q,             p,                         q,
                                rows, columns,      rank,                      nullptr};
      apply(&table);
      simt::expect_equal(out.get(), rounded.data(), out.size(), "low_rank_apply_average to 16-bit floats");
      if (has_e) simt::expect_equal(e.get(), less.get(), e.size(), "low_rank_apply_average to 16-bit floats: e");
    };
    expect_rounded([](const AverageUpdate* table) { cpu::low_rank_apply_average(table, 1, 1); });
    simt::in_any_order(rows * columns, [&] {
      expect_rounded([](const AverageUpdate* table) { cuda::low_rank_apply_average(table, 1, nullptr); });
    });
  }
}

// A table of one update of m in place.
static AverageUpdate update(float* m, float* e, const float* sent_p, const float* sent_q, const float* p,
                            const float* q, int64_t rows, int64_t columns, int64_t rank, const float* number) {
  return {m, 0, m, e, sent_p, sent_q, p, q, rows, columns, rank, number};
}

// A number that is not finite leaves e as it is; without e, nobody reads it. m gets its product anyway.
static void test_number(int64_t rows, int64_t columns, int64_t rank, int64_t skip) {
  const auto values = simt::data(simt::Kind::normal, rows * columns);
  const auto residual = simt::data(simt::Kind::sparse, rows * columns);
  const Floats p(simt::data(simt::Kind::normal, rows * rank)), q(simt::data(simt::Kind::ties, columns * rank), 1);
  const Floats sent(simt::data(simt::Kind::sparse, rows * rank)), product(rows * columns);
  const Floats without(values), error(residual);
  cpu::low_rank_expand(p, q, rows, columns, rank, nullptr, product, 1);
  const auto plain = update(without, error, sent, q, p, q, rows, columns, rank, nullptr);
  cpu::low_rank_apply_average(&plain, 1, 1);
  for (float value : {0.0f, -1.0f, 3e38f, INFINITY, -INFINITY, NAN, -NAN})
    for (bool has_e : {true, false})
      for (bool on_cpu : {true, false}) {
        const Floats x(values, skip), e(residual, skip), number(std::vector<float>{value});
        const auto table = update(x, has_e ? e.get() : nullptr, sent, q, p, q, rows, columns, rank, number);
        on_cpu ? cpu::low_rank_apply_average(&table, 1, 1) : cuda::low_rank_apply_average(&table, 1, nullptr);
        const float* expected = has_e && std::isfinite(value) ? error.get() : residual.data();
        simt::expect_equal(e.get(), expected, e.size(), "low_rank_apply_average with a number: e");
        simt::expect_equal(x.get(), product.get(), x.size(), "low_rank_apply_average with a number: m");
      }
}

static void test(int64_t rows, int64_t columns, int64_t rank, int64_t skip) {
  const auto values = simt::data(simt::Kind::normal, rows * columns);
  const auto residual = simt::data(simt::Kind::sparse, rows * columns);
  const Floats m(values, skip);
  const Floats p(simt::data(simt::Kind::normal, rows * rank)), q(simt::data(simt::Kind::ties, columns * rank), 1);
  for (bool transpose : {false, true}) {
    const int64_t outputs = transpose ? columns : rows;
    const Floats &factor = transpose ? p : q, sum(residual), ignored(outputs * rank), first(outputs * rank);
    const auto on_cpu = projection(m.get(), sum, rows, columns, factor, rank, transpose, ignored);
    cpu::low_rank_project(&on_cpu, 1, 1);
    bool again = false;
    simt::in_any_order(rows * columns, [&] {
      const Floats e(residual, skip), out(outputs * rank);
      const auto table = projection(m.get(), e, rows, columns, factor, rank, transpose, out);
      simt::call(cuda::low_rank_project, &table, 1);
      simt::expect_equal(e.get(), sum.get(), rows * columns, "low_rank_project: e");
      if (!again) expect_close(out, sum, rows, columns, factor, rank, transpose);
      if (!again) std::copy_n(out.get(), out.size(), first.get());
      again = true;
      simt::expect_equal(out.get(), first.get(), out.size(), "low_rank_project in another order");
    });
    const Floats out(outputs * rank);
    const auto table = projection(sum.get(), nullptr, rows, columns, factor, rank, transpose, out);
    simt::call(cuda::low_rank_project, &table, 1);
    simt::expect_equal(out.get(), first.get(), out.size(), "low_rank_project without e");
  }

  const Floats sent_p(simt::data(simt::Kind::sparse, rows * rank)), product(rows * columns), less(residual);
  cpu::low_rank_expand(p, q, rows, columns, rank, nullptr, product, 1);
  cpu::low_rank_expand(p, q, rows, columns, rank, less, less, 1);
  simt::in_any_order(rows * columns, [&] {
    const Floats e(residual, skip), out(rows * columns);
    cuda::low_rank_expand(p, q, rows, columns, rank, nullptr, out, nullptr);
    simt::expect_equal(out.get(), product.get(), out.size(), "low_rank_expand");
    cuda::low_rank_expand(p, q, rows, columns, rank, e, e, nullptr);
    simt::expect_equal(e.get(), less.get(), e.size(), "low_rank_expand from e");
  });

  for (const float* sent : {p.get(), sent_p.get()}) {
    const Floats gradient(values), kept(rows * columns);
    const auto on_cpu = update(gradient, kept, sent, q, p, q, rows, columns, rank, nullptr);
    cpu::low_rank_apply_average(&on_cpu, 1, 1);
    simt::in_any_order(rows * columns, [&] {
      const Floats x(values, skip), e(rows * columns, skip);
      const auto table = update(x, e, sent, q, p, q, rows, columns, rank, nullptr);
      cuda::low_rank_apply_average(&table, 1, nullptr);
      simt::expect_equal(e.get(), kept.get(), e.size(), "low_rank_apply_average: e");
      simt::expect_equal(x.get(), gradient.get(), x.size(), "low_rank_apply_average: m");
    });
  }
  test_number(rows, columns, rank, skip);
  test_half<BFloat16>(rows, columns, rank, skip);
  test_half<Float16>(rows, columns, rank, skip);
}

// Several matrices, of several sizes and both directions, in one table.
static void test_table() {
  const int64_t shapes[][2] = {{64, 147}, {0, 5}, {7, 1033}, {300, 40}, {31, 200}};
  std::vector<Floats> buffers;
  buffers.reserve(64);
  const auto keep = [&](std::vector<float> values, int64_t skip) -> float* { return buffers.emplace_back(std::move(values), skip).get(); };
  std::vector<Projection> single, table;
  std::vector<AverageUpdate> updates, one_by_one;
  int64_t i = 0;
  for (const auto& [rows, columns] : shapes) {
    const bool transpose = i % 2;
    const int64_t rank = 3 + i, outputs = transpose ? columns : rows;
    const auto m = simt::data(simt::Kind::normal, rows * columns), e = simt::data(simt::Kind::sparse, rows * columns);
    const auto factor = simt::data(simt::Kind::normal, (transpose ? rows : columns) * rank);
    const std::vector<float> none(size_t(outputs * rank));
    for (auto* to : {&single, &table})
      to->push_back(projection(keep(m, i), keep(e, i), rows, columns, keep(factor, 0), rank, transpose, keep(none, 0)));
    const auto p = simt::data(simt::Kind::normal, rows * rank), q = simt::data(simt::Kind::ties, columns * rank);
    for (auto* to : {&one_by_one, &updates}) {
      float *const at_p = keep(p, 0), *const at_q = keep(q, 0);
      to->push_back(update(keep(m, i), keep(e, i), at_p, at_q, at_p, at_q, rows, columns, rank, nullptr));
    }
    ++i;
  }
  simt::call(cuda::low_rank_project, table.data(), int64_t(table.size()));
  cuda::low_rank_apply_average(updates.data(), int64_t(updates.size()), nullptr);
  for (size_t k = 0; k < table.size(); ++k) {
    simt::call(cuda::low_rank_project, &single[k], 1);
    cuda::low_rank_apply_average(&one_by_one[k], 1, nullptr);
    const auto& t = table[k];
    simt::expect_equal(t.out, single[k].out, (t.transpose ? t.columns : t.rows) * t.rank, "low_rank_project of a table");
    simt::expect_equal(t.e, single[k].e, t.rows * t.columns, "low_rank_project of a table: e");
    simt::expect_equal(updates[k].m, one_by_one[k].m, t.rows * t.columns, "low_rank_apply_average of a table: m");
    simt::expect_equal(updates[k].e, one_by_one[k].e, t.rows * t.columns, "low_rank_apply_average of a table: e");
  }
}

int main() {
  test_table();
  const int64_t shapes[][2] = {{0, 5}, {5, 0}, {1, 1}, {3, 4}, {64, 147}, {65, 64}, {31, 200}, {130, 12}, {7, 1033}};
  const simt::Sizes ranks = {1, 4, 5, 16, 33, 70};
  for (const auto& [rows, columns] : shapes)
    for (int64_t rank : ranks)
      if (!simt::kRaces || (rows == 130 && (rank == 5 || rank == 33))) test(rows, columns, rank, rank % 4);
  test(260, 1028, 4, 0);
  if (!simt::kRaces) test(515, 261, 32, 1);
}

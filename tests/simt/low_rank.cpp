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

static void test(int64_t rows, int64_t columns, int64_t rank, int64_t skip) {
  const auto values = simt::data(simt::Kind::normal, rows * columns);
  const auto residual = simt::data(simt::Kind::sparse, rows * columns);
  const Floats m(values, skip);
  const Floats p(simt::data(simt::Kind::normal, rows * rank)), q(simt::data(simt::Kind::ties, columns * rank), 1);
  for (bool transpose : {false, true}) {
    const int64_t outputs = transpose ? columns : rows;
    const Floats &factor = transpose ? p : q, sum(residual), ignored(outputs * rank), first(outputs * rank);
    cpu::low_rank_project(m, sum, rows, columns, factor, rank, transpose, ignored, 1);
    bool again = false;
    simt::in_any_order(rows * columns, [&] {
      const Floats e(residual, skip), out(outputs * rank);
      simt::call(cuda::low_rank_project, m, e, rows, columns, factor, rank, transpose, out);
      simt::expect_equal(e.get(), sum.get(), rows * columns, "low_rank_project: e");
      if (!again) expect_close(out, sum, rows, columns, factor, rank, transpose);
      if (!again) std::copy_n(out.get(), out.size(), first.get());
      again = true;
      simt::expect_equal(out.get(), first.get(), out.size(), "low_rank_project in another order");
    });
    const Floats out(outputs * rank);
    simt::call(cuda::low_rank_project, sum, nullptr, rows, columns, factor, rank, transpose, out);
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
    cpu::low_rank_apply_average(gradient, kept, sent, q, p, q, rows, columns, rank, 1);
    simt::in_any_order(rows * columns, [&] {
      const Floats x(values, skip), e(rows * columns, skip);
      cuda::low_rank_apply_average(x, e, sent, q, p, q, rows, columns, rank, nullptr);
      simt::expect_equal(e.get(), kept.get(), e.size(), "low_rank_apply_average: e");
      simt::expect_equal(x.get(), gradient.get(), x.size(), "low_rank_apply_average: m");
    });
  }
}

int main() {
  const int64_t shapes[][2] = {{0, 5}, {5, 0}, {1, 1}, {3, 4}, {64, 147}, {65, 64}, {31, 200}, {130, 12}, {7, 1033}};
  for (const auto& [rows, columns] : shapes)
    for (int64_t rank : {1, 2, 3, 4, 5, 8, 11, 16, 32, 33, 64, 70}) test(rows, columns, rank, rank % 4);
  test(700, 300, 4, 0);
  test(260, 1028, 4, 0);
  test(515, 261, 32, 1);
}

// orthogonalize: many matrices in one call, of all sizes and kinds.
#include "check.h"

#include "cpu/ops.h"
#include "cuda/orthogonalize.cu"

using namespace gradzip;

enum class Columns { random, scaled, close, duplicate, zero, nonfinite, equal };

static std::vector<float> matrix_of(int64_t rows, int64_t columns, Columns kind) {
  auto x = simt::data(simt::Kind::normal, rows * columns);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = 0; c < columns; ++c) {
      float& v = x[size_t(i * columns + c)];
      const float first = x[size_t(i * columns)];
      if (kind == Columns::scaled) v *= std::ldexp(1.0f, int(c * 7 % 60) - 30);
      if (kind == Columns::close && c) v = first + v * 3e-5f;  // needs a second round
      if (kind == Columns::duplicate && c % 3 == 2) v = 2.0f * first;
      if (kind == Columns::zero && c % 2 == 0) v = 0.0f;
      if (kind == Columns::nonfinite && i == rows / 2 && c == columns / 2)
        v = c % 2 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
      if (kind == Columns::equal) v = 1.0f;
    }
  return x;
}

static void fail(const char* what, int64_t rows, int64_t columns, Columns kind, double error) {
  std::fprintf(stderr, "orthogonalize %lld x %lld, kind %d: %s: %g\n", (long long)rows, (long long)columns, int(kind),
               what, error);
  std::exit(1);
}

// Checks that columns are orthonormal, except those for which no dimension is left.
static void expect_orthonormal(const float* q, int64_t rows, int64_t columns, Columns kind) {
  double worst = 0.0, rank = 0.0;
  for (int64_t a = 0; a < columns; ++a)
    for (int64_t b = 0; b <= a; ++b) {
      double dot = 0.0;
      for (int64_t i = 0; i < rows; ++i) dot += double(q[i * columns + a]) * double(q[i * columns + b]);
      const bool spare = a == b && columns > rows && dot == 0.0;
      if (a == b) rank += dot;
      const double error = std::fabs(dot - (a == b && !spare));
      worst += (a == b ? 1 : 2) * error * error;
    }
  if (!(std::sqrt(worst) <= 1e-6 * std::sqrt(double(columns))))
    fail("|QtQ - I|", rows, columns, kind, std::sqrt(worst));
  if (std::fabs(rank - double(std::min(rows, columns))) > 1e-4) fail("rank", rows, columns, kind, rank);
}

int main() {
  struct Case {
    int64_t rows, columns;
    Columns kind;
    bool exact;  // has the bits of the CPU
  };
  std::vector<Case> cases;
  for (int64_t columns : {1, 2, 3, 4, 5, 22, 23, 45, 64})
    for (int64_t rows : {columns, columns + 1, int64_t(100), int64_t(1024), int64_t(2100)}) {
      if (columns > 22 && rows > 1000 && rows != 2100) continue;
      if (simt::kRaces && !(rows == 100 && (columns == 4 || columns == 23))) continue;
      cases.push_back({rows, columns, Columns::random, rows > columns + 1});
      if (columns > 5 && rows != 100 && !(columns == 22 && rows == 2100)) continue;
      for (Columns kind : {Columns::scaled, Columns::close, Columns::duplicate, Columns::zero, Columns::nonfinite})
        cases.push_back({rows, columns, kind, kind == Columns::scaled && rows > columns + 1});
    }
  for (int64_t rows : {0, 1, 3, 7}) cases.push_back({rows, 9, Columns::random, false});
  cases.push_back({3, 0, Columns::random, true});
  if (!simt::kRaces) cases.push_back({100, 70, Columns::random, false});
  cases.push_back({5000, 4, Columns::random, true});
  cases.push_back({1500, 4, Columns::equal, false});
  std::vector<simt::Buffer<float>> inputs, expected;
  std::vector<Matrix> table;
  for (const Case& c : cases) {
    inputs.emplace_back(matrix_of(c.rows, c.columns, c.kind));
    expected.emplace_back(matrix_of(c.rows, c.columns, c.kind));
    table.push_back({expected.back().get(), c.rows, c.columns});
  }
  cpu::orthogonalize(table.data(), int64_t(table.size()), 2);

  std::vector<simt::Buffer<float>> first;
  for (unsigned seed : {0, 1}) {
    if (seed && simt::kRaces) break;
    simt::options.seed = seed;
    std::vector<simt::Buffer<float>> got;
    for (size_t i = 0; i < cases.size(); ++i) {
      got.emplace_back(matrix_of(cases[i].rows, cases[i].columns, cases[i].kind));
      table[i].data = got.back().get();
    }
    const int64_t count = int64_t(table.size());
    simt::call(cuda::orthogonalize, table.data(), count);
    double away = 0.0;
    for (size_t i = 0; i < cases.size(); ++i) {
      const auto [rows, columns, kind, exact] = cases[i];
      expect_orthonormal(got[i], rows, columns, kind);
      if (exact)
        simt::expect_equal(got[i].get(), expected[i].get(), rows * columns,
                           "orthogonalize " + std::to_string(rows) + " x " + std::to_string(columns));
      if (seed) simt::expect_equal(got[i].get(), first[i].get(), rows * columns, "orthogonalize in another order");
      // Columns that differ by the rounding of a float have no well-defined direction.
      for (int64_t j = 0; kind != Columns::close && rows > columns + 1 && j < rows * columns; ++j)
        away = std::max(away, std::fabs(double(got[i][j]) - double(expected[i][j])));
      if (!(away <= 1e-5)) fail("away from the CPU", rows, columns, kind, away);
    }
    if (!seed) first = std::move(got);
  }
}

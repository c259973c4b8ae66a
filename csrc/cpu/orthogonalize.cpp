// Orthonormal columns for many tall matrices at once. Cholesky QR in double: with G = A^T A = R^T R, the columns of
// A R^-1 are orthonormal and have the span of A's. Products of floats are exact in double, so one round (two reads, one
// write) is as accurate as Householder's unless columns are badly conditioned; those get a second round (Fukaya et al.,
// CholeskyQR2, ScalA'14). Dependent columns, which Cholesky cannot tell from noise, are replaced by Gram-Schmidt. Work
// is cut by rows into blocks, and the sums of blocks are added in order.
#include <cmath>
#include <vector>

#include "cpu/lanes.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace gradzip::cpu {
namespace {

constexpr int64_t kPanel = 64;  // rows, as doubles, that stay in the L1 cache

int64_t padded(int64_t columns) { return ceil_div(columns, kDoubles) * kDoubles; }

double* scratch(int64_t columns) {
  static thread_local std::vector<double> buffer;
  const size_t size = size_t(kPanel * padded(columns));
  if (buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

// --- 1, 2 or 4 columns: 8, 4 or 2 rows make a vector. With each row rotated by d, the
// products are those of columns d apart, so no work is wasted on padding.
template <int R>
GZ_INLINE Doubles rotated(const Doubles& v, int d) {
  typedef int64_t Lanes __attribute__((vector_size(64)));
  Lanes from;
#pragma GCC unroll 8
  for (int i = 0; i < kDoubles; ++i) from[i] = i / R * R + (i + d) % R;
  return __builtin_shuffle(v, from);
}

GZ_INLINE Doubles widen(const float* x) {
  typedef float Half __attribute__((vector_size(32)));
  Half v;
  std::memcpy(&v, x, sizeof v);
  return __builtin_convertvector(v, Doubles);
}

template <int R>
GZ_INLINE void gram_narrow(const float* x, int64_t rows, double* gram) {
  constexpr int kApart = R / 2 + 1;
  const int64_t width = padded(R), n = rows * R;
  Doubles acc[2][kApart] = {};
  for (int64_t i = 0; i < n; i += 2 * kDoubles) {
    float tail[2 * kDoubles] = {};
    if (n - i < 2 * kDoubles) std::memcpy(tail, x + i, size_t(n - i) * sizeof(float));
    const float* from = n - i < 2 * kDoubles ? tail : x + i;
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const Doubles v = widen(from + j * kDoubles);
#pragma GCC unroll 3
      for (int d = 0; d < kApart; ++d) acc[j][d] += v * rotated<R>(v, d);
    }
  }
#pragma GCC unroll 3
  for (int d = 0; d < kApart; ++d) {
    const Doubles both = acc[0][d] + acc[1][d];
    for (int a = 0; a < R; ++a) {
      double total = 0.0;
      for (int i = a; i < kDoubles; i += R) total += both[i];
      const int b = (a + d) % R;
      gram[(a < b ? a : b) * width + (a < b ? b : a)] = total;
    }
  }
}

template <int R>
GZ_INLINE void transform_narrow(float* x, int64_t rows, const double* w) {
  const int64_t width = padded(R), n = rows * R;
  Doubles factor[R];
  for (int d = 0; d < R; ++d)
    for (int i = 0; i < kDoubles; ++i) factor[d][i] = w[(i + d) % R * width + i % R];
  for (int64_t i = 0; i < n; i += kDoubles) {
    float stage[kDoubles] = {};
    const int64_t count = n - i < kDoubles ? n - i : kDoubles;
    if (count < kDoubles) std::memcpy(stage, x + i, size_t(count) * sizeof(float));
    const Doubles v = widen(count < kDoubles ? stage : x + i);
    Doubles y = v * factor[0];
#pragma GCC unroll 3
    for (int d = 1; d < R; ++d) y += rotated<R>(v, d) * factor[d];
    typedef float Half __attribute__((vector_size(32)));
    const Half narrow = __builtin_convertvector(y, Half);
    if (count == kDoubles) {
      std::memcpy(x + i, &narrow, sizeof narrow);
    } else {
      std::memcpy(stage, &narrow, sizeof narrow);
      std::memcpy(x + i, stage, size_t(count) * sizeof(float));
    }
  }
}

// --- any number of columns

// Converts rows of floats to rows of `width` doubles; spare ones are 0.
GZ_INLINE void widen(const float* x, int64_t rows, int64_t columns, int64_t width, double* s) {
  for (int64_t i = 0; i < rows; ++i, s += width) {
    for (int64_t c = 0; c < columns; ++c) s[c] = x[i * columns + c];
    for (int64_t c = columns; c < width; ++c) s[c] = 0.0;
  }
}

// gram[a..a+3, b..] += the rows' products, over V vectors of columns.
template <int V>
GZ_INLINE void gram_tile(const double* s, int64_t rows, int64_t width, int64_t a, int64_t b, double* gram) {
  Doubles acc[4][V];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[j][v] = load(gram + (a + j) * width + b + v * kDoubles);
  for (int64_t i = 0; i < rows; ++i, s += width) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Doubles right = load(s + b + v * kDoubles);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[j][v] += right * s[a + j];
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(gram + (a + j) * width + b + v * kDoubles, acc[j][v]);
}

// gram[a, b] = column a . column b, for a <= b at least; zero-initialised.
GZ_INLINE void gram_block_body(const float* x, int64_t rows, int64_t columns, double* s, double* gram) {
  if (columns == 1) return gram_narrow<1>(x, rows, gram);
  if (columns == 2) return gram_narrow<2>(x, rows, gram);
  if (columns == 4) return gram_narrow<4>(x, rows, gram);
  const int64_t width = padded(columns);
  for (int64_t i = 0; i < rows; i += kPanel) {
    const int64_t n = rows - i < kPanel ? rows - i : kPanel;
    widen(x + i * columns, n, columns, width, s);
    for (int64_t b = 0; b < width; b += 2 * kDoubles) {
      const bool wide = b + kDoubles < width;
      const int64_t last = b + (wide ? 2 : 1) * kDoubles;
      for (int64_t a = 0; a < last && a < columns; a += 4) {
        if (wide)
          gram_tile<2>(s, n, width, a, b, gram);
        else
          gram_tile<1>(s, n, width, a, b, gram);
      }
    }
  }
}
GZ_SIMD_DISPATCH(void, gram_block, (const float* x, int64_t rows, int64_t columns, double* s, double* gram),
                 (x, rows, columns, s, gram))

// Rows s[0..3] times columns b.. of w, whose entries are 0 from row `depth` on.
template <int V>
GZ_INLINE void product_tile(const double* s, int64_t width, const double* w, int64_t depth, double* out) {
  Doubles acc[4][V] = {};
  for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Doubles right = load(w + k * width + v * kDoubles);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) acc[i][v] += right * s[i * width + k];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(out + i * width + v * kDoubles, acc[i][v]);
}

// x = x w, w upper triangular. The last columns first: each needs only those up to itself.
GZ_INLINE void transform_block_body(float* x, int64_t rows, int64_t columns, const double* w, double* s) {
  if (columns == 1) return transform_narrow<1>(x, rows, w);
  if (columns == 2) return transform_narrow<2>(x, rows, w);
  if (columns == 4) return transform_narrow<4>(x, rows, w);
  const int64_t width = padded(columns);
  for (int64_t first = 0; first < rows; first += kPanel, x += kPanel * columns) {
    const int64_t n = rows - first < kPanel ? rows - first : kPanel;
    widen(x, n, columns, width, s);
    for (int64_t i = 0; i < n; i += 4) {  // the panel has room for whole fours
      double* row = s + i * width;
      int64_t b = width;
      if (width % (2 * kDoubles)) {
        b -= kDoubles;
        product_tile<1>(row, width, w + b, columns, row + b);
      }
      for (; b > 0; b -= 2 * kDoubles)
        product_tile<2>(row, width, w + b - 2 * kDoubles, b < columns ? b : columns, row + b - 2 * kDoubles);
    }
    for (int64_t i = 0; i < n; ++i)
      for (int64_t c = 0; c < columns; ++c) x[i * columns + c] = float(s[i * width + c]);
  }
}
GZ_SIMD_DISPATCH(void, transform_block, (float* x, int64_t rows, int64_t columns, const double* w, double* s),
                 (x, rows, columns, w, s))

// Replaces the Gram matrix of x by the w for which x w is orthonormal. On `dependent` there is none.
Verdict factor(double* g, int64_t columns) {
  const int64_t width = padded(columns);
  std::vector<double> length(columns);
  for (int64_t j = 0; j < columns; ++j) {
    length[j] = std::sqrt(g[j * width + j]);
    if (!(length[j] > 0.0 && std::isfinite(length[j]))) return Verdict::dependent;
  }
  // R, of columns scaled to length 1, row by row over the upper triangle.
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t k = j; k < columns; ++k) g[j * width + k] /= length[j] * length[k];
  for (int64_t j = 0; j < columns; ++j) {
    const double pivot = g[j * width + j];
    if (!(pivot > kLeastPivot)) return Verdict::dependent;
    const double root = std::sqrt(pivot);
    for (int64_t k = j; k < columns; ++k) g[j * width + k] /= root;
    for (int64_t i = j + 1; i < columns; ++i)
      for (int64_t k = i; k < columns; ++k) g[i * width + k] -= g[j * width + i] * g[j * width + k];
  }
  // R^-1 in its place, column by column: above the diagonal, -(R^-1's leading block) (R's column) / (its pivot).
  double growth = 0.0;
  std::vector<double> column(columns);
  for (int64_t k = 0; k < columns; ++k) {
    for (int64_t i = 0; i < k; ++i) column[i] = g[i * width + k];
    const double inverse = 1.0 / g[k * width + k];
    double total = inverse;
    for (int64_t i = 0; i < k; ++i) {
      double dot = 0.0;
      for (int64_t j = i; j < k; ++j) dot += g[i * width + j] * column[j];
      g[i * width + k] = -dot * inverse;
      total += std::fabs(g[i * width + k]);
    }
    g[k * width + k] = inverse;
    growth = total > growth ? total : growth;
  }
  for (int64_t i = 0; i < width; ++i)
    for (int64_t k = 0; k < width; ++k) {
      double& entry = g[i * width + k];
      entry = i <= k && k < columns ? entry / length[i] : 0.0;
    }
  return growth > kGrowthLimit ? Verdict::again : Verdict::done;
}

// --- Gram-Schmidt

GZ_INLINE double dot_body(const double* a, const double* b, int64_t n) {
  Doubles acc = {};
  for (int64_t i = 0; i < n; i += kDoubles) acc += load(a + i) * load(b + i);
  return sum(acc);
}
GZ_SIMD_DISPATCH(double, dot, (const double* a, const double* b, int64_t n), (a, b, n))

GZ_INLINE void add_scaled_body(double* a, const double* b, double factor, int64_t n) {
  for (int64_t i = 0; i < n; i += kDoubles) store(a + i, load(a + i) + load(b + i) * factor);
}
GZ_SIMD_DISPATCH(void, add_scaled, (double* a, const double* b, double factor, int64_t n), (a, b, factor, n))

class GramSchmidt {
 public:
  explicit GramSchmidt(const Matrix& matrix)
      : matrix_(matrix), stride_(ceil_div(matrix.rows, kDoubles) * kDoubles), q_(stride_ * matrix.columns, 0.0) {}

  void run() {
    std::vector<int64_t> dependent;
    for (int64_t c = 0; c < matrix_.columns; ++c)
      if (!take(c)) dependent.push_back(c);
    // Last, so that a replaced column does not displace an original one.
    std::vector<double> covered(matrix_.rows, 0.0);  // squared length of each axis within the current span
    for (const double* q : accepted_)
      for (int64_t i = 0; i < matrix_.rows; ++i) covered[i] += q[i] * q[i];
    for (int64_t c : dependent) complete(c, covered);
    for (int64_t i = 0; i < matrix_.rows; ++i)
      for (int64_t c = 0; c < matrix_.columns; ++c) matrix_.data[i * matrix_.columns + c] = float(q_[c * stride_ + i]);
  }

 private:
  // The component of v outside the span, at length 1; false, and zeros, if there is none. Two passes suffice.
  bool accept(double* v) {
    for (int round = 0; round < 2; ++round)
      for (const double* q : accepted_) add_scaled(v, q, -dot(v, q, stride_), stride_);
    const double rest = std::sqrt(dot(v, v, stride_));
    const bool independent = rest > kLeastSine;
    for (int64_t i = 0; i < matrix_.rows; ++i) v[i] = independent ? v[i] / rest : 0.0;
    if (independent) accepted_.push_back(v);
    return independent;
  }

  bool take(int64_t c) {
    double* v = &q_[c * stride_];
    for (int64_t i = 0; i < matrix_.rows; ++i) v[i] = matrix_.data[i * matrix_.columns + c];
    const double length = std::sqrt(dot(v, v, stride_));
    const bool usable = length > 0.0 && std::isfinite(length);
    for (int64_t i = 0; i < matrix_.rows; ++i) v[i] = usable ? v[i] / length : 0.0;
    return usable && accept(v);
  }

  // The axis that is farthest from the span, the first of several; if no dimension is left, the column stays zero.
  void complete(int64_t c, std::vector<double>& covered) {
    if (int64_t(accepted_.size()) >= matrix_.rows) return;
    int64_t axis = 0;
    for (int64_t i = 1; i < matrix_.rows; ++i)
      if (covered[i] < covered[axis]) axis = i;
    double* v = &q_[c * stride_];
    v[axis] = 1.0;
    if (!accept(v)) return;
    for (int64_t i = 0; i < matrix_.rows; ++i) covered[i] += v[i] * v[i];
  }

  const Matrix& matrix_;
  int64_t stride_;
  std::vector<double> q_;  // columns
  std::vector<const double*> accepted_;
};

struct Block {
  int64_t matrix, first_row, rows;
};

std::vector<Block> blocks_of(const Matrix* matrices, const std::vector<int64_t>& which) {
  std::vector<Block> blocks;
  for (int64_t m : which)
    for (int64_t row = 0; row < matrices[m].rows; row += kGramRows)
      blocks.push_back({m, row, std::min(kGramRows, matrices[m].rows - row)});
  return blocks;
}

}  // namespace

void orthogonalize(const Matrix* matrices, int64_t count, int threads) {
  std::vector<int64_t> pending, dependent;
  std::vector<int64_t> offset(count + 1, 0);  // of each matrix's w
  for (int64_t m = 0; m < count; ++m) {
    const auto [data, rows, columns] = matrices[m];
    if (rows > 0 && columns > 0) (columns <= rows ? pending : dependent).push_back(m);
    offset[m + 1] = offset[m] + padded(columns) * padded(columns);
  }
  for (int round = 0; round < 2 && !pending.empty(); ++round) {
    const auto blocks = blocks_of(matrices, pending);
    std::vector<int64_t> place(blocks.size() + 1, 0);  // of each block's Gram matrix
    for (size_t b = 0; b < blocks.size(); ++b) {
      const int64_t width = padded(matrices[blocks[b].matrix].columns);
      place[b + 1] = place[b] + width * width;
    }
    std::vector<double> grams(place.back()), w(offset.back(), 0.0);
    parallel_for(int64_t(blocks.size()), threads, [&](int64_t b) {
      const auto [data, rows, columns] = matrices[blocks[b].matrix];
      gram_block(data + blocks[b].first_row * columns, blocks[b].rows, columns, scratch(columns), &grams[place[b]]);
    });
    for (size_t b = 0; b < blocks.size(); ++b) {
      double* total = &w[offset[blocks[b].matrix]];
      for (int64_t i = 0; i < place[b + 1] - place[b]; ++i) total[i] += grams[place[b] + i];
    }
    std::vector<Verdict> verdicts(count, Verdict::dependent);
    parallel_for(int64_t(pending.size()), threads, [&](int64_t i) {
      verdicts[pending[i]] = factor(&w[offset[pending[i]]], matrices[pending[i]].columns);
    });
    parallel_for(int64_t(blocks.size()), threads, [&](int64_t b) {
      const auto [m, first, rows] = blocks[b];
      if (verdicts[m] == Verdict::dependent) return;
      const int64_t columns = matrices[m].columns;
      transform_block(matrices[m].data + first * columns, rows, columns, &w[offset[m]], scratch(columns));
    });
    std::vector<int64_t> again;
    for (int64_t m : pending) {
      if (verdicts[m] == Verdict::dependent) dependent.push_back(m);
      if (verdicts[m] == Verdict::again) again.push_back(m);
    }
    pending = std::move(again);
  }
  parallel_for(int64_t(dependent.size()), threads, [&](int64_t i) { GramSchmidt(matrices[dependent[i]]).run(); });
}

}  // namespace gradzip::cpu

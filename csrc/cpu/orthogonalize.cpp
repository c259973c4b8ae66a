// Orthonormal columns for many tall matrices at once. Cholesky QR in double: with G = A^T A = R^T R, the columns of
// A R^-1 are orthonormal and have the span of A's. Products of floats are exact in double, so one round (two reads, one
// write) is as accurate as Householder's unless columns are badly conditioned; those get a second round (Fukaya et al.,
// CholeskyQR2, ScalA'14). Dependent columns, which Cholesky cannot tell from noise, are replaced by Gram-Schmidt. Work
// is cut by rows into blocks, and the sums of blocks are added in order.
#include <cmath>
#include <utility>
#include <vector>

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/vectors.h"

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

// --- 1 to 4 columns, 3 as 4: 8, 4 or 2 rows make a vector of 8 lanes, in one register or two. With each row rotated by d, the
// products are those of columns d apart, so no work is wasted on padding.
template <int kBytes, int R, int D, size_t... kLane>
GZ_INLINE Vector<double, kBytes> rotated(const Vector<double, kBytes>& v, std::index_sequence<kLane...>) {
  return __builtin_shuffle(v, Vector<int64_t, kBytes>{int64_t(kLane / R * R + (kLane + D) % R)...});
}
template <int kBytes, int R, int D>
GZ_INLINE Vector<double, kBytes> rotated(const Vector<double, kBytes>& v) {
  return rotated<kBytes, R, D>(v, std::make_index_sequence<kBytes / sizeof(double)>());
}

template <int kBytes, int R>
GZ_INLINE void gram_narrow(const float* x, int64_t rows, double* gram) {
  constexpr int kWide = kBytes > 32 ? kBytes : 32;  // a row of four
  constexpr int kApart = R / 2 + 1, kLanes = kWide / int(sizeof(double)), kRegisters = kDoubles / kLanes;
  const int64_t width = padded(R), n = rows * R;
  Vector<double, kWide> acc[2 * kRegisters][kApart] = {};
  float tail[2 * kDoubles] = {};
  for (int64_t i = 0; i < n; i += 2 * kDoubles, x += 2 * kDoubles) {
    if (n - i < 2 * kDoubles) {
      std::memcpy(tail, x, size_t(n - i) * sizeof(float));
      x = tail;
    }
#pragma GCC unroll 4
    for (int j = 0; j < 2 * kRegisters; ++j) {
      const auto v = widened<kBytes, kWide>(x + j * kLanes);
      acc[j][0] += v * v;
      if constexpr (kApart > 1) acc[j][1] += v * rotated<kWide, R, 1>(v);
      if constexpr (kApart > 2) acc[j][2] += v * rotated<kWide, R, 2>(v);
    }
  }
#pragma GCC unroll 3
  for (int d = 0; d < kApart; ++d) {
    double both[kDoubles];
#pragma GCC unroll 2
    for (int j = 0; j < kRegisters; ++j) store<kWide>(both + j * kLanes, acc[j][d] + acc[kRegisters + j][d]);
    for (int a = 0; a < R; ++a) {
      double total = 0.0;
      for (int i = a; i < kDoubles; i += R) total += both[i];
      const int b = (a + d) % R;
      gram[(a < b ? a : b) * width + (a < b ? b : a)] = total;
    }
  }
}

template <int kBytes, int R>
GZ_INLINE void transform_narrow(float* x, int64_t rows, const double* w) {
  constexpr int kWide = kBytes > 32 ? kBytes : 32;
  constexpr int64_t kLanes = VectorOf<double, kWide>::lanes;
  const int64_t width = padded(R), n = rows * R;
  double lanes[R][kLanes];
  for (int d = 0; d < R; ++d)
    for (int i = 0; i < kLanes; ++i) lanes[d][i] = w[(i + d) % R * width + i % R];
  Vector<double, kWide> factor[R];
#pragma GCC unroll 4
  for (int d = 0; d < R; ++d) factor[d] = load<kWide>(lanes[d]);
  for (int64_t i = 0; i < n; i += kLanes) {
    float tail[kLanes] = {};
    const bool whole = i + kLanes <= n;
    if (!whole) std::memcpy(tail, x + i, size_t(n - i) * sizeof(float));
    const auto v = whole ? widened<kBytes, kWide>(x + i) : widened<kBytes, kWide>(tail);
    auto y = v * factor[0];
    if constexpr (R > 1) y += rotated<kWide, R, 1>(v) * factor[1];
    if constexpr (R > 2) y += rotated<kWide, R, 2>(v) * factor[2];
    if constexpr (R > 2) y += rotated<kWide, R, 3>(v) * factor[3];
    const auto narrow = narrowed<kBytes, kWide>(y);
    if (whole) {
      store<kWide / 2>(x + i, narrow);
    } else {
      store<kWide / 2>(tail, narrow);
      std::memcpy(x + i, tail, size_t(n - i) * sizeof(float));
    }
  }
}

// Rows of three columns as rows of four, the last one of zeros, and back.
struct Fours {
  float rows[4 * kGramRows];

  GZ_INLINE Fours(const float* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      for (int c = 0; c < 4; ++c) rows[4 * i + c] = c < 3 ? x[3 * i + c] : 0.0f;
  }
  GZ_INLINE void write(float* x, int64_t count) const {
    for (int64_t i = 0; i < count; ++i)
      for (int c = 0; c < 3; ++c) x[3 * i + c] = rows[4 * i + c];
  }
};

// --- any number of columns

// Converts rows of floats to rows of `width` doubles; spare ones of a register are 0. All but the last rows are read as whole
// registers, past their end.
template <int kBytes>
GZ_INLINE void widen_body(const float* x, int64_t rows, int64_t columns, int64_t width, double* s) {
  constexpr int64_t kLanes = VectorOf<double, kBytes>::lanes;
  const int64_t last = width - kDoubles, rest = columns - last, n = rows * columns;
  int64_t mask[kDoubles], i = 0;
  for (int64_t c = 0; c < kDoubles; ++c) mask[c] = c < rest ? -1 : 0;
  for (; i + width <= n; i += columns, s += width) {
    for (int64_t c = 0; c < last; c += kLanes) store<kBytes>(s + c, widened<kBytes>(x + i + c));
#pragma GCC unroll 4
    for (int64_t c = 0; c < kDoubles && c < rest; c += kLanes) {
      const auto bits = Vector<int64_t, kBytes>(widened<kBytes>(x + i + last + c)) & load<kBytes>(mask + c);
      store<kBytes>(s + last + c, Vector<double, kBytes>(bits));
    }
  }
  for (; i < n; i += columns, s += width)
    for (int64_t c = 0; c < width; ++c) s[c] = c < columns ? x[i + c] : 0.0;
}

GZ_SIMD_DISPATCH_BYTES(void, widen, (const float* x, int64_t rows, int64_t columns, int64_t width, double* s),
                       (x, rows, columns, width, s))

// Converts them back. All but the last rows are written as whole registers; the next row overwrites what is past theirs.
template <int kBytes>
GZ_INLINE void narrow_body(const double* s, int64_t rows, int64_t columns, int64_t width, float* x) {
  constexpr int64_t kLanes = VectorOf<double, kBytes>::lanes;
  int64_t i = 0;
  for (; i + width <= rows * columns; i += columns, s += width)
    for (int64_t c = 0; c < width; c += kLanes) store<kBytes / 2>(x + i + c, narrowed<kBytes>(load<kBytes>(s + c)));
  for (; i < rows * columns; i += columns, s += width)
    for (int64_t c = 0; c < columns; ++c) x[i + c] = float(s[c]);
}

GZ_SIMD_DISPATCH_BYTES(void, narrow, (const double* s, int64_t rows, int64_t columns, int64_t width, float* x),
                       (s, rows, columns, width, x))

// gram[a..a+3, b..] += the rows' products, over V vectors of columns.
template <int kBytes, int V>
GZ_INLINE void gram_tile(const double* s, int64_t rows, int64_t width, int64_t a, int64_t b, double* gram) {
  constexpr int64_t kLanes = VectorOf<double, kBytes>::lanes;
  Vector<double, kBytes> acc[4][V];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[j][v] = load<kBytes>(gram + (a + j) * width + b + v * kLanes);
  for (int64_t i = 0; i < rows; ++i, s += width) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const auto right = load<kBytes>(s + b + v * kLanes);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[j][v] += right * all_lanes<kBytes>(s + a + j);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store<kBytes>(gram + (a + j) * width + b + v * kLanes, acc[j][v]);
}

// gram[a, b] = column a . column b, for a <= b at least; zero-initialised.
template <int kBytes>
GZ_INLINE void gram_block_body(const float* x, int64_t rows, int64_t columns, double* s, double* gram) {
  if (columns == 1) return gram_narrow<kBytes, 1>(x, rows, gram);
  if (columns == 2) return gram_narrow<kBytes, 2>(x, rows, gram);
  if (columns == 3) return gram_narrow<kBytes, 4>(Fours(x, rows).rows, rows, gram);
  if (columns == 4) return gram_narrow<kBytes, 4>(x, rows, gram);
  constexpr int64_t kLanes = VectorOf<double, kBytes>::lanes;
  const int64_t width = padded(columns);
  for (int64_t i = 0; i < rows; i += kPanel) {
    const int64_t n = rows - i < kPanel ? rows - i : kPanel;
    widen(x + i * columns, n, columns, width, s);
    for (int64_t b = 0; b < columns; b += 2 * kLanes) {
      const bool wide = b + kLanes < columns;
      const int64_t last = b + (wide ? 2 : 1) * kLanes;
      for (int64_t a = 0; a < last && a < columns; a += 4) {
        if (wide)
          gram_tile<kBytes, 2>(s, n, width, a, b, gram);
        else
          gram_tile<kBytes, 1>(s, n, width, a, b, gram);
      }
    }
  }
}
GZ_SIMD_DISPATCH_BYTES(void, gram_block, (const float* x, int64_t rows, int64_t columns, double* s, double* gram),
                       (x, rows, columns, s, gram))

// Rows s[0..3] times columns b.. of w, whose entries are 0 from row `depth` on.
template <int kBytes, int V>
GZ_INLINE void product_tile(const double* s, int64_t width, const double* w, int64_t depth, double* out) {
  constexpr int64_t kLanes = VectorOf<double, kBytes>::lanes;
  Vector<double, kBytes> acc[4][V] = {};
  for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const auto right = load<kBytes>(w + k * width + v * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) acc[i][v] += right * all_lanes<kBytes>(s + i * width + k);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store<kBytes>(out + i * width + v * kLanes, acc[i][v]);
}

// x = x w, w upper triangular. The last columns first: each needs only those up to itself.
template <int kBytes>
GZ_INLINE void transform_block_body(float* x, int64_t rows, int64_t columns, const double* w, double* s) {
  if (columns == 1) return transform_narrow<kBytes, 1>(x, rows, w);
  if (columns == 2) return transform_narrow<kBytes, 2>(x, rows, w);
  if (columns == 3) {
    Fours fours(x, rows);
    transform_narrow<kBytes, 4>(fours.rows, rows, w);
    return fours.write(x, rows);
  }
  if (columns == 4) return transform_narrow<kBytes, 4>(x, rows, w);
  constexpr int64_t kLanes = VectorOf<double, kBytes>::lanes;
  const int64_t width = padded(columns);
  for (int64_t first = 0; first < rows; first += kPanel, x += kPanel * columns) {
    const int64_t n = rows - first < kPanel ? rows - first : kPanel;
    widen(x, n, columns, width, s);
    for (int64_t i = 0; i < n; i += 4) {  // the panel has room for whole fours
      double* row = s + i * width;
      int64_t b = ceil_div(columns, kLanes) * kLanes;
      if (b % (2 * kLanes)) {
        b -= kLanes;
        product_tile<kBytes, 1>(row, width, w + b, columns, row + b);
      }
      for (; b > 0; b -= 2 * kLanes)
        product_tile<kBytes, 2>(row, width, w + b - 2 * kLanes, b < columns ? b : columns, row + b - 2 * kLanes);
    }
    narrow(s, n, columns, width, x);
  }
}
GZ_SIMD_DISPATCH_BYTES(void, transform_block, (float* x, int64_t rows, int64_t columns, const double* w, double* s),
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

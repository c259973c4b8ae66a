// The passes of low-rank compression (Power-SGD, ACP-SGD) over an n x c gradient: sum and product fused, difference and
// product fused, so that memory is read and written once for each. The narrow factor is transposed first (it is
// small), so that lanes run along the rows of the gradient. Every element has one fixed order of summation.
#include <algorithm>
#include <vector>

#include "cpu/lanes.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace gradzip::cpu {
namespace {

constexpr int64_t kColumns = 1024;  // of a block: as much of a factor as stays in the cache
constexpr int64_t kStride = kColumns + kFloats;  // of its rows: a power of two would put them all in one cache set
constexpr int64_t kPanel = 8;  // rows that a transposed product takes at a time
constexpr int64_t kSplits = 16;  // tasks that a transposed product aims at

// Of the rows of a transposed factor, for the same reason an odd number of vectors.
int64_t padded(int64_t columns) { return (ceil_div(columns, kFloats) | 1) * kFloats; }

// (c, r) to (r, padded(c)), spare columns zero.
std::vector<float> transposed(const float* q, int64_t columns, int64_t rank) {
  std::vector<float> t(rank * padded(columns), 0.0f);
  for (int64_t k = 0; k < rank; ++k)
    for (int64_t j = 0; j < columns; ++j) t[k * padded(columns) + j] = q[j * rank + k];
  return t;
}

// Up to 16 floats; those past `count` are 0.
GZ_INLINE Floats load_some(const float* x, int64_t count) {
  if (count >= kFloats) return load(x);
  float stage[kFloats] = {};
  std::memcpy(stage, x, size_t(count) * sizeof(float));
  return load(stage);
}
GZ_INLINE void store_some(float* x, const Floats& v, int64_t count) {
  if (count >= kFloats) return store(x, v);
  float stage[kFloats];
  store(stage, v);
  std::memcpy(x, stage, size_t(count) * sizeof(float));
}

// The gradient as the products read it: m, or e after e += m.
struct Operand {
  const float* m;
  float* e;  // or null
  int64_t columns;
};

// Reads x[row.., begin..end) from memory, once, to rows of kStride floats; spare lanes of the last vector are 0.
GZ_INLINE void stage_rows(const Operand& x, int64_t row, int64_t rows, int64_t begin, int64_t end, float* stage) {
  for (int64_t i = 0; i < rows; ++i, stage += kStride) {
    const int64_t base = (row + i) * x.columns;
    for (int64_t j = begin; j < end; j += kFloats) {
      Floats v = load_some(x.m + base + j, end - j);
      if (x.e) {
        v += load_some(x.e + base + j, end - j);
        store_some(x.e + base + j, v, end - j);
      }
      store(stage + j - begin, v);
    }
  }
}

// out[i, k] += stage[i, :] . t[k, :] for I rows and K columns of the factor.
template <int I, int K>
GZ_INLINE void dot_tile(const float* stage, int64_t columns, const float* t, int64_t t_stride, float* out,
                        int64_t rank) {
  Floats acc[I][K] = {};
  for (int64_t j = 0; j < columns; j += kFloats) {
    Floats factor[K];
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) factor[k] = load(t + k * t_stride + j);
#pragma GCC unroll 4
    for (int i = 0; i < I; ++i) {
      const Floats v = load(stage + i * kStride + j);
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) acc[i][k] += v * factor[k];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < I; ++i)
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) out[i * rank + k] += sum(acc[i][k]);
}

template <int I>
GZ_INLINE void dot_rows(const Operand& x, int64_t row, const float* t, float* out, int64_t rank, float* stage) {
  const int64_t stride = padded(x.columns);
  out += row * rank;
  for (int64_t i = 0; i < I * rank; ++i) out[i] = 0.0f;
  for (int64_t begin = 0; begin < x.columns; begin += kColumns) {
    const int64_t end = begin + kColumns < x.columns ? begin + kColumns : x.columns;
    stage_rows(x, row, I, begin, end, stage);
    int64_t k = 0;
    for (; k + 4 <= rank; k += 4) dot_tile<I, 4>(stage, end - begin, t + k * stride + begin, stride, out + k, rank);
    for (; k < rank; ++k) dot_tile<I, 1>(stage, end - begin, t + k * stride + begin, stride, out + k, rank);
  }
}

// out[i, :] = x[i, :] q for rows [first, last).
GZ_INLINE void project_rows_body(const Operand& x, int64_t first, int64_t last, const float* t, float* out,
                                 int64_t rank) {
  float stage[4 * kStride];
  int64_t i = first;
  for (; i + 4 <= last; i += 4) dot_rows<4>(x, i, t, out, rank, stage);
  for (; i < last; ++i) dot_rows<1>(x, i, t, out, rank, stage);
}
GZ_SIMD_DISPATCH(void, project_rows,
                 (const Operand& x, int64_t first, int64_t last, const float* t, float* out, int64_t rank),
                 (x, first, last, t, out, rank))

// sums[k, :] += q[i, k] stage[i, :] over the rows, K columns of the factor and V vectors of columns.
template <int K, int V>
GZ_INLINE void outer_tile(const float* stage, int64_t rows, const float* q, int64_t rank, float* sums) {
  Floats acc[K][V];
#pragma GCC unroll 4
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[k][v] = load(sums + k * kStride + v * kFloats);
  for (int64_t i = 0; i < rows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Floats value = load(stage + i * kStride + v * kFloats);
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) acc[k][v] += value * q[i * rank + k];
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(sums + k * kStride + v * kFloats, acc[k][v]);
}

template <int K>
GZ_INLINE void outer_rows(const float* stage, int64_t rows, int64_t columns, const float* q, int64_t rank,
                          float* sums) {
  int64_t j = 0;
  for (; j + 2 * kFloats <= columns; j += 2 * kFloats) outer_tile<K, 2>(stage + j, rows, q, rank, sums + j);
  for (; j < columns; j += kFloats) outer_tile<K, 1>(stage + j, rows, q, rank, sums + j);
}

// sums[k, j - begin] = x[:, j] . q[:, k] for columns [begin, end) over rows [first, last); sums is (rank, kStride).
GZ_INLINE void project_columns_body(const Operand& x, int64_t first, int64_t last, int64_t begin, int64_t end,
                                    const float* q, int64_t rank, float* sums) {
  float stage[kPanel * kStride];
  for (int64_t i = 0; i < rank * kStride; ++i) sums[i] = 0.0f;
  for (int64_t i = first; i < last; i += kPanel) {
    const int64_t rows = i + kPanel < last ? kPanel : last - i;
    stage_rows(x, i, rows, begin, end, stage);
    int64_t k = 0;
    for (; k + 4 <= rank; k += 4) outer_rows<4>(stage, rows, end - begin, q + i * rank + k, rank, sums + k * kStride);
    for (; k < rank; ++k) outer_rows<1>(stage, rows, end - begin, q + i * rank + k, rank, sums + k * kStride);
  }
}
GZ_SIMD_DISPATCH(void, project_columns,
                 (const Operand& x, int64_t first, int64_t last, int64_t begin, int64_t end, const float* q,
                  int64_t rank, float* sums),
                 (x, first, last, begin, end, q, rank, sums))

void project_transposed(const Operand& x, int64_t rows, const float* q, int64_t rank, float* out, int threads) {
  // Blocks of columns, and where those are few, parts of the rows too: their sums are added in order.
  if (x.columns == 0) return;
  const int64_t blocks = ceil_div(x.columns, kColumns);
  const int64_t parts = std::clamp<int64_t>(kSplits / blocks, 1, std::max<int64_t>(1, rows / (8 * kPanel)));
  const int64_t size = rank * kStride;
  std::vector<float> sums(blocks * parts * size);
  parallel_for(blocks * parts, threads, [&](int64_t task) {
    const int64_t block = task / parts, part = task % parts, begin = block * kColumns;
    project_columns(x, rows * part / parts, rows * (part + 1) / parts, begin, std::min(begin + kColumns, x.columns), q,
                    rank, &sums[task * size]);
  });
  parallel_for(blocks, threads, [&](int64_t block) {
    float* total = &sums[block * parts * size];
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t i = 0; i < size; ++i) total[i] += total[part * size + i];
    const int64_t begin = block * kColumns, end = std::min(begin + kColumns, x.columns);
    for (int64_t j = begin; j < end; ++j)
      for (int64_t k = 0; k < rank; ++k) out[j * rank + k] = total[k * kStride + j - begin];
  });
}

// p q^T, with q transposed to t.
struct Product {
  const float *p, *t;
};

// out = first, or from - first unless `from` is null; then m = second, unless m is null.
struct Expansion {
  int64_t columns, rank;
  Product first;
  const float* from;
  float* out;
  Product second;
  float* m;

  bool twice() const { return second.p != first.p || second.t != first.t; }
};

template <int I, int V>
GZ_INLINE void multiply_tile(const Expansion& x, const Product& factors, int64_t row, int64_t j, Floats (&acc)[I][V]) {
  for (int64_t k = 0; k < x.rank; ++k) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Floats factor = load(factors.t + k * padded(x.columns) + j + v * kFloats);
#pragma GCC unroll 4
      for (int i = 0; i < I; ++i) acc[i][v] += factor * factors.p[(row + i) * x.rank + k];
    }
  }
}

template <int I, int V>
GZ_INLINE void expand_tile(const Expansion& x, int64_t row, int64_t j) {
  const int64_t count = V == 1 ? x.columns - j : kFloats;  // floats of a vector that are there
  Floats acc[I][V] = {};
  multiply_tile(x, x.first, row, j, acc);
#pragma GCC unroll 4
  for (int i = 0; i < I; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const int64_t at = (row + i) * x.columns + j + v * kFloats;
      store_some(x.out + at, x.from ? load_some(x.from + at, count) - acc[i][v] : acc[i][v], count);
    }
  if (!x.m) return;
  if (x.twice()) {
#pragma GCC unroll 4
    for (int i = 0; i < I; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[i][v] = Floats{};
    multiply_tile(x, x.second, row, j, acc);
  }
#pragma GCC unroll 4
  for (int i = 0; i < I; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store_some(x.m + (row + i) * x.columns + j + v * kFloats, acc[i][v], count);
}

template <int I>
GZ_INLINE void expand_row_group(const Expansion& x, int64_t row, int64_t begin, int64_t end) {
  int64_t j = begin;
  for (; j + 2 * kFloats <= end; j += 2 * kFloats) expand_tile<I, 2>(x, row, j);
  for (; j < end; j += kFloats) expand_tile<I, 1>(x, row, j);
}

GZ_INLINE void expand_rows_body(const Expansion& x, int64_t first, int64_t last) {
  for (int64_t begin = 0; begin < x.columns; begin += kColumns) {
    const int64_t end = begin + kColumns < x.columns ? begin + kColumns : x.columns;
    int64_t i = first;
    for (; i + 4 <= last; i += 4) expand_row_group<4>(x, i, begin, end);
    for (; i < last; ++i) expand_row_group<1>(x, i, begin, end);
  }
}
GZ_SIMD_DISPATCH(void, expand_rows, (const Expansion& x, int64_t first, int64_t last), (x, first, last))

// Rows of one task: some 2^15 elements, and whole groups of four.
int64_t task_rows(int64_t columns) { return std::max<int64_t>(1, kChunk / std::max<int64_t>(columns, 1) / 4) * 4; }

void expand(const Expansion& x, int64_t rows, int threads) {
  parallel_chunks(rows, task_rows(x.columns), threads,
                  [&](int64_t, int64_t first, int64_t last) { expand_rows(x, first, last); });
}

}  // namespace

void low_rank_project(const float* m, float* e, int64_t rows, int64_t columns, const float* q, int64_t rank,
                      bool transpose, float* out, int threads) {
  const Operand x{m, e, columns};
  if (transpose) return project_transposed(x, rows, q, rank, out, threads);
  const auto t = transposed(q, columns, rank);
  parallel_chunks(rows, task_rows(columns), threads,
                  [&](int64_t, int64_t first, int64_t last) { project_rows(x, first, last, t.data(), out, rank); });
}

void low_rank_expand(const float* p, const float* q, int64_t rows, int64_t columns, int64_t rank, const float* from,
                     float* out, int threads) {
  const auto t = transposed(q, columns, rank);
  expand({columns, rank, {p, t.data()}, from, out, {}, nullptr}, rows, threads);
}

void low_rank_settle(float* m, float* e, const float* sent_p, const float* sent_q, const float* p, const float* q,
                     int64_t rows, int64_t columns, int64_t rank, int threads) {
  const auto t = transposed(q, columns, rank);
  const auto sent_t = sent_q == q ? std::vector<float>() : transposed(sent_q, columns, rank);
  expand({columns, rank, {sent_p, sent_q == q ? t.data() : sent_t.data()}, m, e, {p, t.data()}, m}, rows, threads);
}

}  // namespace gradzip::cpu

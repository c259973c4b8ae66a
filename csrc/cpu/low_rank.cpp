// The passes of low-rank compression (Power-SGD, ACP-SGD) over an n x c gradient. Sum and product are fused, and so are
// product and difference, so each pass reads and writes memory once. The narrow factor, which is small, is transposed
// first, so that lanes run along the rows of the gradient. Each element has one fixed order of summation.
#include <algorithm>
#include <vector>

#include "cpu/lanes.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace gradzip::cpu {
namespace {

constexpr int64_t kColumns = 1024;  // of a block: the part of a factor that stays in the cache
constexpr int64_t kStride = kColumns + kFloats;  // of its rows: with a power of two all would be in one cache set
constexpr int64_t kPanel = 8;  // rows of a transposed product at a time
constexpr int64_t kSplits = 16;  // target number of tasks of a transposed product
constexpr int64_t kFactor = 1 << 15;  // floats of a factor that an expansion keeps in the cache
constexpr int64_t kAhead = 8 * kFloats;  // prefetch distance of an expansion
constexpr int64_t kStream = 1 << 22;  // least size of a matrix that is written past the cache

// The stride of a transposed factor: for the same reason an odd number of vectors.
int64_t padded(int64_t columns) { return (ceil_div(columns, kFloats) | 1) * kFloats; }

// (c, r) to (r, padded(c)); spare columns are 0.
std::vector<float> transposed(const float* q, int64_t columns, int64_t rank) {
  std::vector<float> t(rank * padded(columns), 0.0f);
  for (int64_t k = 0; k < rank; ++k)
    for (int64_t j = 0; j < columns; ++j) t[k * padded(columns) + j] = q[j * rank + k];
  return t;
}

// All lanes s. For vectors of several registers (kHalves) the compiler would make 16 scalar copies; it does not for one
// register or half as many lanes.
GZ_INLINE Floats all_lanes(float s) {
  typedef float Half __attribute__((vector_size(32)));
  const Half half = {s, s, s, s, s, s, s, s};
  Floats all;
  std::memcpy(&all, &half, sizeof half);
  std::memcpy(reinterpret_cast<char*>(&all) + sizeof half, &half, sizeof half);
  return all;
}

// Loads up to 16 floats; those past `count` are 0.
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

// The gradient as products read it: m, or e after e += m.
struct Operand {
  const float* m;
  float* e;  // or null
  int64_t columns;

  // Loads up to 16 columns of I rows, from j to at most `end`; those past it are 0. Call it once per element, since it
  // adds m to e. All loads precede all stores: rows of 2^k columns start at the same page offset, and a load after a
  // store to the same page offset waits for it.
  template <int I>
  GZ_INLINE void read(int64_t row, int64_t j, int64_t end, Floats (&v)[I]) const {
    const int64_t at = row * columns + j, count = end - j;
#pragma GCC unroll 4
    for (int i = 0; i < I; ++i) v[i] = load_some(m + at + i * columns, count);
    if (!e) return;
#pragma GCC unroll 4
    for (int i = 0; i < I; ++i) v[i] += load_some(e + at + i * columns, count);
#pragma GCC unroll 4
    for (int i = 0; i < I; ++i) store_some(e + at + i * columns, v[i], count);
  }
};

// out[i, k] += x[i, begin..end) . t[k, begin..end) for I rows and K columns of the factor. The first product reads the
// rows, its multiplications hidden by the memory latency, and leaves them in `stage` for the others.
template <bool kFirst, int I, int K>
GZ_INLINE void dot_tile(const Operand& x, int64_t row, int64_t begin, int64_t end, const float* t, float* out,
                        int64_t rank, float* stage) {
  Floats acc[I][K] = {};
  for (int64_t j = begin; j < end; j += kFloats) {
    Floats factor[K];
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) factor[k] = load(t + k * padded(x.columns) + j);
    Floats v[I];
    if (kFirst) x.read(row, j, end, v);
#pragma GCC unroll 4
    for (int i = 0; i < I; ++i) {
      float* staged = stage + i * kStride + j - begin;
      if (!kFirst)
        v[i] = load(staged);
      else if (rank > K)
        store(staged, v[i]);
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) acc[i][k] += v[i] * factor[k];
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
    int64_t k = rank < 4 ? 1 : 4;
    if (rank < 4)
      dot_tile<true, I, 1>(x, row, begin, end, t, out, rank, stage);
    else
      dot_tile<true, I, 4>(x, row, begin, end, t, out, rank, stage);
    for (; k + 4 <= rank; k += 4) dot_tile<false, I, 4>(x, row, begin, end, t + k * stride, out + k, rank, stage);
    for (; k < rank; ++k) dot_tile<false, I, 1>(x, row, begin, end, t + k * stride, out + k, rank, stage);
  }
}

// out[i, :] = x[i, :] q for rows [first, last).
GZ_INLINE void project_rows_body(Operand x, int64_t first, int64_t last, const float* t, float* out, int64_t rank) {
  float stage[4 * kStride];
  int64_t i = first;
  for (; i + 4 <= last; i += 4) dot_rows<4>(x, i, t, out, rank, stage);
  for (; i < last; ++i) dot_rows<1>(x, i, t, out, rank, stage);
}
GZ_SIMD_DISPATCH(void, project_rows, (Operand x, int64_t first, int64_t last, const float* t, float* out, int64_t rank),
                 (x, first, last, t, out, rank))

// acc[k, :] += q[i, k] x[i, j..) for I rows of x, K columns of the factor and V vectors of columns of x. The first
// product reads x here, too.
template <bool kHalves, bool kFirst, int I, int K, int V>
GZ_INLINE void outer_tile(const Operand& x, int64_t row, int64_t j, int64_t end, const float* q, int64_t rank,
                          float* stage, Floats (&acc)[K][V]) {
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    Floats value[I];
    if (kFirst) x.read(row, j + v * kFloats, end, value);
#pragma GCC unroll 4
    for (int i = 0; i < I; ++i) {
      float* staged = stage + i * kStride + v * kFloats;
      if (!kFirst)
        value[i] = load(staged);
      else if (rank > K)
        store(staged, value[i]);
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) {
        const float f = q[(row + i) * rank + k];
        if constexpr (kHalves)
          acc[k][v] += value[i] * all_lanes(f);
        else
          acc[k][v] += value[i] * f;
      }
    }
  }
}

template <bool kHalves, bool kFirst, int K, int V>
GZ_INLINE void outer_columns(const Operand& x, int64_t row, int64_t rows, int64_t j, int64_t end, const float* q,
                             int64_t rank, float* sums, float* stage) {
  Floats acc[K][V];
#pragma GCC unroll 4
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[k][v] = load(sums + k * kStride + v * kFloats);
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) outer_tile<kHalves, kFirst, 4>(x, row + i, j, end, q, rank, stage + i * kStride, acc);
  for (; i < rows; ++i) outer_tile<kHalves, kFirst, 1>(x, row + i, j, end, q, rank, stage + i * kStride, acc);
#pragma GCC unroll 4
  for (int k = 0; k < K; ++k)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(sums + k * kStride + v * kFloats, acc[k][v]);
}

template <bool kHalves, bool kFirst, int K>
GZ_INLINE void outer_rows(const Operand& x, int64_t row, int64_t rows, int64_t begin, int64_t end, const float* q,
                          int64_t rank, float* sums, float* stage) {
  int64_t j = begin;
  for (; j + 2 * kFloats <= end; j += 2 * kFloats, sums += 2 * kFloats, stage += 2 * kFloats)
    outer_columns<kHalves, kFirst, K, 2>(x, row, rows, j, end, q, rank, sums, stage);
  for (; j < end; j += kFloats, sums += kFloats, stage += kFloats)
    outer_columns<kHalves, kFirst, K, 1>(x, row, rows, j, end, q, rank, sums, stage);
}

// sums[k, j - begin] = x[:, j] . q[:, k] for columns [begin, end) over rows [first, last); sums is (rank, kStride).
template <bool kHalves>
GZ_INLINE void project_columns_body(Operand x, int64_t first, int64_t last, int64_t begin, int64_t end, const float* q,
                                    int64_t rank, float* sums) {
  float stage[kPanel * kStride];
  for (int64_t i = 0; i < rank * kStride; ++i) sums[i] = 0.0f;
  for (int64_t i = first; i < last; i += kPanel) {
    const int64_t rows = i + kPanel < last ? kPanel : last - i;
    int64_t k = rank < 4 ? 1 : 4;
    if (rank < 4)
      outer_rows<kHalves, true, 1>(x, i, rows, begin, end, q, rank, sums, stage);
    else
      outer_rows<kHalves, true, 4>(x, i, rows, begin, end, q, rank, sums, stage);
    for (; k + 4 <= rank; k += 4)
      outer_rows<kHalves, false, 4>(x, i, rows, begin, end, q + k, rank, sums + k * kStride, stage);
    for (; k < rank; ++k) outer_rows<kHalves, false, 1>(x, i, rows, begin, end, q + k, rank, sums + k * kStride, stage);
  }
}
void project_columns_scalar(Operand x, int64_t first, int64_t last, int64_t begin, int64_t end, const float* q,
                            int64_t rank, float* sums) {
  project_columns_body<true>(x, first, last, begin, end, q, rank, sums);
}
GZ_AVX2 void project_columns_avx2(Operand x, int64_t first, int64_t last, int64_t begin, int64_t end, const float* q,
                                  int64_t rank, float* sums) {
  project_columns_body<true>(x, first, last, begin, end, q, rank, sums);
}
GZ_AVX512 void project_columns_avx512(Operand x, int64_t first, int64_t last, int64_t begin, int64_t end,
                                      const float* q, int64_t rank, float* sums) {
  project_columns_body<false>(x, first, last, begin, end, q, rank, sums);
}
GZ_SIMD_SELECT(void, project_columns,
               (Operand x, int64_t first, int64_t last, int64_t begin, int64_t end, const float* q, int64_t rank,
                float* sums),
               (x, first, last, begin, end, q, rank, sums))

void project_transposed(const Operand& x, int64_t rows, const float* q, int64_t rank, float* out, int threads) {
  // Tasks are blocks of columns and, if those are few, parts of the rows, whose sums are added in order.
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

// Stores past the cache: a line that is written whole need not be read first. Four stores of 16 bytes fill a line as
// well as one of 64, and need no AVX. `x` is aligned to 64 bytes.
GZ_INLINE void stream_store(float* x, const Floats& v) {
  float stage[kFloats];
  store(stage, v);
#pragma GCC unroll 4
  for (int i = 0; i < kFloats; i += 4) _mm_stream_ps(x + i, _mm_loadu_ps(stage + i));
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
  Product second = {};
  float* m = nullptr;
  bool stream = false;  // write past the cache

  bool twice() const { return second.p != first.p || second.t != first.t; }
  GZ_INLINE void put(float* to, const Floats& v, int64_t count) const {
    if (stream)
      stream_store(to, v);
    else
      store_some(to, v, count);
  }
};

template <bool kHalves, int I, int V>
GZ_INLINE void multiply_tile(const Expansion& x, const Product& factors, int64_t row, int64_t j, Floats (&acc)[I][V]) {
  for (int64_t k = 0; k < x.rank; ++k) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Floats factor = load(factors.t + k * padded(x.columns) + j + v * kFloats);
#pragma GCC unroll 4
      for (int i = 0; i < I; ++i) {
        const float f = factors.p[(row + i) * x.rank + k];
        if constexpr (kHalves)
          acc[i][v] += factor * all_lanes(f);
        else
          acc[i][v] += factor * f;
      }
    }
  }
}

template <bool kHalves, int I, int V>
GZ_INLINE void expand_tile(const Expansion& x, int64_t row, int64_t j) {
  Floats acc[I][V] = {};
  multiply_tile<kHalves>(x, x.first, row, j, acc);
#pragma GCC unroll 4
  for (int i = 0; i < I; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const int64_t column = j + v * kFloats, at = (row + i) * x.columns + column;
      const int64_t count = V == 1 ? x.columns - column : kFloats;
      if (x.from) __builtin_prefetch(x.from + at + kAhead);
      x.put(x.out + at, x.from ? load_some(x.from + at, count) - acc[i][v] : acc[i][v], count);
    }
  if (!x.m) return;
  if (x.twice()) {
#pragma GCC unroll 4
    for (int i = 0; i < I; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[i][v] = Floats{};
    multiply_tile<kHalves>(x, x.second, row, j, acc);
  }
#pragma GCC unroll 4
  for (int i = 0; i < I; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const int64_t column = j + v * kFloats;
      x.put(x.m + (row + i) * x.columns + column, acc[i][v], V == 1 ? x.columns - column : kFloats);
    }
}

template <bool kHalves, int I>
GZ_INLINE void expand_row_group(const Expansion& x, int64_t row, int64_t begin, int64_t end) {
  int64_t j = begin;
  for (; j + 2 * kFloats <= end; j += 2 * kFloats) expand_tile<kHalves, I, 2>(x, row, j);
  for (; j < end; j += kFloats) expand_tile<kHalves, I, 1>(x, row, j);
}

template <bool kHalves>
GZ_INLINE void expand_rows_body(Expansion x, int64_t first, int64_t last) {
  const int64_t width = (kFactor / (2 * kFloats) / (x.rank + 1) + 1) * 2 * kFloats;
  for (int64_t begin = 0; begin < x.columns; begin += width) {
    const int64_t end = begin + width < x.columns ? begin + width : x.columns;
    int64_t i = first;
    for (; i + 4 <= last; i += 4) expand_row_group<kHalves, 4>(x, i, begin, end);
    for (; i < last; ++i) expand_row_group<kHalves, 1>(x, i, begin, end);
  }
  if (x.stream) _mm_sfence();
}
void expand_rows_scalar(Expansion x, int64_t first, int64_t last) { expand_rows_body<true>(x, first, last); }
GZ_AVX2 void expand_rows_avx2(Expansion x, int64_t first, int64_t last) { expand_rows_body<true>(x, first, last); }
GZ_AVX512 void expand_rows_avx512(Expansion x, int64_t first, int64_t last) { expand_rows_body<false>(x, first, last); }
GZ_SIMD_SELECT(void, expand_rows, (Expansion x, int64_t first, int64_t last), (x, first, last))

// Rows of one task: about 2^15 elements, in whole groups of four.
int64_t task_rows(int64_t columns) { return std::max<int64_t>(1, kChunk / std::max<int64_t>(columns, 1) / 4) * 4; }

void expand(Expansion x, int64_t rows, int threads) {
  const auto aligned = [](const float* to) { return reinterpret_cast<uintptr_t>(to) % sizeof(Floats) == 0; };
  x.stream = rows * x.columns >= kStream && x.columns % kFloats == 0 && aligned(x.out) && aligned(x.m);
  parallel_chunks(rows, task_rows(x.columns), threads,
                  [&](int64_t, int64_t first, int64_t last) { expand_rows(x, first, last); });
}

void project(const Projection& p, int threads) {
  const Operand x{p.m, p.e, p.columns};
  if (p.transpose) return project_transposed(x, p.rows, p.factor, p.rank, p.out, threads);
  const auto t = transposed(p.factor, p.columns, p.rank);
  parallel_chunks(p.rows, task_rows(p.columns), threads,
                  [&](int64_t, int64_t first, int64_t last) { project_rows(x, first, last, t.data(), p.out, p.rank); });
}

void apply_average(const AverageUpdate& a, int threads) {
  const auto t = transposed(a.q, a.columns, a.rank);
  const auto sent_t = a.sent_q == a.q ? std::vector<float>() : transposed(a.sent_q, a.columns, a.rank);
  const Product sent{a.sent_p, a.sent_q == a.q ? t.data() : sent_t.data()};
  expand({a.columns, a.rank, sent, a.m, a.e, {a.p, t.data()}, a.m}, a.rows, threads);
}

}  // namespace

void low_rank_project(const Projection* table, int64_t count, int threads) {
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].rows * table[i].columns; },
      [&](int64_t i, int workers) { project(table[i], workers); });
}

void low_rank_expand(const float* p, const float* q, int64_t rows, int64_t columns, int64_t rank, const float* from,
                     float* out, int threads) {
  const auto t = transposed(q, columns, rank);
  expand({columns, rank, {p, t.data()}, from, out}, rows, threads);
}

void low_rank_apply_average(const AverageUpdate* table, int64_t count, int threads) {
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].rows * table[i].columns; },
      [&](int64_t i, int workers) { apply_average(table[i], workers); });
}

}  // namespace gradzip::cpu

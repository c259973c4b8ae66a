// The passes of low-rank compression (Power-SGD, ACP-SGD) over an n x c gradient. Sum and product are fused, and so are
// product and difference, so each pass reads and writes memory once. Products are made of one tile, whose sums stay in
// registers; those of the gradient and a single column have kernels of their own. Each element has one order of
// summation, fixed by the sizes alone: fused multiply-adds, one after the other, in parts whose sums are added in order.
// A row times a single column is kFloats such sums, one in each lane.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/dtype.h"
#include "common/restore.h"
#include "cpu/half.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/vectors.h"

namespace gradzip::cpu {
namespace {

constexpr int64_t kBlock = 256;  // columns of the gradient: what is read of a factor stays in the cache
constexpr int64_t kDepth = 64;  // rows of a transposed product that are staged
constexpr int64_t kStage = kBlock + 16;  // of these: with a power of two all would be in one cache set
constexpr int64_t kGroup = 6;  // rows of whole tiles: with more, rows of 2^k columns would share too few cache lines
constexpr int64_t kDots = 4;  // rows together of a product with one column
constexpr int64_t kRows = 8;  // rows together of a transposed one
constexpr int64_t kStrip = 2048;  // columns of it, at most, whose sums stay in the L1 cache
constexpr int64_t kSplits = 16;  // target number of tasks of a transposed product
constexpr int64_t kPanel = 32;  // columns of a tile of an expansion
constexpr int64_t kFactor = 1 << 15;  // floats of a factor that an expansion keeps in the cache
constexpr int64_t kAhead = 128;  // prefetch distance of an expansion
constexpr int64_t kStream = 1 << 22;  // least size of a matrix that is written past the cache

// Rows of a tile with V vectors of columns: 16 registers, or AVX-512's 32, hold its sums and their operands.
template <int kBytes, int V>
constexpr int tile_rows() {
  return kBytes == 64 || V <= 2 ? 6 : V <= 4 ? 3 : 1;
}

// acc[i] = the sum over k < depth of x(i, k) q[k], for I rows and V vectors of columns. x(i, k) is x[i * across + k],
// or of a stage x[i + k * kStage].
template <int kBytes, bool kStaged, int I, int V>
GZ_INLINE void multiply(const float* x, int64_t across, int64_t depth, const float* q, int64_t width,
                        Vector<float, kBytes> (&acc)[I][V]) {
  constexpr int64_t kLanes = VectorOf<float, kBytes>::lanes;
  using Floats = Vector<float, kBytes>;
  for (int i = 0; i < I; ++i)
    for (int v = 0; v < V; ++v) acc[i][v] = Floats{};
  for (int64_t k = 0; k < depth; ++k, q += width) {
    const float* at = kStaged ? x + k * kStage : x + k;
    const int64_t step = kStaged ? 1 : across;
    if constexpr (I > V) {  // the fewer operands are in registers
      Floats factor[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) factor[v] = load<kBytes>(q + v * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < I; ++i) {
        const Floats value = all_lanes<kBytes>(at + i * step);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[i][v] = fused<kBytes>(value, factor[v], acc[i][v]);
      }
    } else {
      Floats value[I];
#pragma GCC unroll 8
      for (int i = 0; i < I; ++i) value[i] = all_lanes<kBytes>(at + i * step);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const Floats factor = load<kBytes>(q + v * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < I; ++i) acc[i][v] = fused<kBytes>(value[i], factor, acc[i][v]);
      }
    }
  }
}

// --- products of the gradient and a factor, whose rows are padded with zeros to `width`, whole registers

// out[i] += x[i] q for I rows.
template <int kBytes, bool kStaged, int I, int V>
GZ_INLINE void add_tile(const float* x, int64_t across, int64_t depth, const float* q, int64_t width, float* out) {
  constexpr int64_t kLanes = VectorOf<float, kBytes>::lanes;
  Vector<float, kBytes> acc[I][V];
  multiply<kBytes, kStaged>(x, across, depth, q, width, acc);
#pragma GCC unroll 8
  for (int i = 0; i < I; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* to = out + i * width + v * kLanes;
      store<kBytes>(to, load<kBytes>(to) + acc[i][v]);
    }
}

template <int kBytes, bool kStaged, int V>
GZ_INLINE void add_rows(const float* x, int64_t across, int64_t rows, int64_t depth, const float* q, int64_t width,
                        float* out) {
  constexpr int I = tile_rows<kBytes, V>();
  const int64_t step = kStaged ? 1 : across;
  int64_t i = 0;
  for (; i + I <= rows; i += I) add_tile<kBytes, kStaged, I, V>(x + i * step, across, depth, q, width, out + i * width);
  for (; i < rows; ++i) add_tile<kBytes, kStaged, 1, V>(x + i * step, across, depth, q, width, out + i * width);
}

// The same for any number of rows and columns.
template <int kBytes, bool kStaged>
GZ_INLINE void add_product(const float* x, int64_t across, int64_t rows, int64_t depth, const float* q, int64_t width,
                           float* out) {
  constexpr int64_t kLanes = VectorOf<float, kBytes>::lanes;
  const int64_t vectors = width / kLanes, passes = ceil_div(vectors, 4);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first = vectors * pass / passes, last = vectors * (pass + 1) / passes, at = first * kLanes;
    switch (last - first) {
      case 1:
        add_rows<kBytes, kStaged, 1>(x, across, rows, depth, q + at, width, out + at);
        break;
      case 2:
        add_rows<kBytes, kStaged, 2>(x, across, rows, depth, q + at, width, out + at);
        break;
      case 3:
        add_rows<kBytes, kStaged, 3>(x, across, rows, depth, q + at, width, out + at);
        break;
      default:
        add_rows<kBytes, kStaged, 4>(x, across, rows, depth, q + at, width, out + at);
    }
  }
}

// Rows, `across` floats apart.
struct Rows {
  const float* at;
  int64_t across;
};

// The gradient as products read it: m, or e after e += m.
struct Operand {
  const void* m;
  Dtype dtype;
  float* e;  // or null
  int64_t columns;

  // Columns [begin, end) of `count` rows. Call it once for each. 16-bit floats are converted to `stage`, kApart apart.
  template <int64_t kApart>
  GZ_INLINE Rows read(int64_t row, int64_t count, int64_t begin, int64_t end, float* stage) const {
    const int64_t at = row * columns + begin, width = end - begin;
    if (dtype != Dtype::float32) {
      typed(m, int(dtype), [&](auto* of) {
        for (int64_t r = 0; r < count; ++r) as_floats(of + at + r * columns, width, stage + r * kApart);
      });
      return {stage, kApart};
    }
    const float* from = static_cast<const float*>(m) + at;
    if (!e) return {from, columns};
    for (int64_t r = 0; r < count; ++r)
      for (int64_t j = r * columns; j < r * columns + width; ++j) e[at + j] += from[j];
    return {e + at, columns};
  }
  // Columns [begin, end) of a row, to read soon.
  GZ_INLINE void prefetch(int64_t row, int64_t begin, int64_t end) const {
    const int64_t size = dtype == Dtype::float32 ? 4 : 2;
    for (int64_t at = row * columns + begin, last = row * columns + end; at < last; at += 16) {
      __builtin_prefetch(static_cast<const char*>(m) + at * size);
      if (e) __builtin_prefetch(e + at);
    }
  }
};

// sums = x q for rows [first, last).
template <int kBytes>
GZ_INLINE void project_rows_body(const Operand& x, int64_t first, int64_t last, const float* q, int64_t width,
                                 float* sums) {
  float stage[kGroup * kStage];
  for (int64_t begin = 0; begin < x.columns; begin += kBlock) {
    const int64_t end = begin + kBlock < x.columns ? begin + kBlock : x.columns;
    for (int64_t i = first; i < last; i += kGroup) {
      const int64_t rows = i + kGroup < last ? kGroup : last - i;
      const Rows from = x.read<kStage>(i, rows, begin, end, stage);
      for (int64_t row = i + rows; row < i + rows + kGroup && row < last; ++row) x.prefetch(row, begin, end);
      add_product<kBytes, false>(from.at, from.across, rows, end - begin, q + begin * width, width,
                                 sums + (i - first) * width);
    }
  }
}
GZ_SIMD_DISPATCH_BYTES(void, project_rows,
                       (const Operand& x, int64_t first, int64_t last, const float* q, int64_t width, float* sums),
                       (x, first, last, q, width, sums))

// sums = x^T q for columns [begin, end) over rows [first, last).
template <int kBytes>
GZ_INLINE void project_columns_body(const Operand& x, int64_t first, int64_t last, int64_t begin, int64_t end,
                                    const float* q, int64_t width, float* sums) {
  float stage[kDepth * kStage];
  for (int64_t i = first; i < last; i += kDepth) {
    const int64_t depth = i + kDepth < last ? kDepth : last - i;
    const Rows from = x.read<kStage>(i, depth, begin, end, stage);
    for (int64_t k = 0; from.at != stage && k < depth; ++k)
      std::memcpy(stage + k * kStage, from.at + k * from.across, size_t(end - begin) * sizeof(float));
    add_product<kBytes, true>(stage, 1, end - begin, depth, q + i * width, width, sums);
  }
}
GZ_SIMD_DISPATCH_BYTES(void, project_columns,
                       (const Operand& x, int64_t first, int64_t last, int64_t begin, int64_t end, const float* q,
                        int64_t width, float* sums),
                       (x, first, last, begin, end, q, width, sums))

// --- the same for a factor of one column, without padding, which would take all lanes but one

// total[r] += x[r] q, lane by lane, for R rows. depth: a multiple of kFloats.
template <int kBytes, int R, int V>
GZ_INLINE void add_products(const float* x, int64_t across, int64_t depth, const float* q,
                            Vector<float, kBytes> (&total)[R][V]) {
  constexpr int64_t kLanes = VectorOf<float, kBytes>::lanes;
  Vector<float, kBytes> acc[R][V] = {};
  for (int64_t k = 0; k < depth; k += kFloats)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const auto factor = load<kBytes>(q + k + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        acc[r][v] = fused<kBytes>(load<kBytes>(x + r * across + k + v * kLanes), factor, acc[r][v]);
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) total[r][v] += acc[r][v];
}

// sums = x q for R rows. Lanes hold parts of a row's sum, not rows: reading bounds it, not a chain of sums for each row.
template <int kBytes, int R>
GZ_INLINE void project_row_group(const Operand& x, int64_t row, const float* q, float* sums) {
  constexpr int64_t kLanes = VectorOf<float, kBytes>::lanes;
  Vector<float, kBytes> total[R][kFloats / kLanes] = {};
  float stage[R * kStage];
  Rows from{};
  for (int64_t begin = 0; begin < x.columns; begin += kBlock) {
    const int64_t end = begin + kBlock < x.columns ? begin + kBlock : x.columns;
    from = x.read<kStage>(row, R, begin, end, stage);
    add_products<kBytes>(from.at, from.across, (end - begin) / kFloats * kFloats, q + begin, total);
  }
  if (const int64_t rest = x.columns % kFloats) {
    const int64_t at = x.columns - rest;
#pragma GCC unroll 4
    for (int64_t lane = 0; lane < kFloats; lane += kLanes) {
      const auto factor = load_first<kBytes>(q + at + lane, rest - lane);
      for (int r = 0; r < R; ++r) {
        const auto value = load_first<kBytes>(from.at + r * from.across + at % kBlock + lane, rest - lane);
        total[r][lane / kLanes] += fused<kBytes>(value, factor, Vector<float, kBytes>{});
      }
    }
  }
  for (int r = 0; r < R; ++r) sums[r] = sum<kBytes>(total[r]);
}

// sums = x q for rows [first, last).
template <int kBytes>
GZ_INLINE void project_rows_to_vector_body(const Operand& x, int64_t first, int64_t last, const float* q, float* sums) {
  int64_t i = first;
  for (; i + kDots <= last; i += kDots) project_row_group<kBytes, kDots>(x, i, q, sums + i - first);
  for (; i < last; ++i) project_row_group<kBytes, 1>(x, i, q, sums + i - first);
}
GZ_SIMD_DISPATCH_BYTES(void, project_rows_to_vector,
                       (const Operand& x, int64_t first, int64_t last, const float* q, float* sums),
                       (x, first, last, q, sums))

// acc += x^T q for columns [begin, end) of R rows.
template <int kBytes, int R>
GZ_INLINE void add_scaled_rows(const Operand& x, int64_t row, int64_t begin, int64_t end, const float* q, float* acc) {
  constexpr int64_t kLanes = VectorOf<float, kBytes>::lanes;
  float stage[R * kStrip];
  const Rows from = x.read<kStrip>(row, R, begin, end, stage);
  Vector<float, kBytes> factor[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) factor[r] = all_lanes<kBytes>(q + row + r);
  int64_t j = 0;
  for (; j + kLanes <= end - begin; j += kLanes) {
    auto sum = load<kBytes>(acc + j);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum = fused<kBytes>(load<kBytes>(from.at + r * from.across + j), factor[r], sum);
    store<kBytes>(acc + j, sum);
  }
  for (; j < end - begin; ++j)
    for (int r = 0; r < R; ++r) acc[j] = std::fma(from.at[r * from.across + j], q[row + r], acc[j]);
}

// sums += x^T q for at most kStrip columns [begin, end) over rows [first, last).
template <int kBytes>
GZ_INLINE void project_columns_to_vector_body(const Operand& x, int64_t first, int64_t last, int64_t begin, int64_t end,
                                              const float* q, float* sums) {
  float acc[kStrip];
  for (int64_t i = first; i < last; i += kDepth) {
    const int64_t stop = i + kDepth < last ? i + kDepth : last;
    for (int64_t j = 0; j < end - begin; ++j) acc[j] = 0.0f;
    int64_t row = i;
    for (; row + kRows <= stop; row += kRows) add_scaled_rows<kBytes, kRows>(x, row, begin, end, q, acc);
    for (; row < stop; ++row) add_scaled_rows<kBytes, 1>(x, row, begin, end, q, acc);
    for (int64_t j = 0; j < end - begin; ++j) sums[j] += acc[j];
  }
}
GZ_SIMD_DISPATCH_BYTES(void, project_columns_to_vector,
                       (const Operand& x, int64_t first, int64_t last, int64_t begin, int64_t end, const float* q,
                        float* sums),
                       (x, first, last, begin, end, q, sums))

// A factor (length, rank) with rows padded to whole registers: itself, or a copy in `copy`.
const float* padded(const float* q, int64_t length, int64_t rank, int64_t width, std::vector<float>& copy) {
  if (width == rank) return q;
  copy.assign(size_t(length * width), 0.0f);
  for (int64_t i = 0; i < length; ++i) std::copy_n(q + i * rank, rank, &copy[size_t(i * width)]);
  return copy.data();
}

void project(const Projection& p, int threads) {
  const Operand x{p.m, Dtype(p.dtype), p.e, p.columns};
  const bool vector = p.rank == 1;
  const int64_t rank = p.rank, lanes = simd() == Simd::avx512 ? 16 : 8;
  const int64_t width = vector ? 1 : ceil_div(rank, lanes) * lanes;
  std::vector<float> copy;
  const float* q = padded(p.factor, p.transpose ? p.rows : p.columns, rank, width, copy);
  const auto write = [&](const float* sums, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i, sums += width) std::copy_n(sums, rank, p.out + i * rank);
  };
  if (!p.transpose) {
    const int64_t group = vector ? kDots : kGroup;
    const int64_t rows = std::max<int64_t>(1, 4 * kChunk / std::max<int64_t>(p.columns, 1) / group) * group;
    return parallel_chunks(p.rows, rows, threads, [&](int64_t, int64_t first, int64_t last) {
      if (vector) return project_rows_to_vector(x, first, last, q, p.out + first);
      std::vector<float> sums(size_t((last - first) * width));
      project_rows(x, first, last, q, width, sums.data());
      write(sums.data(), first, last);
    });
  }
  // Tasks are strips of columns and, if blocks of columns are few, parts of the rows, whose sums are added in order.
  const int64_t blocks = ceil_div(p.columns, kBlock), size = p.columns * width;
  if (blocks == 0) return;
  const int64_t parts = std::clamp<int64_t>(kSplits / blocks, 1, std::max<int64_t>(1, p.rows / kDepth));
  const int64_t share = vector ? std::clamp<int64_t>(blocks * parts / (2 * threads), 1, kStrip / kBlock) : 1;
  const int64_t strip = share * kBlock;
  std::vector<float> sums(size_t(parts * size));
  parallel_for(ceil_div(p.columns, strip) * parts, threads, [&](int64_t task) {
    const int64_t part = task % parts, begin = task / parts * strip, end = std::min(begin + strip, p.columns);
    const int64_t first = p.rows * part / parts, last = p.rows * (part + 1) / parts;
    float* to = &sums[size_t(part * size + begin * width)];
    if (vector)
      project_columns_to_vector(x, first, last, begin, end, q, to);
    else
      project_columns(x, first, last, begin, end, q, width, to);
  });
  parallel_for(blocks, threads, [&](int64_t block) {
    const int64_t begin = block * kBlock, end = std::min(begin + kBlock, p.columns);
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t i = begin * width; i < end * width; ++i) sums[size_t(i)] += sums[size_t(part * size + i)];
    write(&sums[size_t(begin * width)], begin, end);
  });
}

// --- products of two factors

// Stores past the cache: a line that is written whole need not be read first. Stores of 16 bytes fill a line as well as
// one of 64, and need no AVX. `x` is aligned to 16 bytes.
template <int kBytes>
GZ_INLINE void stream_store(float* x, const Vector<float, kBytes>& v) {
  float stage[kBytes / 4];
  store<kBytes>(stage, v);
#pragma GCC unroll 4
  for (int i = 0; i < kBytes / 4; i += 4) _mm_stream_ps(x + i, _mm_loadu_ps(stage + i));
}

// (c, r) to (ceil(c / kPanel), r, kPanel); spare columns are 0.
std::vector<float> panels(const float* q, int64_t columns, int64_t rank) {
  std::vector<float> t(size_t(ceil_div(columns, kPanel) * rank * kPanel), 0.0f);
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t k = 0; k < rank; ++k) t[size_t((j / kPanel * rank + k) * kPanel + j % kPanel)] = q[j * rank + k];
  return t;
}

// p q^T, with q in panels.
struct Product {
  const float *p, *panels;
};

// e = from - first and then, unless it is null, out = second; or out = first, if `from` is null. `out` may be `from`.
struct Expansion {
  int64_t columns, rank;
  Product first;
  const float* from;
  float* e;
  Product second;
  void* out;
  Dtype dtype;  // of `out`
  bool stream = false;  // write e past the cache, or `out` if `from` is null

  bool twice() const { return second.p != first.p || second.panels != first.panels; }
};

// to = acc, or from - acc.
template <int kBytes, bool kFrom, bool kStream, int I, int V>
GZ_INLINE void put(float* to, const float* from, int64_t columns, const Vector<float, kBytes> (&acc)[I][V]) {
  constexpr int64_t kLanes = VectorOf<float, kBytes>::lanes;
#pragma GCC unroll 8
  for (int i = 0; i < I; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const int64_t at = i * columns + v * kLanes;
      const auto value = kFrom ? load<kBytes>(from + at) - acc[i][v] : acc[i][v];
      if (kStream)
        stream_store<kBytes>(to + at, value);
      else
        store<kBytes>(to + at, value);
    }
}

// I rows of kPanel columns.
template <int kBytes, bool kFrom, bool kStream, int I, class T>
GZ_INLINE void expand_tile(const Expansion& x, int64_t row, int64_t j) {
  constexpr int V = int(kPanel / VectorOf<float, kBytes>::lanes);
  const int64_t left = row * x.rank, right = j * x.rank, at = row * x.columns + j;
  Vector<float, kBytes> acc[I][V];
  multiply<kBytes, false>(x.first.p + left, x.rank, x.rank, x.first.panels + right, kPanel, acc);
  if (kFrom) {
    put<kBytes, true, kStream>(x.e + at, x.from + at, x.columns, acc);
    if (!x.out) return;
    if (x.twice()) multiply<kBytes, false>(x.second.p + left, x.rank, x.rank, x.second.panels + right, kPanel, acc);
  }
  T* out = static_cast<T*>(x.out) + at;
  if constexpr (sizeof(T) == sizeof(float)) {
    put<kBytes, false, kStream && !kFrom>(out, nullptr, x.columns, acc);
  } else {
    float floats[I * kPanel];
    put<kBytes, false, false>(floats, nullptr, kPanel, acc);
    for (int64_t i = 0; i < I; ++i)
      for (int64_t k = 0; k < kPanel; ++k) out[i * x.columns + k] = rounded<T>(floats[i * kPanel + k]);
  }
}

// The last columns of I rows, fewer than kPanel, by way of whole ones.
template <int kBytes, bool kFrom, int I, class T>
GZ_INLINE void expand_rest(const Expansion& x, int64_t row, int64_t j) {
  float from[I * kPanel], e[I * kPanel];
  T out[I * kPanel];
  const int64_t at = row * x.columns + j, left = row * x.rank, right = j * x.rank;
  const auto count = size_t(x.columns - j);
  for (int64_t i = 0; kFrom && i < I; ++i)
    std::memcpy(from + i * kPanel, x.from + at + i * x.columns, count * sizeof(float));
  Expansion whole{kPanel, x.rank, {x.first.p + left, x.first.panels + right}, from, e, {}, nullptr, x.dtype};
  if (x.out) whole.second = {x.second.p + left, x.second.panels + right}, whole.out = out;
  expand_tile<kBytes, kFrom, false, I, T>(whole, 0, 0);
  for (int64_t i = 0; i < I; ++i) {
    const int64_t to = at + i * x.columns;
    if (kFrom) std::memcpy(x.e + to, e + i * kPanel, count * sizeof(float));
    if (x.out) std::memcpy(static_cast<T*>(x.out) + to, out + i * kPanel, count * sizeof(T));
  }
}

template <int kBytes, bool kFrom, bool kStream, int I, class T>
GZ_INLINE void expand_row_group(const Expansion& x, int64_t row, int64_t begin, int64_t end) {
  int64_t j = begin;
  for (; j + kPanel <= end; j += kPanel) {
    for (int i = 0; kFrom && i < I; ++i)
      for (int64_t at = j + kAhead; at < j + kAhead + kPanel; at += 16)
        __builtin_prefetch(x.from + (row + i) * x.columns + at);
    expand_tile<kBytes, kFrom, kStream, I, T>(x, row, j);
  }
  if (j < end) expand_rest<kBytes, kFrom, I, T>(x, row, j);
}

template <int kBytes, bool kFrom, bool kStream, class T>
GZ_INLINE void expand_row_groups(const Expansion& shared, int64_t first, int64_t last) {
  constexpr int I = tile_rows<kBytes, int(kPanel / VectorOf<float, kBytes>::lanes)>();
  const Expansion x = shared;  // a copy, which no store can change
  const int64_t cached = (kFactor / kPanel / (x.rank + 1) + 1) * kPanel;
  for (int64_t begin = 0; begin < x.columns; begin += cached) {
    const int64_t end = begin + cached < x.columns ? begin + cached : x.columns;
    int64_t i = first;
    for (; i + I <= last; i += I) expand_row_group<kBytes, kFrom, kStream, I, T>(x, i, begin, end);
    for (; i < last; ++i) expand_row_group<kBytes, kFrom, kStream, 1, T>(x, i, begin, end);
  }
  if (kStream) _mm_sfence();
}

template <int kBytes, class T>
GZ_INLINE void expand_rows_to(const Expansion& x, int64_t first, int64_t last) {
  if (x.from && x.stream)
    expand_row_groups<kBytes, true, true, T>(x, first, last);
  else if (x.from)
    expand_row_groups<kBytes, true, false, T>(x, first, last);
  else if (sizeof(T) == sizeof(float) && x.stream)
    expand_row_groups<kBytes, false, true, T>(x, first, last);
  else
    expand_row_groups<kBytes, false, false, T>(x, first, last);
}
template <int kBytes>
GZ_INLINE void expand_rows_body(const Expansion& x, int64_t first, int64_t last) {
  if (x.dtype == Dtype::bfloat16)
    expand_rows_to<kBytes, BFloat16>(x, first, last);
  else if (x.dtype == Dtype::float16)
    expand_rows_to<kBytes, Float16>(x, first, last);
  else
    expand_rows_to<kBytes, float>(x, first, last);
}
GZ_SIMD_DISPATCH_BYTES(void, expand_rows, (const Expansion& x, int64_t first, int64_t last), (x, first, last))

void expand(Expansion x, int64_t rows, int threads) {
  const void* to = x.from ? x.e : x.out;
  const bool aligned = x.columns % 16 == 0 && reinterpret_cast<uintptr_t>(to) % 64 == 0;
  x.stream = aligned && rows * x.columns >= kStream && to != x.from;  // what was read is in the cache
  const int64_t task = std::max<int64_t>(1, kChunk / std::max<int64_t>(x.columns, 1) / kGroup) * kGroup;
  parallel_chunks(rows, task, threads, [&](int64_t, int64_t first, int64_t last) { expand_rows(x, first, last); });
}

void apply_average(const AverageUpdate& a, int threads) {
  const auto t = panels(a.q, a.columns, a.rank);
  const Product average{a.p, t.data()};
  const Dtype dtype{int(a.dtype)};
  if (!a.e || (a.number && restores(*a.number)))
    return expand({a.columns, a.rank, average, nullptr, nullptr, {}, a.out, dtype}, a.rows, threads);
  const auto sent_t = a.sent_q == a.q ? std::vector<float>() : panels(a.sent_q, a.columns, a.rank);
  const Product sent{a.sent_p, a.sent_q == a.q ? t.data() : sent_t.data()};
  expand({a.columns, a.rank, sent, a.m, a.e, average, a.out, dtype}, a.rows, threads);
}

}  // namespace

void low_rank_project(const Projection* table, int64_t count, int threads) {
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].rows * table[i].columns; },
      [&](int64_t i, int workers) { project(table[i], workers); });
}

void low_rank_expand(const float* p, const float* q, int64_t rows, int64_t columns, int64_t rank, const float* from,
                     float* out, int threads) {
  const auto t = panels(q, columns, rank);
  expand({columns, rank, {p, t.data()}, from, from ? out : nullptr, {}, from ? nullptr : out, Dtype::float32}, rows,
         threads);
}

void low_rank_apply_average(const AverageUpdate* table, int64_t count, int threads) {
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].rows * table[i].columns; },
      [&](int64_t i, int workers) { apply_average(table[i], workers); });
}

}  // namespace gradzip::cpu

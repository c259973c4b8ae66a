// Orthonormal columns for many tall matrices in one launch, or two if some have more than kGramRows rows: Cholesky QR in
// double, as cpu/orthogonalize.cpp explains. All sums run in the same order, so results have the same bits; only the
// rare Gram-Schmidt, which is distributed over a block here, may differ by rounding.
//
// A block takes kGramRows rows. The first launch computes Gram matrices, the last block of a matrix factors their sum,
// and the second launch multiplies. Rare work (a second round, Gram-Schmidt) is done by one block, and so is all of a
// matrix that has one block.
#pragma once

#include "common/orthogonalize.h"
#include "cuda/block/block.cuh"

namespace gradzip::cuda {

constexpr int kOrthoMost = 64;  // columns; wider matrices, and those with fewer rows than columns, take Gram-Schmidt
constexpr int kOrthoBatch = 96;  // matrices whose table fits the 4 KB of kernel arguments
constexpr int kOrthoRoom = 5632;  // doubles of shared memory for rows and factors

struct OrthoState {  // zero at launch
  uint32_t ticket[2];
  Verdict verdict;
};

// A matrix and its scratch memory: the Gram matrix of each block, w, then that of Gram-Schmidt.
struct OrthoMatrix {
  float* data;
  int64_t rows;
  double* scratch;
  int32_t columns;
  uint32_t first_block;  // of the grid
};

struct OrthoTable {
  int32_t count;
  OrthoMatrix matrices[kOrthoBatch];
};
static_assert(sizeof(OrthoTable) < 4000, "with the other arguments it fits the 4 KB that a kernel may have");

struct OrthoShared {
  double room[kOrthoRoom];
  double row[kOrthoMost], length[kOrthoMost], inverse[kOrthoMost], partial[kLanes];
  int64_t index[kLanes];
  int32_t flag;
};

GZ_HD int64_t ortho_blocks(int64_t rows, int64_t columns) {
  return columns > rows || columns > kOrthoMost ? 1 : (rows + kGramRows - 1) / kGramRows;
}

GZ_HD int64_t ortho_scratch(int64_t rows, int64_t columns) {
  const int64_t squares = columns > rows || columns > kOrthoMost ? 0 : ortho_blocks(rows, columns) + 1;
  return squares * columns * columns + rows * columns + rows + columns;
}

// --- Gram matrices: g[a * columns + b] = column a . column b for a <= b

// For up to 4 columns the CPU sums every (16 / columns)-th row, of 3 as of 4, and those sums by halves.
static __device__ void gram_narrow(const float* x, int rows, int columns, OrthoShared& s, double* g) {
  const int n = rows * columns, classes = columns == 3 ? 4 : 16 / columns, pairs = columns * (columns + 1) / 2;
  for (int i = int(threadIdx.x); i < n; i += kBlock) s.room[i] = double(x[i]);
  __syncthreads();
  const int mine = int(threadIdx.x) % classes, pair = int(threadIdx.x) / classes;
  int a = 0, b = pair;
  for (; a < columns - 1 && b >= columns - a; ++a) b -= columns - a;
  b += a;
  double sum = 0.0;
  if (pair < pairs) {
#pragma unroll 4
    for (int i = mine; i < rows; i += classes) sum = fma(s.room[i * columns + a], s.room[i * columns + b], sum);
  }
  __syncthreads();
  if (pair < pairs) s.room[int(threadIdx.x)] = sum;
  __syncthreads();
  if (pair < pairs && mine == 0) {
    const double* sums = s.room + threadIdx.x;
    double total = 0.0;
    for (int c = 0; c < classes / 2; ++c) total += sums[c] + sums[c + classes / 2];
    g[a * columns + b] = total;
  }
  __syncthreads();
}

// Any number of columns: a thread takes B x B products, row by row.
template <int B>
static __device__ void gram_tiles(const float* x, int rows, int columns, OrthoShared& s, double* g) {
  const int tiles = (columns + B - 1) / B, width = tiles * B, most = kOrthoRoom / width;
  int a = 0, b = int(threadIdx.x);
  for (; a < tiles - 1 && b >= tiles - a; ++a) b -= tiles - a;
  b += a;
  const bool busy = b < tiles;
  double acc[B][B] = {};
  for (int first = 0; first < rows; first += most) {
    const int count = rows - first < most ? rows - first : most;
#pragma unroll 4
    for (int at = int(threadIdx.x); at < count * width; at += kBlock) {
      const int i = at / width, c = at - i * width;
      s.room[at] = c < columns ? double(x[(first + i) * columns + c]) : 0.0;
    }
    __syncthreads();
    if (busy) {
      const double *left = s.room + a * B, *right = s.room + b * B;
#pragma unroll 2
      for (int i = 0; i < count; ++i, left += width, right += width) {
#pragma unroll
        for (int u = 0; u < B; ++u)
#pragma unroll
          for (int v = 0; v < B; ++v) acc[u][v] = fma(left[u], right[v], acc[u][v]);  // the product is exact
      }
    }
    __syncthreads();
  }
  for (int u = 0; busy && u < B; ++u)
    for (int v = 0; v < B; ++v) {
      const int i = a * B + u, j = b * B + v;
      if (i <= j && j < columns) g[i * columns + j] = acc[u][v];
    }
}

static __device__ void gram_block(const OrthoMatrix& m, int64_t block, OrthoShared& s) {
  const int64_t first = block * kGramRows;
  const int columns = m.columns, rows = int(m.rows - first < kGramRows ? m.rows - first : kGramRows);
  const float* x = m.data + first * columns;
  double* g = m.scratch + block * columns * columns;
  if (columns <= 4)
    gram_narrow(x, rows, columns, s, g);
  else if (columns <= 22)  // at most kBlock pairs of them
    gram_tiles<1>(x, rows, columns, s, g);
  else if (columns <= 44)
    gram_tiles<2>(x, rows, columns, s, g);
  else
    gram_tiles<4>(x, rows, columns, s, g);
}

// --- from the Gram matrices of all blocks to w, for which x w is orthonormal; w is stored behind them

static __device__ Verdict factor(const OrthoMatrix& m, int64_t blocks, OrthoShared& s) {
  const int n = m.columns;
  double *g = s.room, *w = m.scratch + blocks * n * n;
  __syncthreads();
  for (int at = int(threadIdx.x); at < n * n; at += kBlock) {
    double total = 0.0;
    if (at / n <= at % n) {
#pragma unroll 4
      for (int64_t b = 0; b < blocks; ++b) total += m.scratch[b * n * n + at];
    }
    g[at] = total;
  }
  if (threadIdx.x == 0) s.flag = 0;
  __syncthreads();
  const int t = int(threadIdx.x);
  if (t < n) {
    const double length = sqrt(g[t * n + t]);
    s.length[t] = length;
    if (!(length > 0.0 && length < bits_float(kInfBits))) report(&s.flag);
  }
  __syncthreads();
  if (s.flag) return Verdict::dependent;
  // R, of columns scaled to length 1.
  for (int at = t; at < n * n; at += kBlock) g[at] /= s.length[at / n] * s.length[at % n];
  for (int j = 0; j < n; ++j) {
    __syncthreads();
    const double pivot = g[j * n + j];
    if (!(pivot > kLeastPivot)) return Verdict::dependent;
    if (t >= j && t < n) s.row[t] = g[j * n + t] / sqrt(pivot);
    __syncthreads();
    if (t >= j && t < n) g[j * n + t] = s.row[t];
    for (int i = j + 1 + warp(); i < n; i += kBlock / kLanes)
      for (int k = i + lane(); k < n; k += kLanes) g[i * n + k] -= s.row[i] * s.row[k];
  }
  __syncthreads();
  if (t < n) s.inverse[t] = 1.0 / g[t * n + t];
  __syncthreads();
  // R^-1, one warp per row: entries depend on those to their left, and a lane holds the sums of two.
  for (int i = warp(); i < n; i += kBlock / kLanes) {
    double dot[2] = {};
    for (int k = 0; k < n; ++k) {
      const double sum = __shfl_sync(kAllLanes, dot[k / kLanes], k % kLanes);
      const double entry = k < i ? 0.0 : k == i ? s.inverse[k] : -sum * s.inverse[k];
      if (lane() == 0) w[i * n + k] = entry;
      if (k < i) continue;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int c = lane() + u * kLanes;
        if (c > k && c < n) dot[u] += entry * g[k * n + c];
      }
    }
  }
  __syncthreads();
  if (t < n) {
    double total = s.inverse[t];
    for (int i = 0; i < t; ++i) total += fabs(w[i * n + t]);
    if (total > kGrowthLimit) report(&s.flag);
  }
  __syncthreads();
  for (int at = t; at < n * n; at += kBlock) w[at] /= s.length[at / n];
  __syncthreads();
  return s.flag ? Verdict::again : Verdict::done;
}

// --- x = x w

static __device__ void transform_block(const OrthoMatrix& m, int64_t blocks, int64_t block, OrthoShared& s) {
  const int64_t start = block * kGramRows;
  const int n = m.columns, rows = int(m.rows - start < kGramRows ? m.rows - start : kGramRows);
  float* x = m.data + start * n;
  const double* w = m.scratch + blocks * n * n;
  const int width = (n + 3) / 4 * 4;
  __syncthreads();
  const int lanes = n == 3 ? 4 : n;
  for (int at = int(threadIdx.x); at < lanes * width; at += kBlock) {
    const int k = at / width, c = at - k * width;
    s.room[at] = k < n && c < n ? w[k * n + c] : 0.0;
  }
  __syncthreads();
  if (n <= 4) {  // the CPU's order is that of a rotated row
    for (int i = int(threadIdx.x); i < rows; i += kBlock) {
      double v[4] = {};
      for (int c = 0; c < n; ++c) v[c] = double(x[i * n + c]);
      for (int c = 0; c < n; ++c) {
        double y = v[c] * s.room[c * width + c];
        for (int d = 1; d < lanes; ++d) y += v[(c + d) % lanes] * s.room[(c + d) % lanes * width + c];
        x[i * n + c] = float(y);
      }
    }
    return;
  }
  double* panel = s.room + n * width;
  const int stride = n | 1, most = (kOrthoRoom - n * width) / stride;  // an odd stride: no bank conflicts
  for (int first = 0; first < rows; first += most) {
    const int count = rows - first < most ? rows - first : most;
    for (int at = int(threadIdx.x); at < count * n; at += kBlock)
      panel[at / n * stride + at % n] = double(x[first * n + at]);
    __syncthreads();
    for (int at = int(threadIdx.x); at < count * (width / 4); at += kBlock) {
      const int i = at % count, c = at / count * 4, depth = c + 4 < n ? c + 4 : n;
      double acc[4] = {};
      for (int k = 0; k < depth; ++k) {
        const double v = panel[i * stride + k], *f = s.room + k * width + c;
#pragma unroll
        for (int u = 0; u < 4; ++u) acc[u] += v * f[u];
      }
#pragma unroll
      for (int u = 0; u < 4; ++u)
        if (c + u < n) x[(first + i) * n + c + u] = float(acc[u]);
    }
    __syncthreads();
  }
}

// --- Gram-Schmidt by one block. A thread has the same rows throughout, so only sums need barriers.

class GramSchmidt {
 public:
  __device__ GramSchmidt(const OrthoMatrix& m, OrthoShared& s)
      : m_(m),
        s_(s),
        q_(m.scratch + ortho_scratch(m.rows, m.columns) - m.rows * m.columns - m.rows - m.columns),
        covered_(q_ + m.rows * m.columns),
        accepted_(reinterpret_cast<int32_t*>(covered_ + m.rows)) {}

  __device__ void run() {
    for (int c = 0; c < m_.columns; ++c) take(c);
    // Last, so that a replaced column does not displace an original one.
    const int independent = count_;
    for (int64_t i = threadIdx.x; i < m_.rows; i += kBlock) {
      covered_[i] = 0.0;
      for (int j = 0; j < independent; ++j) covered_[i] += square(column(accepted_[j])[i]);
    }
    for (int c = 0, j = 0; c < m_.columns; ++c) {
      if (j < independent && accepted_[j] == c)
        ++j;
      else
        complete(c);
    }
    for (int64_t i = threadIdx.x; i < m_.rows; i += kBlock)
      for (int c = 0; c < m_.columns; ++c) m_.data[i * m_.columns + c] = float(column(c)[i]);
  }

 private:
  __device__ static double square(double x) { return x * x; }
  __device__ double* column(int64_t c) { return q_ + c * m_.rows; }

  // v -= factor * q, unless q is null; v . with.
  __device__ double step(double* v, const double* q, double factor, const double* with) {
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < m_.rows; i += kBlock) {
      if (q) v[i] -= factor * q[i];
      sum += v[i] * with[i];
    }
    return block_sum(sum, s_.partial);
  }

  __device__ void accept(int c) {
    double *v = column(c), factor = 0.0;
    const double* q = nullptr;
    for (int round = 0; round < 2; ++round)
      for (int j = 0; j < count_; ++j) {
        const double* next = column(accepted_[j]);
        factor = step(v, q, factor, next);
        q = next;
      }
    const double rest = sqrt(step(v, q, factor, v));
    const bool independent = rest > kLeastSine;
    for (int64_t i = threadIdx.x; i < m_.rows; i += kBlock) v[i] = independent ? v[i] / rest : 0.0;
    if (!independent) return;
    if (threadIdx.x == 0) accepted_[count_] = c;
    ++count_;
    __syncthreads();
  }

  __device__ void take(int c) {
    double* v = column(c);
    for (int64_t i = threadIdx.x; i < m_.rows; i += kBlock) v[i] = double(m_.data[i * m_.columns + c]);
    const double length = sqrt(step(v, nullptr, 0.0, v));
    const bool usable = length > 0.0 && length < double(bits_float(kInfBits));
    for (int64_t i = threadIdx.x; i < m_.rows; i += kBlock) v[i] = usable ? v[i] / length : 0.0;
    if (usable) accept(c);
  }

  __device__ void complete(int c) {
    if (count_ >= m_.rows) return;
    const int64_t axis = least_covered();
    double* v = column(c);
    if (axis % kBlock == threadIdx.x) v[axis] = 1.0;
    const int before = count_;
    accept(c);
    if (count_ == before) return;
    for (int64_t i = threadIdx.x; i < m_.rows; i += kBlock) covered_[i] += v[i] * v[i];
  }

  // The axis that is farthest from the span, the first of several.
  __device__ int64_t least_covered() {
    double least = 2.0 * double(m_.columns);  // more than any
    int64_t axis = m_.rows;
    for (int64_t i = threadIdx.x; i < m_.rows; i += kBlock)
      if (covered_[i] < least) least = covered_[i], axis = i;
    warp_least(least, axis);
    __syncthreads();
    if (lane() == 0) s_.partial[warp()] = least, s_.index[warp()] = axis;
    __syncthreads();
    const int from = lane() < warps() ? lane() : 0;
    least = s_.partial[from], axis = s_.index[from];
    warp_least(least, axis);
    return axis;
  }
  __device__ static void warp_least(double& least, int64_t& axis) {
    for (int d = kLanes / 2; d > 0; d /= 2) {
      const double other = __shfl_xor_sync(kAllLanes, least, d);
      const int64_t where = __shfl_xor_sync(kAllLanes, axis, d);
      if (other < least || (other == least && where < axis)) least = other, axis = where;
    }
  }

  const OrthoMatrix& m_;
  OrthoShared& s_;
  double *q_, *covered_;  // columns; squared length of each axis within the current span
  int32_t* accepted_;  // columns of the span
  int count_ = 0;  // number of accepted columns
};

// --- the launches

__global__ void __launch_bounds__(kBlock) orthogonalize_kernel(OrthoTable table, OrthoState* states, int pass) {
  __shared__ OrthoShared shared;
  int index = 0;
  while (index + 1 < table.count && table.matrices[index + 1].first_block <= blockIdx.x) ++index;
  const OrthoMatrix m = table.matrices[index];
  OrthoState& state = states[index];
  const int64_t blocks = ortho_blocks(m.rows, m.columns), block = blockIdx.x - m.first_block;
  const bool alone = blocks == 1;
  if (pass == 1 && alone) return;

  Verdict verdict = Verdict::dependent;
  if (pass == 1) {
    verdict = state.verdict;
    if (verdict != Verdict::dependent) transform_block(m, blocks, block, shared);
    if (verdict == Verdict::done || !last_block(&state.ticket[1], unsigned(blocks))) return;
  } else if (m.columns <= m.rows && m.columns <= kOrthoMost) {
    gram_block(m, block, shared);
    if (!alone && !last_block(&state.ticket[0], unsigned(blocks))) return;
    verdict = factor(m, blocks, shared);
    if (threadIdx.x == 0) state.verdict = verdict;
    if (!alone) return;
    if (verdict != Verdict::dependent) transform_block(m, blocks, 0, shared);
    if (verdict == Verdict::done) return;
  }
  // The rest is done by this block alone: the second round, or dependent columns.
  if (verdict == Verdict::again) {
    __syncthreads();
    for (int64_t b = 0; b < blocks; ++b) gram_block(m, b, shared);
    verdict = factor(m, blocks, shared);
    if (verdict != Verdict::dependent) {
      for (int64_t b = 0; b < blocks; ++b) transform_block(m, blocks, b, shared);
      return;
    }
  }
  __syncthreads();
  GramSchmidt(m, shared).run();
}

}  // namespace gradzip::cuda

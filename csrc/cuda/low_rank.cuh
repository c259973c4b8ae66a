// The passes of low-rank compression over an n x c gradient. A block stages square tiles of the gradient in shared
// memory, 16 bytes per load, adding m to e on the way, so each is read once in either direction of the product; threads
// then compute the outputs of the tile. Parts of one output tile are added in order by the last block to arrive:
// results depend on the sizes only, not on the device or the order of blocks.
#pragma once

#include "common/restore.h"
#include "cuda/block/quads.cuh"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

constexpr int kLowRankTile = 64;  // rows and columns
constexpr int kLowRankQuads = kLowRankTile / 4;  // of a row
constexpr int kLowRankStride = kLowRankQuads + 1;  // float4s: neighbouring rows start in different banks
constexpr int kLowRankMost = 64;  // largest rank of one launch
constexpr int kLowRankBatch = 32;  // matrices whose table fits the 4 KB of kernel arguments

GZ_DEVICE float sum_of(float a, float b) { return a + b; }
GZ_DEVICE float4 sum_of(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// The gradient as products read it: m, of the type `dtype`, or e after e += m.
struct Gradient {
  const void* m;
  float* e;  // or null
  int64_t rows, columns;
  int32_t dtype, wide;  // wide: whether rows of both start at multiples of four elements
};

GZ_DEVICE void load_as(const float* x, float* value) { *value = *x; }
GZ_DEVICE void load_as(const float* x, float4* value) { *value = *reinterpret_cast<const float4*>(x); }
template <class T>
GZ_DEVICE void load_as(const T* x, float* value) {
  *value = load1(x);
}
template <class T>
GZ_DEVICE void load_as(const T* x, float4* value) {
  *value = load4(x);
}

// V is what a thread reads at a time: float4 if rows are wide, else float, so that no load is cut at the end of a row.
// kTogether loads of m, and as many of e, are in flight: more would take more registers than four blocks have.
template <class V, int kTogether, class T>
GZ_DEVICE void stage_rows(const Gradient& x, const T* m, int64_t row, int64_t column, V* tile) {
  constexpr int kWidth = int(sizeof(V) / sizeof(float)), kAcross = kLowRankTile / kWidth, kRows = kBlock / kAcross;
  constexpr int kStride = 4 * kLowRankStride / kWidth;
  const int y = int(threadIdx.x) / kAcross, across = int(threadIdx.x) % kAcross;
  row += y, column += kWidth * across;
  const int rows = column < x.columns ? int(x.rows - row < kLowRankTile ? x.rows - row : kLowRankTile) : 0;
  const int64_t step = kRows / kWidth * x.columns;  // of V
  m += row * x.columns + column;
  V* e = sizeof(T) == sizeof(float) && x.e ? reinterpret_cast<V*>(x.e + row * x.columns + column) : nullptr;
  tile += y * kStride + across;
#pragma unroll 1
  for (int first = 0; first < kLowRankTile; first += kTogether * kRows) {
    V value[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      value[u] = V{};
      if (first + u * kRows < rows) load_as(m + u * step * kWidth, value + u);
    }
    if (e) {
      V old[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) old[u] = first + u * kRows < rows ? e[u * step] : V{};
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        value[u] = sum_of(value[u], old[u]);
        if (first + u * kRows < rows) e[u * step] = value[u];
      }
      e += kTogether * step;
    }
    m += kTogether * step * kWidth;
#pragma unroll
    for (int u = 0; u < kTogether; ++u) tile[(first + u * kRows) * kStride] = value[u];
  }
}

// kHalf: whether m has 16-bit floats.
template <bool kHalf>
GZ_DEVICE void stage_gradient(const Gradient& x, int64_t row, int64_t column, float4* tile) {
  const auto stage = [&](auto* m) {
    if (x.wide)
      stage_rows<float4, 4>(x, m, row, column, tile);
    else
      stage_rows<float, 2>(x, m, row, column, reinterpret_cast<float*>(tile));
  };
  if (!kHalf)
    stage(static_cast<const float*>(x.m));
  else if (x.dtype == int32_t(Dtype::bfloat16))
    stage(static_cast<const BFloat16*>(x.m));
  else
    stage(static_cast<const Float16*>(x.m));
}

// A factor of the gradient, (length, rank), of which one launch takes `count` <= kLowRankMost columns from `first` on.
struct Factor {
  const float* data;
  int64_t length;
  int rank, first, count;
};

// Rows [begin, begin + kLowRankTile) of a factor, R columns; zeros outside.
template <int R>
GZ_DEVICE void stage_factor(const Factor& q, int64_t begin, float* tile) {
  for (int at = int(threadIdx.x); at < kLowRankTile * R; at += kBlock) {
    const int64_t i = begin + at / R;
    const int k = at % R;
    tile[at] = i < q.length && k < q.count ? __ldg(q.data + i * q.rank + (q.first + k)) : 0.0f;
  }
}

template <int K>
GZ_DEVICE void load_factors(const float* q, float (&f)[K]) {
  if constexpr (K % 4 == 0) {
#pragma unroll
    for (int k = 0; k < K; k += 4) {
      const float4 v = *reinterpret_cast<const float4*>(q + k);
      f[k] = v.x, f[k + 1] = v.y, f[k + 2] = v.z, f[k + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) f[k] = q[k];
  }
}

// The distribution of the outputs of a tile, kLowRankTile x R, over the threads of a block: each takes A rows (columns,
// if transposed), K factors and one of S slices of the sum.
template <int R>
struct LowRankShare {
  static constexpr int K = R < 8 ? R : 8, A = R == 64 ? 2 : 1;
  static constexpr int kOutputs = kLowRankTile / A, kGroups = R / K, S = kBlock / (kOutputs * kGroups);
  static constexpr int kSlice = kLowRankTile / S;
  static constexpr int kStride = R + 1;  // of the outputs in shared memory: no bank conflicts
  static_assert(kOutputs * kGroups * S == kBlock && kSlice % 4 == 0, "all threads have work");
  static_assert(S * kLowRankTile * kStride <= 4 * kLowRankTile * kLowRankStride, "they take the place of the tile");
};

// A product of a launch. `partial` has room for the outputs of every block, ceil(outputs / kLowRankTile) * parts of them;
// `tickets`, zero at launch, one for each output tile. Neither is used if parts = 1.
struct ProjectEntry {
  Gradient x;
  Factor q;
  float *out, *partial;
  uint32_t* tickets;
  uint32_t parts, first_block;
};
struct ProjectTable {
  int32_t count;
  ProjectEntry entries[kLowRankBatch];
};
static_assert(sizeof(ProjectTable) < 4000, "it fits the 4 KB that a kernel may have");

// With one block less for 16-bit floats, nothing is spilled.
template <int R, bool kTranspose, bool kHalf>
__global__ void __launch_bounds__(kBlock, (R < 64 ? 4 : 3) - kHalf) project_kernel(ProjectTable table) {
  using Share = LowRankShare<R>;
  constexpr int K = Share::K, A = Share::A, kOutputs = Share::kOutputs;
  __shared__ float4 tile[kLowRankTile * kLowRankStride];
  __shared__ float4 factor4[(kLowRankTile * R + 3) / 4];
  float* factor = reinterpret_cast<float*>(factor4);
  float* flat = reinterpret_cast<float*>(tile);

  const ProjectEntry entry = table.entries[entry_of_block(table)];
  const Gradient& x = entry.x;
  const Factor& q = entry.q;
  const unsigned parts = entry.parts;
  const unsigned block = blockIdx.x - entry.first_block;
  float *out = entry.out, *partial = entry.partial;
  uint32_t* tickets = entry.tickets;
  const int64_t output = block / parts * int64_t(kLowRankTile);
  const unsigned part = block % parts;
  const int64_t tiles = (q.length + kLowRankTile - 1) / kLowRankTile;
  const int o = int(threadIdx.x) % kOutputs, group = int(threadIdx.x) / kOutputs % Share::kGroups;
  const int slice = int(threadIdx.x) / kOutputs / Share::kGroups;
  float acc[A][K] = {};
  for (int64_t t = tiles * part / parts; t < tiles * (part + 1) / parts; ++t) {
    const int64_t begin = t * kLowRankTile;
    stage_gradient<kHalf>(x, kTranspose ? begin : output, kTranspose ? output : begin, tile);
    stage_factor<R>(q, begin, factor);
    __syncthreads();
    const float* mine = factor + group * K;
    if constexpr (kTranspose) {
#pragma unroll 4
      for (int i = slice * Share::kSlice; i < (slice + 1) * Share::kSlice; ++i) {
        float f[K];
        load_factors<K>(mine + i * R, f);
#pragma unroll
        for (int a = 0; a < A; ++a) {
          const float v = flat[i * 4 * kLowRankStride + o + a * kOutputs];
#pragma unroll
          for (int k = 0; k < K; ++k) acc[a][k] = fmaf(v, f[k], acc[a][k]);
        }
      }
    } else {
#pragma unroll 2
      for (int j = slice * Share::kSlice; j < (slice + 1) * Share::kSlice; j += 4) {
        float v[A][4];
#pragma unroll
        for (int a = 0; a < A; ++a) load_factors<4>(flat + (o + a * kOutputs) * 4 * kLowRankStride + j, v[a]);
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          float f[K];
          load_factors<K>(mine + (j + u) * R, f);
#pragma unroll
          for (int a = 0; a < A; ++a)
#pragma unroll
            for (int k = 0; k < K; ++k) acc[a][k] = fmaf(v[a][u], f[k], acc[a][k]);
        }
      }
    }
    __syncthreads();
  }

  // The slices, in order.
#pragma unroll
  for (int a = 0; a < A; ++a)
#pragma unroll
    for (int k = 0; k < K; ++k)
      flat[(slice * kLowRankTile + o + a * kOutputs) * Share::kStride + group * K + k] = acc[a][k];
  __syncthreads();
  const int64_t outputs = kTranspose ? x.columns : x.rows;
  partial += block / parts * int64_t(parts) * (kLowRankTile * R);
  for (int at = int(threadIdx.x); at < kLowRankTile * R; at += kBlock) {
    const int i = at / R, k = at % R;
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < Share::S; ++s) sum += flat[(s * kLowRankTile + i) * Share::kStride + k];
    if (parts > 1)
      partial[part * (kLowRankTile * R) + at] = sum;
    else if (output + i < outputs && k < q.count)
      out[(output + i) * q.rank + q.first + k] = sum;
  }
  if (parts == 1 || !last_block(tickets + block / parts, parts)) return;
  for (int at = int(threadIdx.x); at < kLowRankTile * R; at += kBlock) {
    const int i = at / R, k = at % R;
    if (output + i >= outputs || k >= q.count) continue;
    float sum = 0.0f;
#pragma unroll 4
    for (unsigned p = 0; p < parts; ++p) sum += partial[p * (kLowRankTile * R) + at];
    out[(output + i) * q.rank + q.first + k] = sum;
  }
}

// Products p q^T; a block takes one tile. An element is fused multiply-adds over the rank in order, with the bits of the
// CPU.
constexpr int kExpandRanks = 32;  // at a time

struct Product {
  const float *p, *q;
};
struct ProductStage {
  float4 left[kExpandRanks * kLowRankStride], right[kExpandRanks * kLowRankStride];
};

GZ_DEVICE void stage_columns(const float* factor, int64_t length, int64_t rank, int64_t row, int64_t first, int count,
                             float4* stage) {
  float* tile = reinterpret_cast<float*>(stage);
  for (int at = int(threadIdx.x); at < kLowRankTile * count; at += kBlock) {
    const int i = at / count, k = at - i * count;
    tile[k * 4 * kLowRankStride + i] = row + i < length ? __ldg(factor + (row + i) * rank + first + k) : 0.0f;
  }
}

// The tile of a block, and the four rows and columns of this thread in it.
struct ExpandTile {
  int64_t rows, columns, row, column;
  int x, y;
  bool wide;

  GZ_DEVICE ExpandTile(int64_t rows, int64_t columns, bool wide, unsigned block)
      : rows(rows),
        columns(columns),
        x(int(threadIdx.x) % kLowRankQuads),
        y(int(threadIdx.x) / kLowRankQuads),
        wide(wide) {
    const int64_t across = (columns + kLowRankTile - 1) / kLowRankTile;
    row = block / across * kLowRankTile;
    column = block % across * kLowRankTile;
  }
  GZ_DEVICE int64_t at(int u) const { return (row + 4 * y + u) * columns + column + 4 * x; }
  GZ_DEVICE int64_t left(int u) const { return row + 4 * y + u < rows ? columns - column - 4 * x : 0; }

  GZ_DEVICE void load(const float* from, float4 (&value)[4]) const {
#pragma unroll
    for (int u = 0; u < 4; ++u) value[u] = load4(from + at(u), left(u), wide);
  }
  GZ_DEVICE void store(float* to, const float4 (&value)[4]) const {
#pragma unroll
    for (int u = 0; u < 4; ++u) store4(to + at(u), value[u], left(u), wide);
  }
  template <class T>
  GZ_DEVICE void store(T* to, const float4 (&value)[4]) const {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const float four[4] = {value[u].x, value[u].y, value[u].z, value[u].w};
      store4(to + at(u), int64_t(0), left(u), four);
    }
  }
  GZ_DEVICE void multiply(const Product& factors, int64_t rank, ProductStage& stage, float4 (&acc)[4]) const {
#pragma unroll
    for (int u = 0; u < 4; ++u) acc[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int64_t first = 0; first < rank; first += kExpandRanks) {
      const int count = int(rank - first < kExpandRanks ? rank - first : kExpandRanks);
      stage_columns(factors.p, rows, rank, row, first, count, stage.left);
      stage_columns(factors.q, columns, rank, column, first, count, stage.right);
      __syncthreads();
#pragma unroll 4
      for (int k = 0; k < count; ++k) {
        float f[4];
        load_factors<4>(reinterpret_cast<const float*>(stage.left + k * kLowRankStride + y), f);
        const float4 v = stage.right[k * kLowRankStride + x];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          acc[u].x = fmaf(v.x, f[u], acc[u].x);
          acc[u].y = fmaf(v.y, f[u], acc[u].y);
          acc[u].z = fmaf(v.z, f[u], acc[u].z);
          acc[u].w = fmaf(v.w, f[u], acc[u].w);
        }
      }
      __syncthreads();
    }
  }
};

// e = from - first, unless `number` is neither null nor finite, and then, unless it is null, out = second; or out = first,
// if `from` is null. `out` may be `from`.
struct ExpandEntry {
  int64_t rows, columns, rank;
  Product first;
  const float *from, *number;
  float* e;
  Product second;
  void* out;
  int64_t dtype;  // of `out`
  uint32_t wide, first_block;  // wide: whether rows of all start at multiples of four elements
};
struct ExpandTable {
  int32_t count;
  ExpandEntry entries[kLowRankBatch];
};
static_assert(sizeof(ExpandTable) < 4000, "it fits the 4 KB that a kernel may have");

__global__ void __launch_bounds__(kBlock) expand_product_kernel(ExpandTable table) {
  __shared__ ProductStage stage;
  const auto [rows, columns, rank, first, from, number, e, second, out, dtype, wide, first_block] =
      table.entries[entry_of_block(table)];
  const ExpandTile tile(rows, columns, wide, blockIdx.x - first_block);
  float4 old[4], acc[4];
  if (from) tile.load(from, old);
  tile.multiply(first, rank, stage, acc);
  if (from) {
#pragma unroll
    for (int u = 0; u < 4; ++u)
      old[u] = make_float4(old[u].x - acc[u].x, old[u].y - acc[u].y, old[u].z - acc[u].z, old[u].w - acc[u].w);
    if (!number || !restores(__ldg(number))) tile.store(e, old);
    if (!out) return;
    if (second.p != first.p || second.q != first.q) tile.multiply(second, rank, stage, acc);
  }
  typed_out(out, dtype, [&](auto* to) { tile.store(to, acc); });
}

}  // namespace gradzip::cuda

// Tiles of the transforms that methods use most: a thread has rows in registers. All lengths are known to the compiler, so
// that neither places nor factors are computed. Lanes of a warp have neighbouring rows, so that a vote about one
// coefficient is 32 neighbouring bits of a status bitmap.
#pragma once

#include "common/transform.h"
#include "cuda/block/code_stream.cuh"
#include "cuda/block/quads.cuh"
#include "cuda/block/ranked_words.cuh"

namespace gradzip::cuda {

// --- a row: its elements, then its coefficients

GZ_HD constexpr uint32_t log2_of(int power) { return power > 1 ? 1 + log2_of(power / 2) : 0; }

template <int L>
struct FourierRow {
  static constexpr int kLength = L, kGroup = 2, kNumbers = L / 2;
  static constexpr uint32_t kCode = uint32_t(TransformKind::fourier) | log2_of(L) << 8;
  float v[kNumbers][2];

  GZ_DEVICE float& element(int e) { return v[bit_reversed(e / 2, kNumbers)][e % 2]; }
  GZ_DEVICE float& re(int p) { return v[p][0]; }
  GZ_DEVICE float& im(int p) { return v[p][1]; }

  // The butterflies of all blocks of 2 half numbers.
  template <bool kInverse>
  GZ_DEVICE void stage(int half) {
    constexpr Twiddles twiddles;
#pragma unroll
    for (int i = 0; i < kNumbers / 2; ++i) {
      const int j = i % half;
      float *a = v[2 * i - j], *b = v[2 * i - j + half];
      const float* w = twiddle(twiddles.of, j, half);
      if (j == 0)
        unit_butterfly(a, b);
      else if (2 * j == half)
        kInverse ? inverse_quarter_butterfly(a, b) : quarter_butterfly(a, b);
      else
        kInverse ? inverse_butterfly(a, b, w) : butterfly(a, b, w);
    }
  }
  template <bool kInverse>
  GZ_DEVICE void untangle_all() {
    constexpr Twiddles twiddles;
    const float factor = half_factor(L);
    tangle_first(v[0], unit_factor(L));
    tangle_middle(v[kNumbers / 2], factor);
#pragma unroll
    for (int k = 1; k < kNumbers / 2; ++k) {
      const float* w = twiddle(twiddles.of, k, kNumbers);
      kInverse ? tangle(v[k], v[kNumbers - k], w, factor) : untangle(v[k], v[kNumbers - k], w, factor);
    }
  }
  GZ_DEVICE void forward() {
#pragma unroll
    for (int bit = 0; 1 << bit < kNumbers; ++bit) stage<false>(1 << bit);
    untangle_all<false>();
  }
  GZ_DEVICE void inverse() {
    untangle_all<true>();
#pragma unroll
    for (int bit = 0; 1 << bit < kNumbers; ++bit) stage<true>(kNumbers / 2 >> bit);
  }
};

// Along two axes.
template <int A, int B>
struct DctRow {
  static constexpr int kLength = A * B, kGroup = 1;
  static constexpr uint32_t kCode = uint32_t(TransformKind::dct) | (A - 1) << 8 | (B - 1) << 16;
  float v[kLength];

  GZ_DEVICE float& element(int e) { return v[e]; }
  GZ_DEVICE float& re(int p) { return v[p]; }
  GZ_DEVICE float& im(int p) { return v[p]; }  // there is none: not used
  GZ_DEVICE void forward() {
    if constexpr (A > 1)
      for (int i = 0; i < B; ++i) dct_forward<A>(v + i, B);
    if constexpr (B > 1)
      for (int i = 0; i < A; ++i) dct_forward<B>(v + i * B, 1);
  }
  GZ_DEVICE void inverse() {
    if constexpr (B > 1)
      for (int i = 0; i < A; ++i) dct_inverse<B>(v + i * B, 1);
    if constexpr (A > 1)
      for (int i = 0; i < B; ++i) dct_inverse<A>(v + i, B);
  }
};

// --- a tile

// See cuda/transform.cuh.
template <class Row>
struct RowTile {
  static constexpr int kThreads = Row::kLength == 1 ? 256 : 128, kBlocks = 512 / kThreads, kCopies = 2;
  static constexpr int kLength = Row::kLength, kGroup = Row::kGroup, kGroups = kLength / kGroup;  // of a row
  static constexpr int kRows = tile_rows(kLength), kHeld = kRows / kThreads;

  // Vote p kParts + i is about coefficient p of the rows [32 i, 32 i + 32). The last ones are about `rest`.
  static constexpr int kParts = kRows / kLanes, kRest = (kLength / kGroup + kLanes - 1) / kLanes * (kLength > 1);
  static constexpr int kRowVotes = kGroups * kParts, kVotes = kRowVotes + kRest;

  // Threads read their rows by way of shared memory, kChunk elements of 32 rows at a time. The pitch of rows spreads
  // neighbouring lanes over the banks.
  static constexpr int kChunk = kLength % 64 ? kLength : 32, kChunks = kLength / kChunk;
  static constexpr int kPitch = kChunk % 2 ? kChunk : kChunk + 4;
  static constexpr int kQuads = (kChunk + 3) / 4;  // of a lane
  // Chunks to load at a time: up to kInFlight quads, which eight short rows leave too few registers for.
  static constexpr int kInFlight = kLength == 8 ? 4 : 8;
  static constexpr int kBatch =
      kQuads < kInFlight && kHeld * kChunks % (kInFlight / kQuads) == 0 ? kInFlight / kQuads : 1;
  static constexpr int kRoom = kLanes * kPitch;
  static constexpr int kWindow = kThreads / kLanes * kRoom > 2048 ? kThreads / kLanes * kRoom : 2048;
  static_assert(kChunk % 4 == 0 || kPitch == kLength, "neighbouring elements are neighbours in shared memory");

  const TransformLayout& t;
  int count, whole, groups;
  Row rows[kHeld];  // kThreads apart
  float rest[2] = {};  // of the elements after the last whole row: this thread's group

  GZ_DEVICE explicit RowTile(const TransformLayout& layout) : t(layout) {}

  GZ_DEVICE void open(int64_t tile) {
    count = int(t.count(tile));
    whole = count / kLength;
    groups = (count + kGroup - 1) / kGroup;
  }

  GZ_DEVICE static constexpr int group() { return kGroup; }
  GZ_DEVICE static constexpr int tile_groups() { return kRows * kGroups; }
  GZ_DEVICE static float* window() {
    alignas(16) __shared__ float room[kWindow];
    return room;
  }

 private:
  GZ_DEVICE static float* room() { return window() + warp() * kRoom; }
  // Where element j of a chunk of 32 rows is, relative to its first one: in memory, and in `room`.
  GZ_DEVICE static constexpr int offset(int j) { return j / kChunk * kLength + j % kChunk; }
  GZ_DEVICE static constexpr int place(int j) { return j / kChunk * kPitch + j % kChunk; }
  // The first element of chunk u of the block; this warp's is 32 rows on for each warp before it.
  GZ_DEVICE static constexpr int chunk_begin(int u) { return u / kChunks * kThreads * kLength + u % kChunks * kChunk; }
  GZ_DEVICE static int warp_begin() { return warp() * kLanes * kLength; }
  // The vote about the rows r of this warp, among those about the same coefficient.
  GZ_DEVICE static int part(int r) { return r * (kThreads / kLanes) + warp(); }
  GZ_DEVICE bool is_wide(const void* x, int64_t dtype = int64_t(Dtype::float32)) const {
    const int nbytes = dtype == int64_t(Dtype::float32) ? 16 : 8;
    return count == kRows * kLength && reinterpret_cast<uintptr_t>(x) % nbytes == 0;
  }
  GZ_DEVICE bool has_rest() const { return count > whole * kLength; }
  GZ_DEVICE bool has_rest_group() const { return whole * kGroups + int(threadIdx.x) < groups; }

  // f(i, offset, place) for the quads i of this lane, relative to its first one.
  template <class F>
  GZ_DEVICE static void for_each_quad(F f) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i)
      if (kChunk % 4 == 0 || 4 * (kLanes * i + lane()) < kLanes * kChunk)
        f(i, offset(4 * kLanes * i), place(4 * kLanes * i));
  }

  // f(element, its place in the row's part of a chunk) for the elements that this thread has of chunk u.
  template <class F>
  GZ_DEVICE void for_each_own(int u, F f) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) f(rows[u / kChunks].element(u % kChunks * kChunk + i), i);
  }

 public:
  GZ_DEVICE void load(const void* x, int64_t dtype, int64_t begin) {
    if constexpr (kLength == 1) {
      typed_in(x, dtype, [&](auto* from) {
#pragma unroll
        for (int r = 0; r < kHeld; ++r) {
          const int i = r * kThreads + int(threadIdx.x);
          rows[r].element(0) = i < count ? load1(from + begin + i) : 0.0f;
        }
      });
      return;
    }
    const bool wide = is_wide(x, dtype), wide_floats = wide && dtype == int64_t(Dtype::float32);
    float* at = room();
    const auto mine = [&](int u) { return begin + (chunk_begin(u) + warp_begin() + offset(4 * lane())); };
#pragma unroll
    for (int first = 0; first < kHeld * kChunks; first += kBatch) {
      float4 quads[kBatch][kQuads];  // all loads in flight, of floats; others would take more registers
      if (wide_floats) {
#pragma unroll
        for (int u = 0; u < kBatch; ++u)
          for_each_quad([&](int i, int offset, int) {
            quads[u][i] = load4(static_cast<const float*>(x) + mine(first + u) + offset);
          });
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const auto put = [&](int to, const float4& quad) {
          *reinterpret_cast<float4*>(at + place(4 * lane()) + to) = quad;
        };
        if (wide_floats) {
          for_each_quad([&](int i, int, int to) { put(to, quads[u][i]); });
        } else {
          typed_in(x, dtype, [&](auto* from) {
            if (wide && sizeof(*from) == 2) {
              for_each_quad([&](int, int offset, int to) { put(to, load4(from + mine(first + u) + offset)); });
              return;
            }
#pragma unroll 1
            for (int j = lane(); j < kLanes * kChunk; j += kLanes) {
              const int e = chunk_begin(first + u) + warp_begin() + offset(j);
              at[place(j)] = e < whole * kLength ? load1(from + begin + e) : 0.0f;
            }
          });
        }
        __syncwarp();
        for_each_own(first + u, [&](float& element, int i) { element = at[lane() * kPitch + i]; });
        __syncwarp();
      }
    }
    if (has_rest()) {
      typed_in(x, dtype, [&](auto* from) {
#pragma unroll
        for (int part = 0; part < kGroup; ++part) {
          const int e = whole * kLength + kGroup * int(threadIdx.x) + part;
          rest[part] = e < count ? load1(from + begin + e) : 0.0f;
        }
      });
    }
  }

  GZ_DEVICE void store(float* to, bool add) {
    if constexpr (kLength == 1) {
#pragma unroll
      for (int r = 0; r < kHeld; ++r) {
        const int i = r * kThreads + int(threadIdx.x);
        if (i < count) to[i] = add ? to[i] + rows[r].element(0) : rows[r].element(0);
      }
      return;
    }
    const bool wide = is_wide(to);
    float* at = room();
    float* mine = to + (warp_begin() + offset(4 * lane()));
#pragma unroll
    for (int u = 0; u < kHeld * kChunks; ++u) {
      for_each_own(u, [&](float element, int i) { at[lane() * kPitch + i] = element; });
      __syncwarp();
      if (wide) {
        for_each_quad([&](int, int offset, int from) {
          float4 v = *reinterpret_cast<const float4*>(at + place(4 * lane()) + from);
          auto* out = reinterpret_cast<float4*>(mine + (chunk_begin(u) + offset));
          if (add) {
            const float4 o = *out;
            v = make_float4(o.x + v.x, o.y + v.y, o.z + v.z, o.w + v.w);
          }
          *out = v;
        });
      } else {
#pragma unroll 1
        for (int j = lane(); j < kLanes * kChunk; j += kLanes) {
          const int e = chunk_begin(u) + warp_begin() + offset(j);
          if (e < whole * kLength) to[e] = add ? to[e] + at[place(j)] : at[place(j)];
        }
      }
      __syncwarp();
    }
    if (has_rest()) {
#pragma unroll
      for (int part = 0; part < kGroup; ++part) {
        const int e = whole * kLength + kGroup * int(threadIdx.x) + part;
        if (e < count) to[e] = add ? to[e] + rest[part] : rest[part];
      }
    }
  }

  GZ_DEVICE void clear() {
#pragma unroll
    for (int r = 0; r < kHeld; ++r)
#pragma unroll
      for (int e = 0; e < kLength; ++e) rows[r].element(e) = 0.0f;
    rest[0] = rest[1] = 0.0f;
  }

  GZ_DEVICE void forward() {
#pragma unroll
    for (int r = 0; r < kHeld; ++r) rows[r].forward();
  }
  GZ_DEVICE void inverse() {
#pragma unroll
    for (int r = 0; r < kHeld; ++r) rows[r].inverse();
  }

  template <class F>
  GZ_DEVICE void for_each_group(F f) {
#pragma unroll
    for (int r = 0; r < kHeld; ++r)
#pragma unroll
      for (int p = 0; p < kGroups; ++p) f(p * kParts + part(r), rows[r].re(p), rows[r].im(p));
    if (has_rest_group()) f(kRowVotes + warp(), rest[0], rest[1]);
  }

  template <class F>
  GZ_DEVICE void vote(RankedWord* votes, F f) {
    constexpr int kMine = kHeld * kGroups;
    uint32_t mine[(kMine + kLanes - 1) / kLanes] = {};  // a lane keeps one in 32
#pragma unroll
    for (int r = 0; r < kHeld; ++r) {
      const bool inside = r * kThreads + int(threadIdx.x) < whole;
#pragma unroll
      for (int p = 0; p < kGroups; ++p) {
        const bool set = f(rows[r].re(p), rows[r].im(p));
        const unsigned word = __ballot_sync(kAllLanes, inside && set);
        const int i = r * kGroups + p;
        if (lane() == i % kLanes) mine[i / kLanes] = word;
      }
    }
    __syncthreads();  // nobody reads the votes of the last tile
#pragma unroll
    for (int first = 0; first < kMine; first += kLanes) {
      const int i = first + lane();
      if (i < kMine) votes[i % kGroups * kParts + part(i / kGroups)].word = mine[first / kLanes];
    }
    if (warp() < kRest) {
      const unsigned word = __ballot_sync(kAllLanes, has_rest_group() && f(rest[0], rest[1]));
      if (lane() == 0) votes[kRowVotes + warp()].word = word;
    }
    __syncthreads();
  }

  GZ_DEVICE uint32_t bitmap_word(const RankedWord* votes, int w) const {
    if (whole == kRows) return votes[w].word;
    uint32_t word = 0;
    for (int bit = 0; bit < 32 && 32 * w + bit < groups;) {
      const int g = 32 * w + bit, after = g - whole * kGroups;  // of the groups in rows
      const int row = after < 0 ? g % whole : after, v = (after < 0 ? g / whole * kParts : kRowVotes) + row / 32;
      const int left = after < 0 && whole - row / 32 * 32 < 32 ? whole % 32 : 32;
      word |= votes[v].word >> row % 32 << bit;
      bit += left - row % 32;
    }
    return word;
  }

  GZ_DEVICE uint32_t vote_of(const uint8_t* bitmap, int v) const {
    const bool in_rows = v < kRowVotes;
    if (whole == kRows && in_rows && reinterpret_cast<uintptr_t>(bitmap) % 4 == 0)
      return __ldg(reinterpret_cast<const uint32_t*>(bitmap) + v);
    const int row = 32 * (in_rows ? v % kParts : v - kRowVotes), end = in_rows ? whole : groups - whole * kGroups;
    if (row >= end) return 0;
    const int first = (in_rows ? v / kParts : kGroups) * whole + row;
    return read_bits_bytewise(bitmap, (groups + 7) / 8, first, end - row < 32 ? end - row : 32);
  }
};

}  // namespace gradzip::cuda

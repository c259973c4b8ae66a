// Transforms of short blocks, fused with the selection of the largest coefficients: a tile's coefficients are compared
// with an estimate of the threshold while they are in the L1 cache, and those that may be among the largest are kept.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "common/dtype.h"
#include "cpu/bitmap.h"
#include "cpu/half.h"
#include "cpu/ops.h"
#include "cpu/simd.h"
#include "cpu/transform_tile.h"

namespace gradzip::cpu {
namespace {

// A magnitude to rank a group by: its coefficient, or the energy of its pair, scaled so that it stays within range.
constexpr uint32_t kMagnitude = 0x7fffffffu;

GZ_INLINE void energies_body(const float* re, const float* im, int64_t n, float scale, float* energy) {
  for (int64_t i = 0; i < n; ++i) {
    const float a = re[i] * scale, b = im[i] * scale;
    energy[i] = a * a + b * b;
  }
}
GZ_SIMD_DISPATCH(void, energies, (const float* re, const float* im, int64_t n, float scale, float* energy),
                 (re, im, n, scale, energy))

// of[0] holds keys, the other arrays values that belong to them; what is kept of each goes to the same place of `to`,
// which has room for 16 floats more.
struct Arrays {
  const float* of[3];
  float* to[3];
  int count;
  const float* ahead = nullptr;  // what to prefetch meanwhile, if anything
};

// Sets the bits of the keys whose magnitude is at least `low`, and keeps these elements of all arrays. Returns their number.
GZ_INLINE int64_t keep_body(const Arrays& arrays, int64_t n, uint32_t low, uint8_t* bitmap) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += 64) {
    const int many = int(std::min<int64_t>(n - i, 64));
    uint64_t word = 0;
    for (int j = 0; j < many; ++j) word |= uint64_t((float_bits(arrays.of[0][i + j]) & kMagnitude) >= low) << j;
    std::memcpy(bitmap + i / 8, &word, size_t(many + 7) / 8);
    for (; word; word &= word - 1, ++kept)
      for (int a = 0; a < arrays.count; ++a) arrays.to[a][kept] = arrays.of[a][i + __builtin_ctzll(word)];
  }
  return kept;
}
template <class Count>
int64_t keep_arrays_scalar(const Arrays& arrays, Count, int64_t n, uint32_t low, uint8_t* bitmap) {
  return keep_body(arrays, n, low, bitmap);
}

// Of 8 lanes, those whose bit is set, in order.
struct Kept {
  alignas(8) uint8_t lanes[256][8];
  constexpr Kept() : lanes{} {
    for (int bits = 0; bits < 256; ++bits)
      for (int lane = 0, kept = 0; lane < 8; ++lane)
        if (bits >> lane & 1) lanes[bits][kept++] = uint8_t(lane);
  }
};
constexpr Kept kKept;

template <class Count>
GZ_AVX2 int64_t keep_arrays_avx2(const Arrays& arrays, Count, int64_t n, uint32_t low, uint8_t* bitmap) {
  const __m256i mask = _mm256_set1_epi32(int(kMagnitude)), below = _mm256_set1_epi32(int(low - 1));
  int64_t kept = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(arrays.of[0] + i));
    const __m256i reach = _mm256_cmpgt_epi32(_mm256_and_si256(key, mask), below);
    const auto bits = uint8_t(_mm256_movemask_ps(_mm256_castsi256_ps(reach)));
    const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kKept.lanes[bits])));
    bitmap[i / 8] = bits;
    for (int a = 0; a < Count::value; ++a)
      _mm256_storeu_ps(arrays.to[a] + kept, _mm256_permutevar8x32_ps(_mm256_loadu_ps(arrays.of[a] + i), lanes));
    kept += __builtin_popcount(bits);
  }
  Arrays rest = arrays;
  for (int a = 0; a < Count::value; ++a) rest.of[a] += i, rest.to[a] += kept;
  return kept + keep_body(rest, n - i, low, bitmap + i / 8);
}
template <class Count>
GZ_AVX512 int64_t keep_arrays_avx512(const Arrays& arrays, Count, int64_t n, uint32_t low, uint8_t* bitmap) {
  const __m512i mask = _mm512_set1_epi32(int(kMagnitude)), at = _mm512_set1_epi32(int(low));
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += 16) {
    if (arrays.ahead) __builtin_prefetch(arrays.ahead + i, 0, 2);
    const auto valid = __mmask16(n - i < 16 ? (1u << (n - i)) - 1 : 0xffffu);
    const __m512i key = _mm512_maskz_loadu_epi32(valid, arrays.of[0] + i);
    const __mmask16 reach = _mm512_mask_cmpge_epu32_mask(valid, _mm512_and_si512(key, mask), at);
    _mm512_storeu_si512(arrays.to[0] + kept, _mm512_maskz_compress_epi32(reach, key));
    for (int a = 1; a < Count::value; ++a)
      _mm512_storeu_ps(arrays.to[a] + kept,
                       _mm512_maskz_compress_ps(reach, _mm512_maskz_loadu_ps(valid, arrays.of[a] + i)));
    const auto bits = uint16_t(reach);
    std::memcpy(bitmap + i / 8, &bits, n - i <= 8 ? 1 : 2);
    kept += __builtin_popcount(bits);
  }
  return kept;
}
template <class Count>
GZ_SIMD_SELECT(int64_t, keep_arrays, (const Arrays& arrays, Count count, int64_t n, uint32_t low, uint8_t* bitmap),
               (arrays, count, n, low, bitmap))

int64_t keep(const Arrays& arrays, int64_t n, uint32_t low, uint8_t* bitmap) {
  switch (arrays.count) {
    case 1:
      return keep_arrays(arrays, std::integral_constant<int, 1>(), n, low, bitmap);
    case 2:
      return keep_arrays(arrays, std::integral_constant<int, 2>(), n, low, bitmap);
    default:
      return keep_arrays(arrays, std::integral_constant<int, 3>(), n, low, bitmap);
  }
}

// Clears the bits of a bitmap's set bits that `kept` does not have: bit j of `kept` stands for the j-th set bit.
GZ_INLINE void thin_out_body(uint8_t* bitmap, int64_t n, const uint8_t* kept) {
  int64_t position = 0;
  for (int64_t i = 0; i < n; i += 64) {
    uint64_t word = load_word(bitmap, i, n), result = 0;
    for (uint64_t rest = word; rest; rest &= rest - 1, ++position)
      if (kept[position / 8] >> (position % 8) & 1) result |= rest & (0 - rest);
    std::memcpy(bitmap + i / 8, &result, size_t(std::min<int64_t>(n - i, 64) + 7) / 8);
  }
}
void thin_out_scalar(uint8_t* bitmap, int64_t n, const uint8_t* kept) { thin_out_body(bitmap, n, kept); }
GZ_AVX2 void thin_out_avx2(uint8_t* bitmap, int64_t n, const uint8_t* kept) {
  int64_t position = 0;
  for (int64_t i = 0; i < n; i += 64) {
    const uint64_t word = load_word(bitmap, i, n);
    unsigned __int128 bits;
    std::memcpy(&bits, kept + position / 8, 16);
    const uint64_t result = _pdep_u64(uint64_t(bits >> (position % 8)), word);
    std::memcpy(bitmap + i / 8, &result, size_t(std::min<int64_t>(n - i, 64) + 7) / 8);
    position += __builtin_popcountll(word);
  }
}
void thin_out_avx512(uint8_t* bitmap, int64_t n, const uint8_t* kept) { thin_out_avx2(bitmap, n, kept); }
GZ_SIMD_SELECT(void, thin_out, (uint8_t* bitmap, int64_t n, const uint8_t* kept), (bitmap, n, kept))

struct Counts {
  int64_t above, equal;
};
GZ_INLINE Counts count_keys_body(const float* keys, int64_t n, uint32_t threshold) {
  int32_t above = 0, equal = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t m = float_bits(keys[i]) & kMagnitude;
    above += m > threshold;
    equal += m == threshold;
  }
  return {above, equal};
}
GZ_SIMD_DISPATCH(Counts, count_keys, (const float* keys, int64_t n, uint32_t threshold), (keys, n, threshold))

// The coefficients that may be among the k largest, tile by tile in any order: keys and, of pairs, real and imaginary
// parts.
struct Candidates {
  struct Part {
    int64_t offset = 0, count = 0;
  };
  std::vector<Part> tiles;
  float* of[3];
  int64_t capacity;
  std::atomic<int64_t> total{0};  // beyond the capacity if there were too many

  Candidates(const TransformLayout& t, float* memory, int64_t most)
      : tiles(t.tiles), of{memory, memory + most, memory + 2 * most}, capacity(most) {}
};

// The elements that are transformed.
struct Signal {
  const void* x;
  int dtype;

  // Elements [begin, begin + n) as floats: in `buffer`, unless they are floats.
  const float* read(int64_t begin, int64_t n, float* buffer) const {
    return typed(x, dtype, [&](auto* of) { return as_floats(of + begin, n, buffer); });
  }
};

// A tile's coefficients and, of pairs, their energies.
struct TileKeys {
  alignas(64) float coefficients[kTileRoom], energy[kTileRoom / 2];
  const float* keys;
  int64_t groups;

  TileKeys() {}
  void transform(const Transform& t, const Signal& signal, int64_t tile, float scale) {
    const int64_t begin = t.begin(tile), count = t.count(tile);
    groups = t.groups_of(count);
    keys = coefficients;
    if (t.length == 1)
      keys = signal.read(begin, count, coefficients);
    else
      typed(signal.x, signal.dtype, [&](auto* of) { forward_tile(t, of + begin, count, coefficients); });
    if (t.group == 2) {
      energies(coefficients, coefficients + groups, groups, scale, energy);
      keys = energy;
    }
  }
};

// Collects the coefficients of magnitude `low` and more, and sets their bits.
void collect(const Transform& t, const Signal& x, uint32_t low, float scale, Candidates& found, uint8_t* bitmap,
             int threads) {
  for_each_tile(t, threads, [&](int64_t i) {
    TileKeys tile;
    tile.transform(t, x, i, scale);
    alignas(64) float kept[3][kTileRoom];
    const Arrays arrays{{tile.keys, tile.coefficients, tile.coefficients + tile.groups},
                        {kept[0], kept[1], kept[2]},
                        t.group == 1 ? 1 : 3,
                        t.length == 1 && tile.keys != tile.coefficients ? tile.keys + kTransformAhead : nullptr};
    const int64_t count = keep(arrays, tile.groups, low, bitmap + i * t.tile_groups() / 8);
    const int64_t offset = found.total.fetch_add(count);
    found.tiles[i] = {offset, count};
    if (offset + count > found.capacity) return;
    for (int a = 0; a < arrays.count; ++a) std::memcpy(found.of[a] + offset, kept[a], size_t(count) * sizeof(float));
  });
}

constexpr int64_t kSample = 1 << 15;  // groups
constexpr int64_t kSampleRows = 16;   // transformed together

struct Sample {
  float scale;
  uint32_t low;  // of 0 says nothing
};

// A magnitude that more than k of the groups reach, by a sample of their rows; wrong now and then, and less often with
// more `room`.
Sample sample(const Transform& t, const Signal& x, int64_t k, double room) {
  const int64_t rows = t.n / t.length, block = kSampleRows * t.length, blocks = kSample * t.group / block;
  const int64_t run = std::max<int64_t>(1, 16 / t.length);  // neighbouring rows of a cache line
  std::vector<float> coefficients(size_t(kSample) * t.group), keys, some(block);
  const int64_t groups = blocks * block / t.group;
  uint64_t position = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t r = 0; r < kSampleRows; r += run) {
      const auto row = int64_t((static_cast<unsigned __int128>(position) * uint64_t(rows - run)) >> 64);
      position += 0x9E3779B97F4A7C15ull;  // steps of the golden ratio: no period of the data coincides with them
      const int64_t rows_here = std::min(run, kSampleRows - r);
      float* const to = &some[r * t.length];
      const float* from = x.read(row * t.length, rows_here * t.length, to);
      if (from != to) std::memcpy(to, from, size_t(rows_here * t.length) * sizeof(float));
    }
    forward_tile(t, some.data(), block, coefficients.data() + b * block);
  }
  float scale = 1.0f;
  if (t.group == 1) {
    keys = std::move(coefficients);
  } else {
    float most = 0.0f;
    abs_max(coefficients.data(), int(Dtype::float32), groups * 2, &most, 1);
    if (!(most > 0.0f && most <= bits_float(kMaxFiniteBits))) return {1.0f, 0};
    scale = unit_scale(most);
    keys.resize(size_t(groups));
    const int64_t half = block / 2;
    for (int64_t b = 0; b < blocks; ++b)
      energies(&coefficients[b * block], &coefficients[b * block + half], half, scale, &keys[b * half]);
  }
  // Coefficients of a row resemble each other, so a sample of rows varies more than one of coefficients.
  const double centre = double(k) / double(t.groups()) * double(groups);
  const auto rank = int64_t(room * (1.02 * centre + 8.0 * std::sqrt(centre) + 16.0));
  if (rank >= groups) return {scale, 0};
  std::nth_element(keys.begin(), keys.begin() + rank, keys.begin() + groups,
                   [](float a, float b) { return (float_bits(a) & kMagnitude) > (float_bits(b) & kMagnitude); });
  return {scale, float_bits(keys[rank]) & kMagnitude};
}

// Writes the candidates that are among the k largest, and clears the bits of the others.
void emit(const Transform& t, const Candidates& found, const Selection& selection, uint8_t* bitmap, float* values,
          int threads) {
  const uint32_t threshold = float_bits(selection.threshold) & kMagnitude;
  std::vector<Counts> counts(t.tiles);
  for_each_tile(t, threads, [&](int64_t i) {
    counts[i] = count_keys(found.of[0] + found.tiles[i].offset, found.tiles[i].count, threshold);
  });
  std::vector<int64_t> ends(t.tiles), ties(t.tiles);
  int64_t end = 0, quota = selection.ties;
  for (int64_t i = 0; i < t.tiles; ++i) {
    ties[i] = std::min(quota, counts[i].equal);
    quota -= ties[i];
    ends[i] = end += counts[i].above + ties[i];
  }
  for_each_tile(t, threads, [&](int64_t i) {
    const int64_t n = found.tiles[i].count, kept = counts[i].above + ties[i];
    const float* keys = found.of[0] + found.tiles[i].offset;
    const bool some_ties = ties[i] > 0 && ties[i] < counts[i].equal;
    uint32_t low = threshold + (ties[i] == 0);
    alignas(64) float out[3][kTileRoom], flags[kTileRoom];
    Arrays arrays{{keys, found.of[1] + found.tiles[i].offset, found.of[2] + found.tiles[i].offset},
                  {out[0], out[1], out[2]},
                  t.group == 1 ? 1 : 3};
    int first = t.group - 1;  // the array of the first values: real coefficients are their own keys
    if (some_ties) {          // only the first of them
      if (t.group == 1) arrays = {{keys, keys, nullptr}, {out[0], out[1], nullptr}, 2};
      first = 1;
      int64_t left = ties[i];
      for (int64_t j = 0; j < n; ++j) {
        const uint32_t m = float_bits(keys[j]) & kMagnitude;
        flags[j] = m > threshold || (m == threshold && left-- > 0) ? 1.0f : 0.0f;
      }
      arrays.of[0] = flags;
      low = 1;  // any bits but zero's
    }
    alignas(16) uint8_t marks[kTileRoom / 8 + 16];
    keep(arrays, n, low, marks);
    for (int a = 0; a < t.group; ++a)
      if (kept)
        std::memcpy(values + t.group * (ends[i] - kept) + a * kept, out[first + a], size_t(kept) * sizeof(float));
    thin_out(bitmap + i * t.tile_groups() / 8, t.groups_of(t.count(i)), marks);
  });
}

}  // namespace

void select_coefficients(const Transform& t, const TransformSource& source, int threads) {
  const auto [data, dtype, n, k, scratch, scratch_numel, bitmap, values] = source;
  const Signal x{data, int(dtype)};
  const int64_t groups = t.groups(), floats = t.group == 1 ? 1 : 3;
  bool in_range = true;  // whether another sample is worth a try
  const auto attempt = [&](uint32_t low, float scale, float* memory, int64_t capacity) {
    Candidates found(t, memory, capacity);
    collect(t, x, low, scale, found, bitmap, threads);
    if (found.total < k || found.total > capacity) return false;
    Selection selection;
    select(found.of[0], found.total, k, &selection, threads);
    if (low && t.group == 2) {
      // The scale makes no difference unless energies are infinite or subnormal, by this scale or that of all of x, whose
      // largest magnitude is at most sqrt(length * most).
      float most = 0.0f;
      abs_max(found.of[0], int(Dtype::float32), found.total, &most, threads);
      in_range = most < 0x1p100f && selection.threshold > most * 0x1p-88f;
      if (!in_range) return false;
    }
    emit(t, found, selection, bitmap, values, threads);
    return true;
  };
  if (groups >= 4 * kSample && scratch_numel / floats > k)
    for (const double room : {1.0, 1.5}) {
      const Sample s = sample(t, x, k, room);
      if (s.low && in_range && attempt(s.low, s.scale, scratch, scratch_numel / floats)) return;
    }
  float scale = 1.0f;
  if (t.group == 2) {
    abs_max(data, int(dtype), n, &scale, threads);
    scale = unit_scale(scale);
  }
  // Every group is a candidate.
  std::unique_ptr<float[]> room;
  if (scratch_numel < floats * groups) room.reset(new float[size_t(floats * groups)]);
  attempt(0, scale, room ? room.get() : scratch, groups);
}

}  // namespace gradzip::cpu

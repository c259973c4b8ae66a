// Transforms of short blocks, and decoding of selected coefficients: those of all parts are added up in the L1 cache, and
// transformed back from there.
#include <cstring>
#include <vector>

#include "cpu/bit_stream.h"
#include "cpu/bitmap.h"
#include "cpu/ops.h"
#include "cpu/simd.h"
#include "cpu/transform_tile.h"

namespace gradzip::cpu {
namespace {

struct Code {
  const TransformPart* part;
  std::vector<int64_t> offsets;  // of the first value of each tile
  std::vector<float> values;  // of every code, times the weight
};

// The values of codes [first, first + n).
GZ_INLINE void read_values_body(const Code& code, int64_t first, int64_t n, float* values) {
  const int bits = code.part->format.bits;
  const uint64_t mask = (uint64_t(1) << bits) - 1;
  const float* of = code.values.data();
  const uint8_t* packed = code.part->packed;
  int64_t i = 0;
  const int64_t whole = (code.part->packed_nbytes - 8) * 8 / bits - first;  // codes that 8 bytes can be read at
  for (; i + 3 <= n && i + 3 <= whole; i += 3) {  // 3 codes of up to 16 bits in the 57 bits of a window
    uint64_t word;
    const int64_t bit = (first + i) * bits;
    std::memcpy(&word, packed + bit / 8, 8);
    word >>= bit % 8;
    values[i] = of[word & mask];
    values[i + 1] = of[word >> bits & mask];
    values[i + 2] = of[word >> (2 * bits) & mask];
  }
  for (; i < n; ++i) values[i] = of[read_bits(packed, code.part->packed_nbytes, (first + i) * bits, bits)];
}
GZ_SIMD_DISPATCH(void, read_values, (const Code& code, int64_t first, int64_t n, float* values),
                 (code, first, n, values))

// out[i] += the next value if bit i is set. Reads up to 16 floats past the last value.
GZ_INLINE void expand_add_body(const float* values, const uint8_t* bitmap, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 64)
    for (uint64_t word = load_word(bitmap, i, n); word; word &= word - 1) out[i + __builtin_ctzll(word)] += *values++;
}
void expand_add_scalar(const float* values, const uint8_t* bitmap, int64_t n, float* out) {
  expand_add_body(values, bitmap, n, out);
}
GZ_AVX2 void expand_add_avx2(const float* values, const uint8_t* bitmap, int64_t n, float* out) {
  expand_add_body(values, bitmap, n, out);
}
GZ_AVX512 void expand_add_avx512(const float* values, const uint8_t* bitmap, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    uint64_t word;
    std::memcpy(&word, bitmap + i / 8, 8);
    for (int j = 0; j < 64; j += 16, word >>= 16) {
      const auto mask = __mmask16(word);
      const __m512 sum = _mm512_loadu_ps(out + i + j);
      const __m512 more = _mm512_maskz_expand_ps(mask, _mm512_loadu_ps(values));
      _mm512_storeu_ps(out + i + j, _mm512_mask_add_ps(sum, mask, sum, more));
      values += __builtin_popcount(uint32_t(mask));
    }
  }
  expand_add_body(values, bitmap + i / 8, n - i, out + i);
}
GZ_SIMD_SELECT(void, expand_add, (const float* values, const uint8_t* bitmap, int64_t n, float* out),
               (values, bitmap, n, out))

GZ_INLINE void add_body(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] += x[i];
}
GZ_SIMD_DISPATCH(void, add, (const float* x, int64_t n, float* out), (x, n, out))

}  // namespace

void transform(const float* x, int64_t n, uint32_t code, float* coefficients, int threads) {
  const Transform t(code, n);
  for_each_tile(t, threads, [&](int64_t i) { forward_tile(t, x + t.begin(i), t.count(i), coefficients + i * t.tile); });
}

void transform_inverse(const float* coefficients, int64_t n, uint32_t code, float* x, int threads) {
  const Transform t(code, n);
  for_each_tile(t, threads, [&](int64_t i) { inverse_tile(t, coefficients + i * t.tile, t.count(i), x + t.begin(i)); });
}

void transform_select(const TransformSource* table, int64_t count, uint32_t code, int threads) {
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].n; },
      [&](int64_t i, int of_piece) { select_coefficients(Transform(code, table[i].n), table[i], of_piece); });
}

static void decode_sum(const TransformPart* parts, int64_t count, uint32_t code, float weight, bool add_to, float* out,
                       int64_t n, int32_t* failed, int threads) {
  const Transform t(code, n);
  std::vector<Code> codes(count);
  for (int64_t c = 0; c < count; ++c) {
    const TransformPart& part = parts[c];
    codes[c].part = &part;
    auto& offsets = codes[c].offsets;
    offsets.resize(t.tiles + 1, 0);
    for_each_tile(t, threads, [&](int64_t i) {
      int64_t set = 0;
      const int64_t groups = t.groups_of(t.count(i));
      const uint8_t* bitmap = part.bitmap + i * t.tile_groups() / 8;
      for (int64_t j = 0; j < groups; j += 64) set += __builtin_popcountll(load_word(bitmap, j, groups));
      offsets[i + 1] = set;
    });
    for (int64_t i = 0; i < t.tiles; ++i) offsets[i + 1] += offsets[i];
    const int64_t groups = t.groups();
    if (offsets.back() != part.count || (groups % 8 && part.bitmap[groups / 8] >> (groups % 8))) {
      *failed = int32_t(c) + 1;
      return;
    }
    RangeFloat format = part.format;
    uint64_t wire;
    if (part.wire) std::memcpy(&wire, part.wire, sizeof wire);
    if (part.wire && !range_of_wire(wire, format.bits, &format)) {
      *failed = int32_t(c) + 1;
      return;
    }
    codes[c].values.resize(size_t(1) << format.bits);
    for (size_t v = 0; v < codes[c].values.size(); ++v) codes[c].values[v] = weight * range_decode(format, uint32_t(v));
  }
  for_each_tile(t, threads, [&](int64_t i) {
    const int64_t elements = t.count(i), groups = t.groups_of(elements);
    alignas(64) float sums[kTileRoom], values[2 * kTileRoom], result[kTileRoom];
    std::memset(sums, 0, size_t(groups * t.group) * sizeof(float));
    for (const Code& code : codes) {
      const int64_t first = code.offsets[i], many = code.offsets[i + 1] - first;
      const uint8_t* bitmap = code.part->bitmap + i * t.tile_groups() / 8;
      read_values(code, t.group * first, t.group * many, values);
      for (int a = 0; a < t.group; ++a) expand_add(values + a * many, bitmap, groups, sums + a * groups);
    }
    float* to = out + t.begin(i);
    inverse_tile(t, sums, elements, add_to ? result : to);
    if (add_to) add(result, elements, to);
  });
}

void transform_decode(const WeightedSum* table, int64_t count, const TransformPart* parts, uint32_t code, float weight,
                      int32_t* failed, int threads) {
  const TransformPart* first = parts;
  for (int64_t i = 0; i < count && !*failed; first += table[i++].terms) {
    decode_sum(first, table[i].terms, code, weight, table[i].add != 0, static_cast<float*>(table[i].out), table[i].n,
               failed, threads);
    if (*failed) *failed += int32_t(first - parts);
  }
}

}  // namespace gradzip::cpu

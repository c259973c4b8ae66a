// FFTRange in the frequency domain: energies to select coefficients by, and decoding of selected coefficients.
#include "common/spectrum.h"
#include "cpu/bit_stream.h"
#include "cpu/bitmap.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

GZ_INLINE void power_of_body(const float* spectrum, int64_t n, float scale, float weight, float* power) {
  for (int64_t i = 0; i < n; ++i) {
    const float re = spectrum[2 * i] * scale, im = spectrum[2 * i + 1] * scale;
    power[i] = weight * (re * re + im * im);
  }
}
GZ_SIMD_DISPATCH(void, power_of, (const float* spectrum, int64_t n, float scale, float weight, float* power),
                 (spectrum, n, scale, weight, power))

// The value of every code of up to 16 bits, times the weight: one load decodes a code.
std::vector<float> decoded_values(const RangeFloat& format, float weight) {
  std::vector<float> table(size_t(1) << format.bits);
  for (size_t code = 0; code < table.size(); ++code) table[code] = weight * range_decode(format, uint32_t(code));
  return table;
}

}  // namespace

void spectrum_power(const float* spectrum, int64_t rows, int64_t length, const float* amax, float* power, int threads) {
  const int64_t bins = length / 2 + 1, n = rows * bins;
  const float scale = unit_scale(*amax);
  parallel_chunks(n, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    power_of(spectrum + 2 * begin, end - begin, scale, 2.0f, power + begin);
    // Halving is exact, so the bins of weight 1 are corrected afterwards.
    for (int64_t row = ceil_div(begin, bins); row * bins < end; ++row) power[row * bins] *= 0.5f;
    if (length % 2 == 0)
      for (int64_t row = ceil_div(begin - bins + 1, bins); row * bins + bins - 1 < end; ++row)
        power[row * bins + bins - 1] *= 0.5f;
  });
}

void spectrum_decode_add(const RangeFloat* format, const uint8_t* bitmap, const uint8_t* packed, int64_t packed_bytes,
                         int64_t count, float weight, float* spectrum, int64_t n, int32_t* failed, int threads) {
  const auto offsets = bitmap_offsets(bitmap, n, threads);
  if (offsets.back() != count || (n % 8 && bitmap[n / 8] >> (n % 8))) {
    *failed = 1;
    return;
  }
  const auto table = decoded_values(*format, weight);
  const int bits = format->bits;
  const uint64_t mask = (uint64_t(1) << bits) - 1;
  parallel_chunks(n, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
    int64_t position = offsets[c] * 2 * bits;
    for (int64_t i = begin; i < end; i += 64) {
      for (uint64_t word = load_word(bitmap + begin / 8, i - begin, end - begin); word; word &= word - 1) {
        const uint64_t pair = read_bits(packed, packed_bytes, position, 2 * bits);
        float* bin = spectrum + 2 * (i + __builtin_ctzll(word));
        bin[0] += table[pair & mask];
        bin[1] += table[pair >> bits];
        position += 2 * bits;
      }
    }
  });
}

}  // namespace gradzip::cpu

#include "common/range_float.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "common/range_float_fit.h"
#include "cpu/bit_stream.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

struct Range {
  float low, high;
};

// Compares bits, which vectorises: among floats of one sign, larger bits are larger magnitudes. NaN does not count.
GZ_INLINE Range range_of_body(const float* x, int64_t n) {
  uint32_t low = 0, high = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = float_bits(x[i]), negative = uint32_t(int32_t(u) >> 31);  // all ones or all zeros
    const uint32_t number = u & (0u - uint32_t((u & 0x7fffffffu) <= kInfBits)) & 0x7fffffffu;
    const uint32_t down = number & negative, up = number & ~negative;
    low = low > down ? low : down;
    high = high > up ? high : up;
  }
  return {-bits_float(low), bits_float(high)};
}
GZ_SIMD_DISPATCH(Range, range_of, (const float* x, int64_t n), (x, n))

std::vector<double> magnitude_histogram(const float* x, int64_t n) {
  std::vector<double> histogram(kBins, 0.0);
  for (int64_t begin = 0; begin < n; begin += histogram_step(n))
    for (int64_t i = begin; i < std::min(n, begin + kHistogramRun); ++i)
      histogram[(float_bits(x[i]) & 0x7fffffffu) >> kBinShift] += 1.0;
  return histogram;
}

double expected_error(const RangeFloat& format, const std::vector<double>& histogram) {
  const double eps = range_eps(format), most = range_most(format);
  double sums[kErrorLanes] = {};
  for (int bin = 0; bin < kFiniteBins; ++bin)
    if (histogram[bin] != 0.0) sums[bin % kErrorLanes] += histogram[bin] * bin_error(format, eps, most, bin);
  for (int d = kErrorLanes / 2; d > 0; d /= 2)
    for (int lane = 0; lane < d; ++lane) sums[lane] += sums[lane + d];
  return sums[0];
}

// Writes the codes of a block; returns the number of values outside the range (NaN is outside every range).
GZ_INLINE int64_t encode_block(const RangeFloat& format, Rounding r, const float* x, int n, uint32_t* codes) {
  int outside = 0;
  for (int i = 0; i < n; ++i) {
    codes[i] = range_encode(format, x[i], r.noise, r.underflow);
    outside += range_outside(format, x[i]);
  }
  return outside;
}

GZ_INLINE int64_t encode_block_stochastic(const RangeFloat& format, Rounding r, const float* x, int n, uint64_t key,
                                          int64_t first, uint32_t* codes) {
  uint32_t words[kBitBlock];
  philox_words(key, uint64_t(first), n, words);
  int outside = 0;
  for (int i = 0; i < n; ++i) {
    codes[i] = range_encode(format, x[i], words[i] & r.noise, unit_interval(words[i]) * r.underflow);
    outside += range_outside(format, x[i]);
  }
  return outside;
}

struct Encoder {
  RangeFloat format;
  Rounding rounding;
  const float* x;
  bool stochastic;
  uint64_t key;
};

// Writes the codes of x[begin, end) to `codes` or, if that is null, to `packed`.
GZ_INLINE int64_t encode_chunk_body(const Encoder& e, int64_t begin, int64_t end, int32_t* codes, uint8_t* packed) {
  const RangeFloat format = e.format;
  uint32_t block[kBitBlock];
  int64_t outside = 0;
  for (int64_t i = begin; i < end; i += kBitBlock) {
    const int n = int(end - i < kBitBlock ? end - i : kBitBlock);
    uint32_t* to = codes ? reinterpret_cast<uint32_t*>(codes + i) : block;
    if (e.stochastic)
      outside += encode_block_stochastic(format, e.rounding, e.x + i, n, e.key, i, to);
    else
      outside += encode_block(format, e.rounding, e.x + i, n, to);
    if (packed) pack_block(block, n, format.bits, packed + i / 8 * format.bits);
  }
  return outside;
}
GZ_SIMD_DISPATCH(int64_t, encode_chunk, (const Encoder& e, int64_t begin, int64_t end, int32_t* codes, uint8_t* packed),
                 (e, begin, end, codes, packed))

void encode(const RangeFloat& format, const float* x, int64_t n, bool stochastic, uint64_t key, int32_t* codes,
            uint8_t* packed, int64_t* outside, int threads) {
  const Encoder encoder{format, range_rounding(format, stochastic), x, stochastic, key};
  std::vector<int64_t> counts(ceil_div(n, kChunk), 0);
  parallel_chunks(n, kChunk, threads, [&](int64_t chunk, int64_t begin, int64_t end) {
    counts[chunk] = encode_chunk(encoder, begin, end, codes, packed);
  });
  *outside = 0;
  for (int64_t count : counts) *outside += count;
}

// x[i] = the value of code_at(i). Returns whether all codes exist.
template <class F>
bool decode(const RangeFloat& format, int64_t n, float* x, int threads, F code_at) {
  const uint32_t last = format.positive + format.negative;
  std::atomic<bool> valid{true};
  parallel_chunks(n, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    uint32_t highest = 0;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t code = code_at(i);
      highest = std::max(highest, code);
      x[i] = range_decode(format, code);
    }
    if (highest > last) valid.store(false, std::memory_order_relaxed);
  });
  return valid;
}

bool decode_packed(const RangeCodes& of, int bits, int threads) {
  uint64_t wire;
  std::memcpy(&wire, of.wire, sizeof wire);
  RangeFloat format;
  const int64_t nbytes = ceil_div(of.n * bits, 8);
  return range_of_wire(wire, bits, &format) && decode(format, of.n, of.x, threads, [=](int64_t i) {
           return uint32_t(read_bits(of.packed, nbytes, i * bits, bits));
         });
}

}  // namespace

static void fit(RangeFloat* format, const float* x, int64_t n, int bits, int mantissa, float vmin, float vmax,
                int threads) {
  if (vmin > vmax) {
    std::vector<Range> ranges(ceil_div(n, kChunk), Range{0.0f, 0.0f});
    parallel_chunks(n, kChunk, threads, [&](int64_t chunk, int64_t begin, int64_t end) {
      ranges[chunk] = range_of(x + begin, end - begin);
    });
    vmin = vmax = 0.0f;
    for (const Range& range : ranges) {
      vmin = std::min(vmin, range.low);
      vmax = std::max(vmax, range.high);
    }
  }
  if (mantissa >= 0) {
    *format = make_range_float(bits, mantissa, vmin, vmax);
    return;
  }
  const auto histogram = magnitude_histogram(x, n);
  double least = std::numeric_limits<double>::infinity();
  for (int m = 1; m <= bits; ++m) {
    const RangeFloat candidate = make_range_float(bits, m, vmin, vmax);
    const double error = expected_error(candidate, histogram);
    if (m == 1 || error < least) {
      *format = candidate;
      least = error;
    }
  }
}

void range_float_fit(const RangeFit* table, int64_t count, int bits, int mantissa, float vmin, float vmax,
                     int threads) {
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].n; },
      [&](int64_t i, int of_piece) {
        fit(table[i].format, table[i].x, table[i].n, bits, mantissa, vmin, vmax, of_piece);
      });
}

void range_float_encode(const RangeFloat* format, const float* x, int64_t n, bool stochastic, uint64_t key,
                        int32_t* codes, int64_t* outside, int threads) {
  encode(*format, x, n, stochastic, key, codes, nullptr, outside, threads);
}

void range_float_encode_packed(const RangeSource* table, int64_t count, int, bool stochastic, const int64_t* replays,
                               int threads) {
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].n; },
      [&](int64_t i, int of_piece) {
        const auto [format, x, n, key, packed, outside] = table[i];
        int64_t found = 0;
        encode(*format, x, n, stochastic, replay_key(key, replays), nullptr, packed, &found, of_piece);
        if (found > 0) __atomic_fetch_add(outside, found, __ATOMIC_RELAXED);
      });
}

void range_float_decode(const RangeFloat* format, const int32_t* codes, int64_t n, float* x, int32_t* failed,
                        int threads) {
  if (!decode(*format, n, x, threads, [=](int64_t i) { return uint32_t(codes[i]); })) *failed = 1;
}

void range_float_decode_packed(const RangeCodes* table, int64_t count, int bits, int32_t* failed, int threads) {
  std::atomic<int64_t> first_invalid{count};
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].n; },
      [&](int64_t i, int of_piece) {
        if (!decode_packed(table[i], bits, of_piece)) lower(&first_invalid, i);
      });
  if (first_invalid < count) *failed = int32_t(first_invalid) + 1;
}

}  // namespace gradzip::cpu

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "common/one_bit.h"
#include "cpu/abs_max.h"
#include "cpu/bitmap.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/philox.h"
#include "cpu/sign_bits.h"
#include "cpu/simd.h"
#include "cpu/weighted_sum.h"

namespace gradzip::cpu {
namespace {

// Sums of the positive and of the negative values by i % kSumLanes, in double, for whole rows of lanes. NaN does not
// count: its maximum and minimum with 0 are 0.
struct Lanes {
  double positive[kSumLanes], negative[kSumLanes];
};

void add_sides_scalar(const float* x, int64_t rows, Lanes* lanes) {
  for (; rows > 0; --rows, x += kSumLanes) {
    for (int j = 0; j < kSumLanes; ++j) {
      lanes->positive[j] += double(x[j] > 0.0f ? x[j] : 0.0f);
      lanes->negative[j] += double(x[j] < 0.0f ? x[j] : 0.0f);
    }
  }
}

GZ_AVX2 void add_sides_avx2(const float* x, int64_t rows, Lanes* lanes) {
  const __m128 zero = _mm_setzero_ps();
  __m256d up[4], down[4];
  for (int j = 0; j < 4; ++j) {
    up[j] = _mm256_loadu_pd(lanes->positive + 4 * j);
    down[j] = _mm256_loadu_pd(lanes->negative + 4 * j);
  }
  for (; rows > 0; --rows, x += kSumLanes) {
    for (int j = 0; j < 4; ++j) {
      const __m128 v = _mm_loadu_ps(x + 4 * j);
      up[j] = _mm256_add_pd(up[j], _mm256_cvtps_pd(_mm_max_ps(v, zero)));
      down[j] = _mm256_add_pd(down[j], _mm256_cvtps_pd(_mm_min_ps(v, zero)));
    }
  }
  for (int j = 0; j < 4; ++j) {
    _mm256_storeu_pd(lanes->positive + 4 * j, up[j]);
    _mm256_storeu_pd(lanes->negative + 4 * j, down[j]);
  }
}

GZ_AVX512 void add_sides_avx512(const float* x, int64_t rows, Lanes* lanes) {
  const __m256 zero = _mm256_setzero_ps();
  __m512d up[2], down[2];
  for (int j = 0; j < 2; ++j) {
    up[j] = _mm512_loadu_pd(lanes->positive + 8 * j);
    down[j] = _mm512_loadu_pd(lanes->negative + 8 * j);
  }
  for (; rows > 0; --rows, x += kSumLanes) {
    for (int j = 0; j < 2; ++j) {
      const __m256 v = _mm256_loadu_ps(x + 8 * j);
      up[j] = _mm512_add_pd(up[j], _mm512_cvtps_pd(_mm256_max_ps(v, zero)));
      down[j] = _mm512_add_pd(down[j], _mm512_cvtps_pd(_mm256_min_ps(v, zero)));
    }
  }
  for (int j = 0; j < 2; ++j) {
    _mm512_storeu_pd(lanes->positive + 8 * j, up[j]);
    _mm512_storeu_pd(lanes->negative + 8 * j, down[j]);
  }
}

GZ_SIMD_SELECT(void, add_sides, (const float* x, int64_t rows, Lanes* lanes), (x, rows, lanes))

GZ_INLINE int64_t count_bits_body(const uint8_t* packed, int64_t begin, int64_t end) {
  int64_t count = 0;
  for (; begin < end && begin % 8; ++begin) count += packed[begin / 8] >> (begin % 8) & 1;
  for (; begin < end; begin += 64) count += __builtin_popcountll(load_word(packed + begin / 8, 0, end - begin));
  return count;
}
GZ_SIMD_DISPATCH(int64_t, count_bits, (const uint8_t* packed, int64_t begin, int64_t end), (packed, begin, end))

// Sums of [begin, end), at most a segment.
Sides sides_of(const float* x, const uint8_t* packed, int64_t begin, int64_t end) {
  Lanes lanes{};
  const int64_t whole = begin + (end - begin) / kSumLanes * kSumLanes;
  add_sides(x + begin, (end - begin) / kSumLanes, &lanes);
  for (int64_t i = whole; i < end; ++i) {
    lanes.positive[i - whole] += double(x[i] > 0.0f ? x[i] : 0.0f);
    lanes.negative[i - whole] += double(x[i] < 0.0f ? x[i] : 0.0f);
  }
  for (int width = kSumLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) {
      lanes.positive[j] += lanes.positive[j + width];
      lanes.negative[j] += lanes.negative[j + width];
    }
  }
  return {lanes.positive[0], lanes.negative[0], count_bits(packed, begin, end)};
}

// Adds the parts of a row, in order.
Sides combine(const Sides* parts, int64_t count) {
  Sides all{};
  for (int64_t i = 0; i < count; ++i) {
    all.positive += parts[i].positive;
    all.negative += parts[i].negative;
    all.set += parts[i].set;
  }
  return all;
}

// `columns` <= kChunk.
void row_means(const float* x, const uint8_t* packed, int64_t begin, int64_t columns, float* means) {
  Sides parts[kChunk / kSumSegment];
  int64_t count = 0;
  for (int64_t i = 0; i < columns; i += kSumSegment)
    parts[count++] = sides_of(x, packed, begin + i, begin + std::min(columns, i + kSumSegment));
  side_means(combine(parts, count), columns, means);
}

// Packs one tensor. Returns the bits of its largest magnitude.
uint32_t pack(const OneBitSource& source, int threads) {
  const auto [x, rows, columns, key, packed, means] = source;
  const int64_t n = rows * columns, together = std::lcm<int64_t>(columns, 8);
  if (n == 0) {
    std::fill(means, means + 2 * rows, 0.0f);
    return 0;
  }
  std::vector<uint32_t> most;
  if (columns > kChunk || together > 4 * kChunk) {
    const SignsSource signs{x, int64_t(Dtype::float32), n, key, packed};
    signs_pack(&signs, 1, nullptr, nullptr, threads);
    const int64_t segments = ceil_div(columns, kSumSegment);
    std::vector<Sides> parts(size_t(rows * segments));
    most.resize(parts.size());
    parallel_for(rows * segments, threads, [&, x = x, columns = columns, packed = packed](int64_t task) {
      const int64_t row = task / segments, begin = row * columns + task % segments * kSumSegment;
      const int64_t end = std::min((row + 1) * columns, begin + kSumSegment);
      parts[size_t(task)] = sides_of(x, packed, begin, end);
      most[size_t(task)] = abs_max_here(x + begin, end - begin);
    });
    for (int64_t row = 0; row < rows; ++row)
      side_means(combine(parts.data() + row * segments, segments), columns, means + 2 * row);
  } else {
    const int64_t chunk = std::max<int64_t>(1, kChunk / together) * together;
    most.resize(size_t(ceil_div(n, chunk)));
    parallel_chunks(n, chunk, threads, [&, source](int64_t task, int64_t begin, int64_t end) {
      write_signs(source.x + begin, begin, end, source.key, source.packed);
      for (int64_t i = begin; i < end; i += source.columns)
        row_means(source.x, source.packed, i, source.columns, source.means + 2 * (i / source.columns));
      most[size_t(task)] = abs_max_here(source.x + begin, end - begin);
    });
  }
  return *std::max_element(most.begin(), most.end());
}

}  // namespace

void one_bit_packed(const OneBitSource* table, int64_t count, const int64_t* replays, float* most, int threads) {
  const auto size = [&](int64_t i) { return table[i].rows * table[i].columns; };
  parallel_pieces(count, threads, size, [&](int64_t i, int threads_of_one) {
    OneBitSource source = table[i];
    source.key = replay_key(source.key, replays);
    const uint32_t bits = pack(source, threads_of_one);
    if (most) most[i] = bits_float(bits);
  });
}

void one_bit_decode_add(const WeightedSum* table, int64_t count, const OneBitTerm* terms, int32_t* failed,
                        int threads) {
  *failed = first_invalid(table, count, terms, [](const WeightedSum& sum, const OneBitTerm& term) {
    const float* end = term.means + (sum.n == 0 ? 0 : 2 * (sum.n / term.columns));
    return std::all_of(term.means, end, [](float mean) { return std::isfinite(mean); });
  });
  if (*failed) return;
  add_terms(table, count, terms, kChunk, kSumBlock, threads,
            [](const OneBitTerm& term, int64_t begin, int64_t end, float* sum) {
              const float weight = float(term.weight);
              const uint8_t* packed = term.packed + begin / 8;
              for (int64_t row = begin / term.columns, i = begin; i < end; ++row) {
                const int64_t row_end = std::min(end, (row + 1) * term.columns);
                const float* means = term.means + 2 * row;
                add_by_sign(packed, i - begin, row_end - begin, weight * means[0], weight * means[1], sum);
                i = row_end;
              }
            });
}

}  // namespace gradzip::cpu

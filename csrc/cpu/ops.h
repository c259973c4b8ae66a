// Every CPU primitive, over raw pointers. Lengths are in elements; `threads` is the most to use; nothing here depends
// on how many that is. The caller owns all memory and has checked sizes (gradzip/ops). Determinism: same input, same
// output, bit for bit, at every SIMD level.
#pragma once

#include <cstdint>

#include "common/payload.h"
#include "common/range_float.h"

namespace gradzip::cpu {

// --- abs_max.cpp
// max |x|; 0 when n = 0; NaN when any x is NaN. One read of x.
float abs_max(const float* x, int64_t n, int threads);

// --- select.cpp
// The top k of |x|, 1 <= k <= n: all above `threshold`, and the first `ties` of those equal to it. NaN counts as
// larger than infinity. Expected: one read of x.
struct Selection {
  float threshold;
  int32_t unused;
  int64_t ties;
};
static_assert(sizeof(Selection) == 16, "gradzip/ops/select.py reads it");
void select(const float* x, int64_t n, int64_t k, Selection* selection, int threads);

// --- select_sampled.cpp
// About k of |x|, 1 <= k <= n: returns how many, within 10 % of k, or exactly k (by `select`) where samples do not come
// that close, or all that are not 0 where those are fewer. Draws from `key`. Expected: one read of x.
int64_t select_sampled(const float* x, int64_t n, int64_t k, uint64_t key, Selection* selection, int threads);

// --- compact.cpp
// bitmap[i / 8] bit i % 8 is set where x[i] is selected; bits past n are 0. Returns how many are set.
int64_t bitmap(const float* x, int64_t n, const Selection& selection, uint8_t* bitmap, int threads);
// The values whose bit is set, in order (prefix-sum packing; HPDC'20, section 3.2), for items of 4 or 8 bytes.
// Returns how many there are, at most capacity: more set bits than that return -1 and write nothing.
int64_t compact(const void* values, int64_t n, int item_size, const uint8_t* bitmap, void* out, int64_t capacity,
                int threads);
// The inverse: out[i] = the next value where bit i is set, else 0. -1 when the bitmap does not have `count` bits.
int64_t expand(const void* values, int64_t count, int item_size, const uint8_t* bitmap, void* out, int64_t n,
               int threads);

// How many of the first n bits are set.
int64_t count_marked(const uint8_t* bitmap, int64_t n, int threads);

// --- marked_indices.cpp
// Where the bitmap is set, ascending, and unless x is null the values there. -1, and nothing written, when it does not
// have exactly `count` bits set.
int64_t marked_indices(const uint8_t* bitmap, int64_t n, const float* x, int64_t count, int32_t* indices, float* values,
                       int threads);

// --- index_code.cpp
// Bytes that `indices` take in the smaller of the forms of common/index_code.h; -1 when they are not strictly ascending
// within [0, numel), numel < 2^31.
int64_t encoded_indices_nbytes(const int32_t* indices, int64_t count, int64_t numel, int threads);
// Writes those nbytes; -1, and nothing written, when they do not fit the indices.
int encode_indices(const int32_t* indices, int64_t count, int64_t numel, uint8_t* out, int64_t nbytes, int threads);
// -1 when the stream is anything but `count` strictly ascending indices below numel, which it may be without harm.
int decode_indices(const uint8_t* stream, int64_t nbytes, int64_t numel, int64_t count, int32_t* indices, int threads);
// out[index i] += weight * values[i]. -1 as above; part of the sum is in `out` then.
int sparse_decode_add(const uint8_t* stream, int64_t nbytes, const float* values, int64_t count, float weight,
                      float* out, int64_t numel, int threads);

// --- range_float.cpp
// Fits the format to the values: the range is theirs where vmin > vmax, else as given; mantissa < 0 picks the one with
// the least expected squared error on the histogram of the values.
void range_float_fit(RangeFloat* format, const float* x, int64_t n, int bits, int mantissa, float vmin, float vmax,
                     int threads);
void range_float_make(RangeFloat* format, int bits, int mantissa, float vmin, float vmax);
// Codes of x, as integers or as a packed bit stream (ceil(n * bits / 8) bytes). Rounds to nearest, or stochastically
// (draw i of the key belongs to x[i]). Returns how many values were outside [vmin, vmax].
int64_t range_float_encode(const RangeFloat& format, const float* x, int64_t n, bool stochastic, uint64_t key,
                           int32_t* codes, int threads);
int64_t range_float_encode_packed(const RangeFloat& format, const float* x, int64_t n, bool stochastic, uint64_t key,
                                  uint8_t* packed, int threads);
// -1 when a code is above P + Q, else 0.
int range_float_decode(const RangeFloat& format, const int32_t* codes, int64_t n, float* x, int threads);

// --- low_rank.cpp
// e += m, unless e is null; then out = x q (or x^T q where `transpose`), x being e, or m where e is null. m and e are
// rows x columns, q columns x rank (rows x rank), out rows x rank (columns x rank), all row-major. One pass.
void low_rank_project(const float* m, float* e, int64_t rows, int64_t columns, const float* q, int64_t rank,
                      bool transpose, float* out, int threads);
// e -= p q^T unless e is null, out = p q^T unless out is null, in one pass. p is rows x rank, q columns x rank.
void low_rank_expand(const float* p, const float* q, int64_t rows, int64_t columns, int64_t rank, float* e, float* out,
                     int threads);

// --- pack_bits.cpp
// Little-endian bit stream of n codes of 1..32 bits, ceil(n * bits / 8) bytes. Higher bits of a code are dropped.
void pack_bits(const int32_t* codes, int64_t n, int bits, uint8_t* packed, int threads);
void unpack_bits(const uint8_t* packed, int64_t n, int bits, int32_t* codes, int threads);

// --- orthogonalize.cpp
// Makes the columns of each matrix (row-major) orthonormal, in place, as gradzip/ops/orthogonalize.py says.
struct Matrix {
  float* data;
  int64_t rows, columns;
};
static_assert(sizeof(Matrix) == 24, "gradzip/ops/orthogonalize.py writes it");
void orthogonalize(const Matrix* matrices, int64_t count, int threads);

// --- spectrum.cpp
// power[r, c] = weight_c |s * spectrum[r, c]|^2 for `rows` rows of a real FFT of `length` reals each, length/2 + 1
// complex bins: weight 2 for the interior bins, which stand for two each, 1 for bin 0 and, where length is even, the
// last; s is the power of two that brings amax into [1, 2), so that squares keep within range.
void spectrum_power(const float* spectrum, int64_t rows, int64_t length, float amax, float* power, int threads);
// spectrum[i] += weight * (the next two codes of `packed`, as range floats) where bit i is set, i < n complex bins.
// -1, and spectrum untouched, when the bitmap does not have exactly `count` bits in n (or any past them).
int spectrum_decode_add(const RangeFloat& format, const uint8_t* bitmap, const uint8_t* packed, int64_t packed_bytes,
                        int64_t count, float weight, float* spectrum, int64_t n, int threads);

// --- payload.cpp
// Checksum of a payload whose header field for it counts as 0. nbytes is a multiple of 16.
uint32_t payload_checksum(const uint8_t* payload, int64_t nbytes, int threads);

}  // namespace gradzip::cpu

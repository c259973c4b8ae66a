// Every CPU primitive, over raw pointers. Lengths are in elements; `threads` is the most to use; nothing here depends
// on how many that is. The caller owns all memory and has checked sizes (gradzip/ops). Determinism: same input, same
// output, bit for bit, at every SIMD level.
#pragma once

#include <cstdint>

#include "common/orthogonalize.h"
#include "common/payload.h"
#include "common/range_float.h"
#include "common/selection.h"

namespace gradzip::cpu {

// --- abs_max.cpp
// max |x|; 0 when n = 0; NaN when any x is NaN. One read of x.
float abs_max(const float* x, int64_t n, int threads);

// --- select.cpp
// The top k of |x|, 1 <= k <= n. Expected: one read of x.
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

// --- random_indices.cpp
// k of the n indices, 0 <= k <= n < 2^31, ascending: draw i of the key chooses one of [i n / k, (i + 1) n / k), and draw k
// by how much all are shifted, modulo n. Every index is as likely.
void random_indices(int64_t n, int64_t k, uint64_t key, int32_t* indices, int threads);

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
// rows x columns, q columns x rank (rows x rank), out rows x rank (columns x rank), all row-major; rank >= 1. One pass.
void low_rank_project(const float* m, float* e, int64_t rows, int64_t columns, const float* q, int64_t rank,
                      bool transpose, float* out, int threads);
// out = p q^T, or from - p q^T unless `from` is null; `from` may be out. p is rows x rank, q columns x rank.
void low_rank_expand(const float* p, const float* q, int64_t rows, int64_t columns, int64_t rank, const float* from,
                     float* out, int threads);
// e = m - sent_p sent_q^T, then m = p q^T, in one pass. The factors sent may be p and q themselves.
void low_rank_settle(float* m, float* e, const float* sent_p, const float* sent_q, const float* p, const float* q,
                     int64_t rows, int64_t columns, int64_t rank, int threads);

// --- pack_bits.cpp
// Little-endian bit stream of n codes of 1..32 bits, ceil(n * bits / 8) bytes. Higher bits of a code are dropped.
void pack_bits(const int32_t* codes, int64_t n, int bits, uint8_t* packed, int threads);
void unpack_bits(const uint8_t* packed, int64_t n, int bits, int32_t* codes, int threads);

// --- bernoulli.cpp
// bitmap[i / 8] bit i % 8 is set where draw i of the key is below 2^32 p[i]; bits past n are 0.
void bernoulli(const float* p, int64_t n, uint64_t key, uint8_t* bitmap, int threads);

// --- bucket_norm.cpp
// norms[b] = the norm (0: l2, 1: max, 2: l1) of x[b * bucket, (b + 1) * bucket), the last bucket being what is left.
void bucket_norms(const float* x, int64_t n, int64_t bucket, int norm, float* norms, int threads);

// --- quantize.cpp
// QSGD: per bucket of `bucket` elements (the last one may be shorter) its norm (0: l2, 1: max) and, per element, a
// signed level in -s..s, s = 2^(bits - 1) - 1, drawn so that s x / norm is its mean (draw i of the key belongs to x[i]).
// 2 <= bits <= 16. NaN becomes 0 and infinity the largest float. One read of x where bucket <= kChunk.
void quantize(const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key, int32_t* codes, float* norms,
              int threads);
// The same levels in sign and magnitude (the sign is the top bit) as a bit stream of ceil(n * bits / 8) bytes.
void quantize_packed(const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key, uint8_t* packed,
                     float* norms, int threads);
// x[i] = level / s * norm. -1 when a level is beyond s, else 0.
int dequantize(const int32_t* codes, const float* norms, int64_t n, int bits, int64_t bucket, float* x, int threads);
// out[i] += weight * (level / s * norm), from the bit stream. -1, and out untouched, when a norm is negative or not
// finite.
int quantized_decode_add(const uint8_t* packed, const float* norms, int64_t n, int bits, int64_t bucket, float weight,
                         float* out, int threads);

// --- ternary.cpp
// TernGrad: sign(x) with probability min(|x|, clip) / scale, else 0; draw i of the key belongs to x[i]. Five to a byte,
// ceil(n / 5) bytes: of each 320 elements (or what is left of them) w = ceil(320 / 5) bytes, byte j being the sum of
// 3^k t over the trits t of elements k w + j, where t is 0 for zero, 1 for plus, 2 for minus. NaN counts as 0.
void ternary_packed(const float* x, int64_t n, float scale, float clip, uint64_t key, uint8_t* packed, int threads);
// out[i] += value * (-1, 0 or 1). -1, and out untouched, when a byte is above 242, which no five trits make.
int ternary_decode_add(const uint8_t* packed, int64_t n, float value, float* out, int threads);

// --- signs.cpp
// One bit per sign, as write_signs of sign_bits.h says.
void pack_signs(const float* x, int64_t n, uint64_t key, uint8_t* packed, int threads);
// What most of the 1 to 65535 voters say, bit by bit; where as many say one as the other, coin i of the key decides.
// Spare bits of voters are not looked at; those of the result are 0.
void majority(const uint8_t* const* votes, int voters, int64_t n, uint64_t key, uint8_t* packed, int threads);
// out[i] += scale or, where the bit is set, -scale.
void signs_decode_add(const uint8_t* packed, int64_t n, float scale, float* out, int threads);

// --- one_bit.cpp
// 1-bit SGD: the signs, and per row of x the means of the values whose bit is clear and of those whose bit is set (0
// where there is none), summed in double in a fixed order. One read of x unless rows are very long.
void one_bit_packed(const float* x, int64_t rows, int64_t columns, uint64_t key, uint8_t* packed, float* means,
                    int threads);
// out[i] += weight * the mean of the row and bit. -1, and out untouched, when a mean is not finite.
int one_bit_decode_add(const uint8_t* packed, const float* means, int64_t rows, int64_t columns, float weight,
                       float* out, int threads);

// --- atom_probabilities.cpp
// p[i] = min(1, c |atoms[i]|), c such that they add up to the budget (or to the number of nonzero atoms, if that is
// less). -1 when an atom is not finite. Computed in double, sums in a fixed order.
int atom_probabilities_float(const float* atoms, int64_t n, double budget, float* p, int threads);
int atom_probabilities_double(const double* atoms, int64_t n, double budget, double* p, int threads);

// --- elias.cpp
// Levels as Elias-coded runs (QSGD, section 3.2 and appendix A.2, with Elias' gamma code, which is never longer than
// the recursive one below 32). n elements are cut into chunks of 4096: first the bytes of each chunk as uint16, then the
// chunks. A chunk is a little-endian bit stream, zero-padded to a byte: for each level that is not zero gamma(zeros
// before it + 1), its sign (1: negative), gamma(|level|); and gamma(zeros + 1) if the chunk ends in zeros. gamma(v), first
// bit lowest: floor(log2 v) zeros, a one, the bits of v below the top one, lowest first.
// Returns the bytes written, -1 when a level is beyond 65535, -2 when there are more than capacity.
int64_t elias_encode(const int32_t* codes, int64_t n, uint8_t* out, int64_t capacity, int threads);
// -1 when the bytes are not such a stream of n levels, none beyond `top`; codes may be partly written by then.
int elias_decode(const uint8_t* stream, int64_t nbytes, int64_t n, int32_t top, int32_t* codes, int threads);

// --- quantize.cpp, with the coding of elias.cpp
// The levels of `quantize`, coded in the pass that draws them. Returns the bytes written, -2 when more than capacity.
int64_t quantize_elias(const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key, uint8_t* out,
                       int64_t capacity, float* norms, int threads);
// out[i] += weight * (level / s * norm). -1 when a norm is negative or not finite, or the bytes are not a stream of n
// levels; out may be partly added to by then.
int elias_decode_add(const uint8_t* stream, int64_t nbytes, const float* norms, int64_t n, int bits, int64_t bucket,
                     float weight, float* out, int threads);
// --- orthogonalize.cpp
// Makes the columns of each matrix (row-major) orthonormal, in place, as gradzip/ops/orthogonalize.py says.
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

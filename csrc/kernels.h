// Every kernel, declared once, for the CPU (cpu/ops.h), for CUDA (cuda/ops.h) and for Python (bindings.cpp,
// cuda/bindings.h).
//
// Those who include this file define KERNEL(name, parameters...), and KERNEL_WITH_WORKSPACE for kernels that need
// scratch memory on CUDA. Included without them, it has the types of the parameters only.
//
// Naming: a kernel is named after its file, STEM or STEM_VERB. Parameters are raw pointers and sizes in elements; the
// caller (gradzip/ops) owns all memory and has checked all sizes. Pointers are to memory of the device unless
// documented otherwise. Results have the same bits on every device, except the bits of NaNs and what is documented.
// Comments that begin with "On CUDA" give the differences.
//
// Results other than arrays are written through the last pointer:
//   int32_t* failed    set to 1 if the input is invalid or corrupt, unchanged otherwise. On CUDA it may be null
//   int64_t* count, found, nbytes, outside    as documented with each kernel
//
// const void* x, void* out: an array of float32, or of the 16-bit floats that `int dtype` numbers (common/half.h). These
// are computed with as if they were converted to float32, and written as if float32 results were, rounded once.
//
// const int64_t* replays: unless it is null, a number that makes other keys of all random keys of a call (replay_key in
// common/philox.h). Kernels without it are not used in steps that are captured as CUDA graphs.
//
// Unless documented otherwise, no array is written when *failed is set. On CUDA nobody may be reading it, so decoders
// also write NaN: a non-finite average makes every rank skip the step.

#include "common/add_residual.h"
#include "common/bitmap_code.h"
#include "common/chunk_topk.h"
#include "common/dtype.h"
#include "common/elias.h"
#include "common/index_code.h"
#include "common/low_rank.h"
#include "common/natural.h"
#include "common/one_bit.h"
#include "common/orthogonalize.h"
#include "common/payload.h"
#include "common/quantize.h"
#include "common/range_float_fit.h"
#include "common/restore.h"
#include "common/selection.h"
#include "common/signs.h"
#include "common/ternary.h"
#include "common/topk_abs.h"
#include "common/transform.h"
#include "common/weighted_sum.h"

#ifdef KERNEL

// --- abs_max
// *most = max |x|: 0 if n is 0, NaN if any x is NaN. One read of x.
KERNEL(abs_max, const void* x, int dtype, int64_t n, float* most);
// The same for each column of each matrix: most has room for the columns of all, one matrix after the other. Those of
// 16-bit floats have one column.
KERNEL(abs_max_columns, const Matrix* matrices, int64_t count, int dtype, float* most);

// --- add_residual
// out = x + residual for each entry of the table, which is in host memory on every device, rounded once.
// On CUDA: A launch takes kAddBatch entries.
KERNEL(add_residual, const ResidualSum* table, int64_t count);

// --- restore
// Unless *number is finite, overwrites each target by its source or pattern. The table is in host memory on every
// device. Targets overlap neither each other, nor sources, nor `number`.
// On CUDA: A launch takes kRestoreBatch entries.
KERNEL(restore, const float* number, const Restoration* table, int64_t count);

// --- select
// The k largest |x|, 1 <= k <= n; of equal magnitudes, those with the lowest index. Expected cost: one read of x.
// On CUDA: At most three reads of x.
KERNEL_WITH_WORKSPACE(select, const float* x, int64_t n, int64_t k, Selection* selection);

// --- topk_abs
// Indices of the elements of a selection, ascending, and their values, for each vector of the table, which is in host
// memory on every device. A selection of the table has k elements, 0 <= k <= n < 2^31. If it is null, `select` makes it,
// of k >= 1.
// On CUDA: A launch takes kMostVectors of them. Of a given selection one read of x, two at most; otherwise three as a
// rule, five at most.
KERNEL_WITH_WORKSPACE(topk_abs, const TopkSource* table, int64_t count);

// --- select_sampled
// About k of the largest |x|, 1 <= k <= n, by a threshold found on a random sample (drawn with `key`), for each vector
// of the table, which is in host memory on every device. *count of an entry is the number selected: within 10 % of k; or
// exactly k, by `select`, if no sample comes that close; or the number of nonzero elements if that is less than k.
// Expected cost: one read of x.
// On CUDA: A launch takes kMostVectors of them. As a rule one read of x, at most four.
KERNEL_WITH_WORKSPACE(select_sampled, const SampledSource* table, int64_t count);

// --- bitmap
// Bit i % 8 of bitmap[i / 8] is set if x[i] is selected; bits past n are 0. *count is the number of bits set.
KERNEL_WITH_WORKSPACE(bitmap, const float* x, int64_t n, const Selection* selection, uint8_t* bitmap, int64_t* count);
// *count = the number of bits set among the first n.
KERNEL_WITH_WORKSPACE(bitmap_count, const uint8_t* bitmap, int64_t n, int64_t* count);
// Indices of the set bits, ascending. *found is the number of bits set; if it differs from `count`, no array is written.
KERNEL_WITH_WORKSPACE(bitmap_indices, const uint8_t* bitmap, int64_t n, int64_t count, int32_t* indices,
                      int64_t* found);

// --- bitmap_code
// Tables are in host memory on every device.
// Entropy-codes bitmaps of n bits, whose spare bits are 0, in the format of common/bitmap_code.h. `out` has room for
// ceil(n / 8) bytes and 2 per segment. *nbytes is the size of the stream.
// On CUDA: `out` has room for the stream: no more is written. A launch takes kMostVectors bitmaps.
KERNEL_WITH_WORKSPACE(bitmap_code_encode, const BitmapSource* table, int64_t count);
// Decodes streams of bitmaps of n bits. exact: nothing follows a stream in its bytes. *failed: 1 + the index of the
// first stream that is not that of a bitmap with as many bits set; bitmaps may be written on failure.
// On CUDA, *failed is 1 + the index of any corrupt stream. The bitmaps of all of these have another number of bits set
// than in the table, if n > 0. A launch takes kMostVectors streams.
KERNEL_WITH_WORKSPACE(bitmap_code_decode, const BitmapStream* table, int64_t count, bool exact, int32_t* failed);

// --- compact
// The values whose bit is set, in order (prefix-sum packing; HPDC'20, section 3.2). Items have 4 or 8 bytes. *found is
// the number of bits set; if it exceeds `capacity`, `out` is not written.
KERNEL_WITH_WORKSPACE(compact, const void* values, int64_t n, int item_size, const uint8_t* bitmap, void* out,
                      int64_t capacity, int64_t* found);
// The inverse: out[i] is the next value if bit i is set, 0 otherwise. *found is the number of bits set; if it differs
// from `count`, `out` is not written.
KERNEL_WITH_WORKSPACE(compact_expand, const void* values, int64_t count, int item_size, const uint8_t* bitmap,
                      void* out, int64_t n, int64_t* found);

// --- random_indices
// k of the n indices, ascending, 0 <= k <= n < 2^31. Draw i of the key picks one index of [i n / k, (i + 1) n / k);
// draw k picks a shift that is added to all of them, modulo n. Every index has the same probability.
KERNEL(random_indices, int64_t n, int64_t k, uint64_t key, const int64_t* replays, int32_t* indices);

// --- index_code
// Encodes indices in the smaller of the two forms of common/index_code.h, for each entry of the table, which is in host
// memory on every device. *nbytes is the size of the stream; -1 if the indices are not strictly ascending within
// [0, numel), numel < 2^31. `out` is written only if `capacity` suffices; a capacity of 0 computes the size only.
// On CUDA: A launch takes kMostVectors entries.
KERNEL_WITH_WORKSPACE(index_code_encode, const IndexSource* table, int64_t count);
// The inverse, for each entry of the table, which is in host memory on every device. *failed: 1 + the index of the first
// entry whose bytes do not begin with a stream of `count` strictly ascending indices below numel. They may be any; what
// follows the stream is not read. Its `indices` may be partly written, and those after it are not.
// On CUDA: *failed is 1 on failure, and all others are decoded. A launch takes kMostVectors entries.
KERNEL_WITH_WORKSPACE(index_code_decode, const IndexStream* table, int64_t count, int32_t* failed);
// Adds weight * value to the element of each index, for the terms of each sum in order. *failed: 1 + the index of the
// first term that is corrupt, as above; its sum then holds part of the terms, and those after it are as they were.
// On CUDA: The tables are read before the call returns. *failed is 1 on failure, and each sum of a corrupt term becomes
// NaN.
KERNEL_WITH_WORKSPACE(index_code_decode_add, const WeightedSum* table, int64_t count, const IndexTerm* terms,
                      int32_t* failed);

// --- chunk_topk
// Tables are in host memory on every device.
// Of each chunk of the n < 2^31 elements of each vector, all of one type, the k of largest magnitude, or chunk_count of
// the last chunk (common/chunk_topk.h): their indices, ascending, ties to the lower index, and the chunk's record, with
// the levels and codes of their values. chunk is a multiple of 32, kMostChunk at most; 1 <= k <= chunk. Unless it is null,
// `most` gets the largest level of each vector, with the bits of a lower level after its own; not finite if an element
// is not. One read of x.
// On CUDA: A launch takes kChunkSources vectors.
KERNEL(chunk_topk, const ChunkSource* table, int64_t count, int dtype, int64_t chunk, float* most);
// The values of records. *failed: 1 + the index of the first vector with levels that are not those of finite numbers.
// On CUDA: *failed, which may be null, is 1 then, and not written if nothing fails. Values of a chunk that fails are NaN.
// A launch takes kChunkRecords vectors.
KERNEL(chunk_topk_values, const ChunkRecords* table, int64_t count, int64_t chunk, int32_t* failed);

// --- range_float
// Fits a format to the values of each entry of the table, which is in host memory on every device. The range is that of
// x if vmin > vmax, [vmin, vmax] otherwise. mantissa < 0 picks the mantissa with the least expected squared error on the
// histogram of x.
// On CUDA: A launch takes kMostVectors entries.
KERNEL_WITH_WORKSPACE(range_float_fit, const RangeFit* table, int64_t count, int bits, int mantissa, float vmin,
                      float vmax);
// Codes of x, rounded to nearest or stochastically (draw i of the key rounds x[i]). *outside is the number of
// values outside [vmin, vmax].
KERNEL(range_float_encode, const RangeFloat* format, const float* x, int64_t n, bool stochastic, uint64_t key,
       int32_t* codes, int64_t* outside);
// The same codes as a bit stream of ceil(n * bits / 8) bytes, for each entry of the table, which is in host memory on
// every device. `bits` is that of the formats. *outside, which entries may share, grows by the number of values outside.
// On CUDA: A launch takes kMostVectors entries.
KERNEL(range_float_encode_packed, const RangeSource* table, int64_t count, int bits, bool stochastic,
       const int64_t* replays);
// `format` is in host memory on every device. *failed: a code is above P + Q. x is written nevertheless.
// On CUDA: A code above P + Q becomes NaN.
KERNEL(range_float_decode, const RangeFloat* format, const int32_t* codes, int64_t n, float* x, int32_t* failed);
// The values of a bit stream of codes of `bits` bits, for each entry of the table, which is in host memory on every
// device. *failed: 1 + the index of the first entry whose `wire` are not the 8 bytes of range_wire of a format of `bits`
// bits, or that has a code above P + Q.
// On CUDA: *failed is 1 then. x is NaN, or its element of such a code. A launch takes kRangeCodes entries.
KERNEL(range_float_decode_packed, const RangeCodes* table, int64_t count, int bits, int32_t* failed);

// --- low_rank
// For each entry of the table: m and e are rows x columns, factor is columns x rank (rows x rank if `transpose`), out
// is rows x rank (columns x rank); all row-major, rank >= 1. One pass over m and e. Entries share no output. An element
// of p q^T is fused multiply-adds, fma(q[j, k], p[i, k], sum) over k in order from 0, everywhere.
// On CUDA: Any rank. The sums of low_rank_project run in another order than the CPU's, so their bits differ from the
// CPU's; the order depends on the sizes only, so the bits are the same on every device. Tables are in host memory.
KERNEL_WITH_WORKSPACE(low_rank_project, const Projection* table, int64_t count);
// out = p q^T, or from - p q^T if `from` is not null; `from` may be out. p is rows x rank, q is columns x rank.
KERNEL(low_rank_expand, const float* p, const float* q, int64_t rows, int64_t columns, int64_t rank, const float* from,
       float* out);
// For each entry, in one pass. sent_p and sent_q may be p and q themselves.
KERNEL(low_rank_apply_average, const AverageUpdate* table, int64_t count);

// --- pack_bits
// Little-endian bit stream of n codes of 1..32 bits, ceil(n * bits / 8) bytes. Higher bits of a code are dropped.
KERNEL(pack_bits, const int32_t* codes, int64_t n, int bits, uint8_t* packed);
KERNEL(pack_bits_unpack, const uint8_t* packed, int64_t n, int bits, int32_t* codes);

// --- bernoulli
// Bit i % 8 of bitmap[i / 8] is set if draw i of the key is below 2^32 p[i]; bits past n are 0.
KERNEL(bernoulli, const float* p, int64_t n, uint64_t key, uint8_t* bitmap);

// --- bucket_norms
// norms[b] = the norm (0: l2, 1: max, 2: l1) of x[b * bucket, (b + 1) * bucket). The last bucket may be shorter.
KERNEL_WITH_WORKSPACE(bucket_norms, const void* x, int dtype, int64_t n, int64_t bucket, int norm, float* norms);

// --- quantize
// QSGD: the norm (0: l2, 1: max) of each bucket of `bucket` elements (the last one may be shorter) and, per element, a
// signed level in -s..s, s = 2^(bits - 1) - 1, drawn so that its expectation is s x / norm (draw i of the key rounds
// x[i]). 2 <= bits <= 16. NaN counts as 0 and infinity as the largest float. One read of x if bucket <= kChunk.
KERNEL_WITH_WORKSPACE(quantize, const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key,
                      int32_t* codes, float* norms);
// The same levels in sign-magnitude form (the sign is the top bit) as a bit stream of ceil(n * bits / 8) bytes, for
// each vector of the table, which is in host memory on every device; all are of one type. Unless it is null, `most` gets
// max |x| of each, as by abs_max.
// On CUDA: A launch takes kQuantizeBatch vectors. Norms of buckets that are longer than a tile take one launch or two
// more.
KERNEL_WITH_WORKSPACE(quantize_packed, const QuantizeSource* table, int64_t count, int dtype, int bits, int64_t bucket,
                      int norm, const int64_t* replays, float* most);
// x[i] = level / s * norm. *failed: a level is beyond s. x is written nevertheless.
KERNEL(quantize_decode, const int32_t* codes, const float* norms, int64_t n, int bits, int64_t bucket, float* x,
       int32_t* failed);
// out = the sum of weight * (level / s * norm) over the terms, in order, with a rounding after each; or out += each, if
// `add`. `out` has n elements in `parts` parts (common/parts.h), each with `count` terms of its own. The terms are in host
// memory on every device. *failed: 1 + the index of the first term with a norm that is negative or not finite.
// On CUDA: *failed is 1 on failure, and the elements of the invalid buckets become NaN. A launch takes kTermsBatch
// terms. More of them are added to `out`, as with `add`, which is float32 then.
KERNEL(quantize_decode_sum, const QuantizedTerm* terms, int64_t count, int64_t parts, int64_t n, int bits,
       int64_t bucket, float weight, bool add, void* out, int dtype, int32_t* failed);

// --- natural
// Natural compression: the sign and the exponent of each x, or with the probability of x's mantissa (draw i of the key)
// the next exponent, as a bit stream of ceil(9 n / 8) bytes, for each vector of the table, which is in host memory on
// every device; all are of one type. Unless it is null, `most` gets max |x| of each, as by abs_max. One read of x.
// On CUDA: A launch takes kNaturalSources vectors.
KERNEL(natural_encode, const NaturalSource* table, int64_t count, int dtype, const int64_t* replays, float* most);
// out = the sum of weight * the powers of two of the payloads, in order, with a rounding after each; or out += each, if
// `add`. `out` has n elements in `parts` parts (common/parts.h), each with `count` payloads of its own. The table is in
// host memory on every device. *failed: 1 + the index of the first payload with an exponent of infinity, whose elements
// become infinite or NaN.
// On CUDA: *failed is 1 on failure. A launch takes kNaturalBatch payloads. More of them are added to `out`, as with
// `add`, which is float32 then.
KERNEL(natural_decode_sum, const uint8_t* const* payloads, int64_t count, int64_t parts, int64_t n, float weight,
       bool add, void* out, int dtype, int32_t* failed);

// --- ternary
// Tables are in host memory on every device.
// TernGrad: sign(x) with probability min(|x|, *clip) / *scale, else 0; draw i of the key decides for x[i]. A null clip
// does not clip. NaN counts as 0. Five trits to a byte, ceil(n / 5) bytes: each 320 elements (the last group may be
// shorter) take w = ceil(320 / 5) bytes, byte j being the sum of 3^k t over the trits t of elements k w + j; t is 0 for
// zero, 1 for plus, 2 for minus.
// On CUDA: Tables are read before the call returns.
KERNEL_WITH_WORKSPACE(ternary_packed, const TernarySource* table, int64_t count, const int64_t* replays);
// Adds the terms of each sum in order, with a rounding after each. *failed: 1 + the index of the first term of which
// *scale is negative or not finite, or a byte is above 242, the largest that five trits make.
// On CUDA: *failed is 1 on failure, and the elements of the invalid bytes, or all if a scale is invalid, become NaN.
KERNEL_WITH_WORKSPACE(ternary_decode_add, const WeightedSum* table, int64_t count, const TernaryTerm* terms,
                      int32_t* failed);

// --- block_float
// Block-scaled integers of 2, 4 or 8 bits (common/block_float.h), one read of x. block is a multiple of 32, 4096 at
// most. For each of several rows of n elements, consecutive in all arrays, a payload: the records of `blocks` blocks,
// of which the first hold the n elements and the others nothing. Encodes x + residual if residual is not null, and
// writes what the payload lacks of it to `error`, which may be x if that is float32; it may be null if residual is. keys: of the rows, in
// host memory on every device, with 4 or 8 bits; draw i of a row's key rounds its element i. Null rounds to nearest. A
// block with an element that is not finite gets a step and an `error` of NaN.
// On CUDA: A launch takes kKeysBatch rows.
KERNEL(block_float_encode, const void* x, int dtype, const float* residual, int64_t rows, int64_t n, int64_t blocks,
       int bits, int64_t block, const uint64_t* keys, const int64_t* replays, float* error, uint8_t* payloads);
// out = start + weight * the sum of the `each` payloads of each shard, in order. Shards are blocks * block consecutive
// elements of the n in `out`, the last ones maybe fewer. `payloads` lists all those of shard 0, then those of shard 1,
// and is in host memory on every device. start: null for zeros; may be out. Any bytes are payloads.
// On CUDA: A launch takes kTableSize payloads of a shard. More of them are added to `out`, which is float32 then.
KERNEL(block_float_decode, const uint8_t* const* payloads, int64_t shards, int64_t each, int64_t blocks, int64_t n,
       int bits, int64_t block, float weight, const float* start, void* out, int dtype);

// --- signs
// Tables are in host memory on every device. One bit per sign, by the rule of write_signs in sign_bits.h. Unless it is
// null, `statistics` gets two numbers for each tensor: max |x| as by abs_max, and mean |x|, summed as by bucket_norms:
// infinite if the sum exceeds the largest float, 0 if n is 0.
// On CUDA: Tables are read before the call returns.
KERNEL_WITH_WORKSPACE(signs_pack, const SignsSource* table, int64_t count, const int64_t* replays, float* statistics);
// The majority of 1 to 65535 votes on each entry, bit by bit; on a tie, coin i of the entry's key decides. Bits past n
// are ignored in the votes and 0 in the result. `votes` lists those on the first entry, then those on the next.
// `against`, unless it is null, gets the number of bits that differ from the majority, for each vote in that order.
KERNEL_WITH_WORKSPACE(signs_majority, const SignsVote* table, int64_t count, const uint8_t* const* votes, int voters,
                      const int64_t* replays, int64_t* against);
// Adds the terms of each sum in order, with a rounding after each.
KERNEL_WITH_WORKSPACE(signs_decode_add, const WeightedSum* table, int64_t count, const SignsTerm* terms);

// --- one_bit
// Tables are in host memory on every device. 1-bit SGD: the signs, as by signs_pack, and, per row of each x, the mean
// of the values whose bit is clear and of those whose bit is set (0 if there are none), summed in double in a fixed
// order. Unless it is null, `most` gets max |x| of each x, as by abs_max. One read of x unless rows are very long.
// On CUDA: Tables are read before the call returns.
KERNEL_WITH_WORKSPACE(one_bit_packed, const OneBitSource* table, int64_t count, const int64_t* replays, float* most);
// Adds the terms of each sum in order, with a rounding after each. *failed: 1 + the index of the first term with a mean
// that is not finite.
// On CUDA: *failed is 1 on failure, and the elements of the invalid rows become NaN.
KERNEL_WITH_WORKSPACE(one_bit_decode_add, const WeightedSum* table, int64_t count, const OneBitTerm* terms,
                      int32_t* failed);

// --- atom_probabilities
// p[i] = min(1, c |atoms[i]|) with c such that they sum to the budget (or to the number of nonzero atoms if that is
// less). Computed in double, sums in a fixed order. *failed: an atom is not finite.
// On CUDA: p is NaN on failure.
KERNEL_WITH_WORKSPACE(atom_probabilities_float, const float* atoms, int64_t n, double budget, float* p,
                      int32_t* failed);
KERNEL_WITH_WORKSPACE(atom_probabilities_double, const double* atoms, int64_t n, double budget, double* p,
                      int32_t* failed);

// --- elias
// Elias-coded levels (QSGD, section 3.2 and appendix A.2, with Elias' gamma code, which is never longer than the
// recursive one below 32). The stream: n elements are cut into chunks of 4096; first the size of each chunk in bytes,
// as uint16, then the chunks. A chunk is a little-endian bit stream, zero-padded to a whole byte. Each nonzero level is
// gamma(number of zeros before it + 1), its sign (1: negative), gamma(|level|); trailing zeros are gamma(zeros + 1).
// gamma(v), lowest bit first: floor(log2 v) zeros, a one, the bits of v below its top bit, lowest first. *nbytes is the
// size of the stream; -1 if a level is beyond 65535, -2 if the capacity does not suffice. The stream is complete in the
// first case only.
KERNEL_WITH_WORKSPACE(elias_encode, const int32_t* codes, int64_t n, uint8_t* out, int64_t capacity, int64_t* nbytes);
// *failed: the bytes are not a stream of n levels of magnitude `top` at most. `codes` may be partly written on failure.
KERNEL_WITH_WORKSPACE(elias_decode, const uint8_t* bytes, int64_t nbytes, int64_t n, int32_t top, int32_t* codes,
                      int32_t* failed);
// The levels of `quantize`, encoded as they are drawn. *nbytes as in elias_encode.
KERNEL_WITH_WORKSPACE(elias_quantize, const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key,
                      uint8_t* out, int64_t capacity, float* norms, int64_t* nbytes);
// out = the sum of weight * (level / s * norm) over the terms, in order, with a rounding after each; or out += each, if
// `add`. The terms are in host memory on every device. *failed: 1 + the index of the first term with a norm that is
// negative or not finite, or with sizes of chunks that are not those of its bytes (`out` is then unchanged); else of the
// first one with a chunk that does not code its levels (`out` then holds part of the sum).
// On CUDA: *failed is 1 on failure, and the elements of the invalid buckets and chunks, or all if the sizes of chunks are
// invalid, become NaN. A launch takes kLanes terms. More of them are added to `out`, as with `add`.
KERNEL_WITH_WORKSPACE(elias_decode_sum, const EliasTerm* terms, int64_t count, int64_t n, int bits, int64_t bucket,
                      float weight, bool add, float* out, int32_t* failed);

// --- orthogonalize
// Makes the columns of each matrix (row-major) orthonormal, in place; gradzip/ops/orthogonalize.py has the details.
// On CUDA: `matrices` is a table in host memory, read before the call returns; the matrices are on the device. The bits
// are those of the CPU unless columns are linearly dependent.
KERNEL_WITH_WORKSPACE(orthogonalize, const Matrix* matrices, int64_t count);

// --- transform
// `code` is the transform (common/transform.h), n the number of elements. The coefficients are groups of `group`
// floats, in tiles and planes.
// On CUDA: Coefficients and elements have the bits of the CPU, but for the signs of zeros. Where numbers are infinite
// or NaN, so may others of their row be.
KERNEL(transform, const float* x, int64_t n, uint32_t code, float* coefficients);
KERNEL(transform_inverse, const float* coefficients, int64_t n, uint32_t code, float* x);
// The k groups of largest magnitude, 1 <= k <= groups; of equal magnitudes, the first. Their bits in `bitmap`, and
// their k * group coefficients. The magnitude of a pair is its energy, (s re)^2 + (s im)^2 with s = unit_scale(max
// |x|). Tables are in host memory on every device. Expected cost: one read of x, if the scratch memory has room for
// about 1.5 k groups: one float each, three for pairs.
// On CUDA: Two reads of x, three for pairs. The scratch memory is of use only if it has room for all coefficients, of
// whole tiles; otherwise the workspace has that. A launch takes kMostVectors entries.
KERNEL_WITH_WORKSPACE(transform_select, const TransformSource* table, int64_t count, uint32_t code);
// Of each sum, out = weight * the inverse transform of the sum of its parts, or out += that, if `add`. `parts` lists
// those of the first sum, then those of the next. *failed: 1 + the index of the first part whose bitmap does not have
// `count` bits set, or whose format is not valid; sums before its own are written.
// On CUDA: At most kMostParts parts of a sum, and of a launch. A sum is NaN on failure.
KERNEL_WITH_WORKSPACE(transform_decode, const WeightedSum* table, int64_t count, const TransformPart* parts,
                      uint32_t code, float weight, int32_t* failed);

// --- payload
// Writes the header of each payload whose sections are in place, with the results and the checksum. The table is in
// host memory on every device. header.nbytes is the size of the payload, a multiple of 16.
// On CUDA: Tables are read before the call returns.
KERNEL_WITH_WORKSPACE(payload_seal, const PayloadSeal* table, int64_t count);
// Fills the table with the headers and checksums of `each` consecutive payloads in each of `count` buffers, which are
// listed in host memory on every device. In each buffer, stops at the first header with an invalid size; later entries,
// and its checksum, are 0.
KERNEL(payload_inspect, const PayloadBuffer* buffers, int64_t count, int64_t each, PayloadInspection* table);
// The same of one payload in each buffer; numbers: 0 for each, or NaN unless it is as expected and of a finite gradient.
// `expected` is in host memory on every device.
// On CUDA: A launch takes kVerifyBatch payloads.
KERNEL(payload_verify, const PayloadExpectation* expected, int64_t count, PayloadInspection* table, float* numbers);

#undef KERNEL
#undef KERNEL_WITH_WORKSPACE
#endif

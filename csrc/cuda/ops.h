// The CUDA kernels: those of csrc/cpu/ops.h, with the same parameters and the same bits in their results (except the
// bits of NaNs). Comments here give the differences only.
//
// Pointers are to device memory unless documented otherwise. Work is queued on `stream` of the current device. A kernel
// neither waits for the device, nor allocates, nor copies to the host.
//
// Kernels that need scratch memory follow CUB's two-phase convention: called with a null workspace they return the
// number of bytes they need and queue nothing; called with a workspace of that size, aligned to 16 bytes, they queue
// the work and return 0. A kernel that turns out to need no scratch memory runs and returns 0 in the first call.
//
// `failed` may be null. Nobody may be reading it, so decoders also write NaN on failure: a non-finite average makes
// every rank skip the step.
//
// Plain C++: the bindings include this header without the CUDA headers.
#pragma once

#include <cstdint>

#include "common/bitmap_code.h"
#include "common/index_code.h"
#include "common/low_rank.h"
#include "common/one_bit.h"
#include "common/orthogonalize.h"
#include "common/payload.h"
#include "common/quantize.h"
#include "common/range_float.h"
#include "common/selection.h"
#include "common/signs.h"
#include "common/ternary.h"
#include "common/transform.h"
#include "common/weighted_sum.h"

using cudaStream_t = struct CUstream_st*;

namespace gradzip::cuda {

// --- abs_max
void abs_max(const float* x, int64_t n, float* most, cudaStream_t stream);
void abs_max_columns(const Matrix* matrices, int64_t count, float* most, cudaStream_t stream);

// --- select
// At most three reads of x.
int64_t select(void* workspace, const float* x, int64_t n, int64_t k, Selection* selection, cudaStream_t stream);

// --- select_sampled
// As a rule one read of x, at most four.
int64_t select_sampled(void* workspace, const float* x, int64_t n, int64_t k, uint64_t key, Selection* selection,
                       int64_t* count, cudaStream_t stream);

// --- bitmap
int64_t bitmap(void* workspace, const float* x, int64_t n, const Selection* selection, uint8_t* bitmap, int64_t* count,
               cudaStream_t stream);
int64_t bitmap_count(void* workspace, const uint8_t* bitmap, int64_t n, int64_t* count, cudaStream_t stream);
int64_t bitmap_indices(void* workspace, const uint8_t* bitmap, int64_t n, const float* x, int64_t count,
                       int32_t* indices, float* values, int64_t* found, cudaStream_t stream);

// --- bitmap_code
// `out` has room for the stream: no more is written.
int64_t bitmap_code_encode(void* workspace, const uint8_t* bitmap, int64_t n, int segment, uint8_t* out,
                           int64_t* nbytes, cudaStream_t stream);
// *failed: 1 + the index of any corrupt stream. The bitmaps of all of these have another number of bits set than in the
// table, if n > 0.
int64_t bitmap_code_decode(void* workspace, const BitmapStream* streams, int64_t count, int64_t n, int segment,
                           int32_t* failed, cudaStream_t stream);

// --- compact
int64_t compact(void* workspace, const void* values, int64_t n, int item_size, const uint8_t* bitmap, void* out,
                int64_t capacity, int64_t* found, cudaStream_t stream);
int64_t compact_expand(void* workspace, const void* values, int64_t count, int item_size, const uint8_t* bitmap,
                       void* out, int64_t n, int64_t* found, cudaStream_t stream);

// --- random_indices
void random_indices(int64_t n, int64_t k, uint64_t key, int32_t* indices, cudaStream_t stream);

// --- index_code
int64_t index_code_encode(void* workspace, const int32_t* indices, int64_t count, int64_t numel, uint8_t* out,
                          int64_t capacity, int64_t* nbytes, cudaStream_t stream);
int64_t index_code_decode(void* workspace, const uint8_t* bytes, int64_t nbytes, int64_t numel, int64_t count,
                          int32_t* indices, int32_t* failed, cudaStream_t stream);
// The tables are read before the call returns. *failed is 1 on failure, and each sum of a corrupt term becomes NaN.
int64_t index_code_decode_add(void* workspace, const WeightedSum* table, int64_t count, const IndexTerm* terms,
                              int32_t* failed, cudaStream_t stream);

// --- range_float
int64_t range_float_fit(void* workspace, RangeFloat* format, const float* x, int64_t n, int bits, int mantissa,
                        float vmin, float vmax, cudaStream_t stream);
void range_float_encode(const RangeFloat* format, const float* x, int64_t n, bool stochastic, uint64_t key,
                        int32_t* codes, int64_t* outside, cudaStream_t stream);
void range_float_encode_packed(const RangeFloat* format, const float* x, int64_t n, int bits, bool stochastic,
                               uint64_t key, uint8_t* packed, int64_t* outside, cudaStream_t stream);
// A code above P + Q becomes NaN.
void range_float_decode(const RangeFloat* format, const int32_t* codes, int64_t n, float* x, int32_t* failed,
                        cudaStream_t stream);

// --- low_rank
// Any rank. The sums of low_rank_project run in another order than the CPU's, so their bits differ from the CPU's; the
// order depends on the sizes only, so the bits are the same on every device. Tables are in host memory.
int64_t low_rank_project(void* workspace, const Projection* table, int64_t count, cudaStream_t stream);
void low_rank_expand(const float* p, const float* q, int64_t rows, int64_t columns, int64_t rank, const float* from,
                     float* out, cudaStream_t stream);
void low_rank_apply_average(const AverageUpdate* table, int64_t count, cudaStream_t stream);

// --- pack_bits
void pack_bits(const int32_t* codes, int64_t n, int bits, uint8_t* packed, cudaStream_t stream);
void pack_bits_unpack(const uint8_t* packed, int64_t n, int bits, int32_t* codes, cudaStream_t stream);

// --- bernoulli
void bernoulli(const float* p, int64_t n, uint64_t key, uint8_t* bitmap, cudaStream_t stream);

// --- bucket_norms
int64_t bucket_norms(void* workspace, const float* x, int64_t n, int64_t bucket, int norm, float* norms,
                     cudaStream_t stream);

// --- quantize
int64_t quantize(void* workspace, const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key,
                 int32_t* codes, float* norms, cudaStream_t stream);
// A launch takes kKeysBatch rows. Norms of buckets that are longer than a tile take launches of their own.
int64_t quantize_packed(void* workspace, const float* x, int64_t rows, int64_t n, int bits, int64_t bucket, int norm,
                        const uint64_t* keys, int64_t stride, uint8_t* packed, float* norms, cudaStream_t stream);
void quantize_decode(const int32_t* codes, const float* norms, int64_t n, int bits, int64_t bucket, float* x,
                     int32_t* failed, cudaStream_t stream);
// *failed is 1 on failure, and the elements of the invalid buckets become NaN. A launch takes kTermsBatch terms.
void quantize_decode_sum(const QuantizedTerm* terms, int64_t count, int64_t n, int bits, int64_t bucket, float weight,
                         bool add, float* out, int32_t* failed, cudaStream_t stream);

// --- natural
// *failed is 1 on failure. A launch takes kNaturalBatch payloads.
void natural_encode(const float* x, int64_t n, uint64_t key, uint8_t* packed, float* most, cudaStream_t stream);
void natural_decode_sum(const uint8_t* const* payloads, int64_t count, int64_t n, float weight, bool add, float* out,
                        int32_t* failed, cudaStream_t stream);

// --- ternary
// Tables are read before the call returns.
int64_t ternary_packed(void* workspace, const TernarySource* table, int64_t count, cudaStream_t stream);
// *failed is 1 on failure, and the elements of the invalid bytes, or all if a scale is invalid, become NaN.
int64_t ternary_decode_add(void* workspace, const WeightedSum* table, int64_t count, const TernaryTerm* terms,
                           int32_t* failed, cudaStream_t stream);

// --- chunk_topk
// *failed, which may be null, is not written if nothing fails. Values of a chunk that fails are NaN.
void chunk_topk(const float* x, int64_t n, int64_t chunk, int64_t k, int32_t* indices, uint8_t* records,
                cudaStream_t stream);
void chunk_topk_values(const uint8_t* records, int64_t n, int64_t chunk, int64_t k, float* values, int32_t* failed,
                       cudaStream_t stream);

// --- block_float
// A launch takes kKeysBatch rows.
void block_float_encode(const float* x, const float* residual, int64_t rows, int64_t n, int64_t blocks, int bits,
                        int64_t block, const uint64_t* keys, float* error, uint8_t* payloads, cudaStream_t stream);
void block_float_decode(const uint8_t* const* payloads, int64_t shards, int64_t each, int64_t blocks, int64_t n,
                        int bits, int64_t block, float weight, const float* start, float* out, cudaStream_t stream);

// --- signs
// Tables are read before the call returns.
int64_t signs_pack(void* workspace, const SignsSource* table, int64_t count, float* statistics, cudaStream_t stream);
int64_t signs_majority(void* workspace, const SignsVote* table, int64_t count, const uint8_t* const* votes, int voters,
                       int64_t* against, cudaStream_t stream);
int64_t signs_decode_add(void* workspace, const WeightedSum* table, int64_t count, const SignsTerm* terms,
                         cudaStream_t stream);

// --- one_bit
// Tables are read before the call returns.
int64_t one_bit_packed(void* workspace, const OneBitSource* table, int64_t count, float* most, cudaStream_t stream);
// *failed is 1 on failure, and the elements of the invalid rows become NaN.
int64_t one_bit_decode_add(void* workspace, const WeightedSum* table, int64_t count, const OneBitTerm* terms,
                           int32_t* failed, cudaStream_t stream);

// --- atom_probabilities
// p is NaN on failure.
int64_t atom_probabilities_float(void* workspace, const float* atoms, int64_t n, double budget, float* p,
                                 int32_t* failed, cudaStream_t stream);
int64_t atom_probabilities_double(void* workspace, const double* atoms, int64_t n, double budget, double* p,
                                  int32_t* failed, cudaStream_t stream);

// --- elias
int64_t elias_encode(void* workspace, const int32_t* codes, int64_t n, uint8_t* out, int64_t capacity, int64_t* nbytes,
                     cudaStream_t stream);
int64_t elias_decode(void* workspace, const uint8_t* bytes, int64_t nbytes, int64_t n, int32_t top, int32_t* codes,
                     int32_t* failed, cudaStream_t stream);
int64_t elias_quantize(void* workspace, const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key,
                       uint8_t* out, int64_t capacity, float* norms, int64_t* nbytes, cudaStream_t stream);
// On failure the elements of the invalid buckets and chunks, or all if the chunk sizes are invalid, become NaN.
int64_t elias_decode_add(void* workspace, const uint8_t* bytes, int64_t nbytes, const float* norms, int64_t n, int bits,
                         int64_t bucket, float weight, float* out, int32_t* failed, cudaStream_t stream);

// --- orthogonalize
// `matrices` is a table in host memory, read before the call returns; the matrices are on the device. The bits are
// those of the CPU unless columns are linearly dependent.
int64_t orthogonalize(void* workspace, const Matrix* matrices, int64_t count, cudaStream_t stream);

// --- transform
// Coefficients and elements have the bits of the CPU, but for the signs of zeros. Where numbers are infinite or NaN, so
// may others of their row be.
void transform(const float* x, int64_t n, uint32_t code, float* coefficients, cudaStream_t stream);
void transform_inverse(const float* coefficients, int64_t n, uint32_t code, float* x, cudaStream_t stream);
// Two reads of x, three for pairs. The scratch memory is of use only if it has room for all coefficients, of whole tiles;
// otherwise the workspace has that.
int64_t transform_select(void* workspace, const float* x, int64_t n, uint32_t code, int64_t k, float* scratch,
                         int64_t scratch_numel, uint8_t* bitmap, float* values, cudaStream_t stream);
// At most kMostParts parts. The table is read before the call returns. `out` is NaN on failure.
int64_t transform_decode(void* workspace, const TransformPart* parts, int64_t count, uint32_t code, float weight,
                         bool add, float* out, int64_t n, int32_t* failed, cudaStream_t stream);

// --- payload
// Tables are read before the call returns.
int64_t payload_seal(void* workspace, const PayloadSeal* table, int64_t count, cudaStream_t stream);
void payload_inspect(const PayloadBuffer* buffers, int64_t count, int64_t each, PayloadInspection* table,
                     cudaStream_t stream);

}  // namespace gradzip::cuda

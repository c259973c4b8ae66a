// Every CUDA primitive, over raw pointers to device memory, unless said otherwise. Work is queued on `stream` of the
// current device; nothing waits for it, allocates or copies to the host, so what the CPU kernels (cpu/ops.h) return or
// take by value is written to and read from device memory here. Results have the same bits as theirs, but for those of
// NaNs that arithmetic makes. A primitive that needs scratch memory takes a workspace of at least NAME_workspace(n)
// bytes, aligned to 16, which it may overwrite.
//
// Plain C++: the bindings include it without the CUDA headers.
#pragma once

#include <cstdint>

#include "common/orthogonalize.h"
#include "common/payload.h"
#include "common/range_float.h"
#include "common/selection.h"

using cudaStream_t = struct CUstream_st*;

namespace gradzip::cuda {

// --- abs_max.cu
void abs_max(const float* x, int64_t n, float* most, cudaStream_t stream);

// --- select.cu
// At most three reads of x; k as on the CPU.
int64_t select_workspace(int64_t n);
void select(const float* x, int64_t n, int64_t k, Selection* selection, void* workspace, cudaStream_t stream);

// --- compact.cu
// *set: how many bits are set.
int64_t bitmap_workspace(int64_t n);
void bitmap(const float* x, int64_t n, const Selection* selection, uint8_t* bitmap, int64_t* set, void* workspace,
            cudaStream_t stream);
// *set: how many bits are set; above `capacity` (compact), or other than `count` (expand), `out` stays as it was.
int64_t compact_workspace(int64_t n);
void compact(const void* values, int64_t n, int item_size, const uint8_t* bitmap, void* out, int64_t capacity,
             int64_t* set, void* workspace, cudaStream_t stream);
int64_t expand_workspace(int64_t n);
void expand(const void* values, int64_t count, int item_size, const uint8_t* bitmap, void* out, int64_t n, int64_t* set,
            void* workspace, cudaStream_t stream);

// --- range_float.cu
int64_t range_float_fit_workspace(int64_t n);
void range_float_fit(RangeFloat* format, const float* x, int64_t n, int bits, int mantissa, float vmin, float vmax,
                     void* workspace, cudaStream_t stream);
// `outside` grows by how many values were outside of [vmin, vmax].
void range_float_encode(const RangeFloat* format, const float* x, int64_t n, bool stochastic, uint64_t key,
                        int32_t* codes, int64_t* outside, cudaStream_t stream);
void range_float_encode_packed(const RangeFloat* format, const float* x, int64_t n, int bits, bool stochastic,
                               uint64_t key, uint8_t* packed, int64_t* outside, cudaStream_t stream);
// *failed becomes 1 when a code is above P + Q, and is left alone else.
void range_float_decode(const RangeFloat* format, const int32_t* codes, int64_t n, float* x, int32_t* failed,
                        cudaStream_t stream);

// --- pack_bits.cu
void pack_bits(const int32_t* codes, int64_t n, int bits, uint8_t* packed, cudaStream_t stream);
void unpack_bits(const uint8_t* packed, int64_t n, int bits, int32_t* codes, cudaStream_t stream);

// --- bernoulli.cu
void bernoulli(const float* p, int64_t n, uint64_t key, uint8_t* bitmap, cudaStream_t stream);

// --- bucket_norm.cu
int64_t bucket_norms_workspace(int64_t n);
void bucket_norms(const float* x, int64_t n, int64_t bucket, int norm, float* norms, void* workspace,
                  cudaStream_t stream);

// --- quantize.cu
int64_t quantize_workspace(int64_t n);
void quantize(const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key, int32_t* codes, float* norms,
              void* workspace, cudaStream_t stream);
int64_t quantize_packed_workspace(int64_t n);
void quantize_packed(const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key, uint8_t* packed,
                     float* norms, void* workspace, cudaStream_t stream);
// *failed becomes 1 when a level is beyond the largest, and is left alone else.
void dequantize(const int32_t* codes, const float* norms, int64_t n, int bits, int64_t bucket, float* x,
                int32_t* failed, cudaStream_t stream);
// *failed becomes 1 when a norm is negative or not finite, and is left alone else. The elements of such a bucket become
// NaN: nobody may be waiting for the flag, and a non-finite average is what every rank knows to skip.
void quantized_decode_add(const uint8_t* packed, const float* norms, int64_t n, int bits, int64_t bucket, float weight,
                          float* out, int32_t* failed, cudaStream_t stream);

// --- elias.cu
// *nbytes becomes the length of the stream, -1 when a level is beyond 65535, -2 when it is more than the capacity; the
// stream is whole in the first case only.
int64_t elias_encode_workspace(int64_t n);
void elias_encode(const int32_t* codes, int64_t n, uint8_t* out, int64_t capacity, int64_t* nbytes, void* workspace,
                  cudaStream_t stream);
int64_t quantize_elias_workspace(int64_t n, int bits);
void quantize_elias(const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key, uint8_t* out,
                    int64_t capacity, float* norms, int64_t* nbytes, void* workspace, cudaStream_t stream);
// *failed becomes 1 when the bytes are not a stream of n levels up to `top`, and is left alone else.
int64_t elias_decode_workspace(int64_t n);
void elias_decode(const uint8_t* stream_bytes, int64_t nbytes, int64_t n, int32_t top, int32_t* codes, int32_t* failed,
                  void* workspace, cudaStream_t stream);
// Likewise, and when a norm is negative or not finite. The elements of such a bucket, of a chunk that is not one, or all
// where the chunks' lengths are wrong, become NaN.
int64_t elias_decode_add_workspace(int64_t n);
void elias_decode_add(const uint8_t* stream_bytes, int64_t nbytes, const float* norms, int64_t n, int bits,
                      int64_t bucket, float weight, float* out, int32_t* failed, void* workspace, cudaStream_t stream);

// --- signs.cu
void pack_signs(const float* x, int64_t n, uint64_t key, uint8_t* packed, cudaStream_t stream);
// The table of addresses, too, lies in device memory.
void majority(const uint8_t* const* votes, int voters, int64_t n, uint64_t key, uint8_t* packed, cudaStream_t stream);
void signs_decode_add(const uint8_t* packed, int64_t n, float scale, float* out, cudaStream_t stream);

// --- one_bit.cu
int64_t one_bit_packed_workspace(int64_t n);  // n = rows * columns
void one_bit_packed(const float* x, int64_t rows, int64_t columns, uint64_t key, uint8_t* packed, float* means,
                    void* workspace, cudaStream_t stream);
// *failed becomes 1 when a mean is not finite, and is left alone else. The elements of such a row become NaN.
void one_bit_decode_add(const uint8_t* packed, const float* means, int64_t rows, int64_t columns, float weight,
                        float* out, int32_t* failed, cudaStream_t stream);

// --- ternary.cu
// scale and clip (null: none) lie in device memory, where they may have been computed.
void ternary_packed(const float* x, int64_t n, const float* scale, const float* clip, uint64_t key, uint8_t* packed,
                    cudaStream_t stream);
// value = float(weight * *scale). *failed becomes 1 when a byte is above 242, or *scale negative or not finite, and is
// left alone else. The elements of such a byte, or all, become NaN.
void ternary_decode_add(const uint8_t* packed, int64_t n, const float* scale, double weight, float* out,
                        int32_t* failed, cudaStream_t stream);

// --- atom_probabilities.cu
// All NaN when an atom is not finite: nobody waits to hear of it.
int64_t atom_probabilities_float_workspace(int64_t n);
void atom_probabilities_float(const float* atoms, int64_t n, double budget, float* p, void* workspace,
                              cudaStream_t stream);
int64_t atom_probabilities_double_workspace(int64_t n);
void atom_probabilities_double(const double* atoms, int64_t n, double budget, double* p, void* workspace,
                               cudaStream_t stream);

// --- spectrum.cu
void spectrum_power(const float* spectrum, int64_t rows, int64_t length, const float* amax, float* power,
                    cudaStream_t stream);
// *failed becomes 1 when the bitmap does not have `count` bits set, and is left alone else. The spectrum becomes NaN
// then: nobody may be waiting for the flag, and a non-finite average is what every rank knows to skip.
int64_t spectrum_decode_add_workspace(int64_t n);
void spectrum_decode_add(const RangeFloat* format, const uint8_t* bitmap, const uint8_t* packed, int64_t packed_bytes,
                         int64_t count, float weight, float* spectrum, int64_t n, int32_t* failed, void* workspace,
                         cudaStream_t stream);

// --- payload.cu
int64_t payload_checksum_workspace(int64_t nbytes);
void payload_checksum(const uint8_t* payload, int64_t nbytes, uint32_t* checksum, void* workspace, cudaStream_t stream);
// Writes the header of a payload whose body is in place: `header` (host memory), with kNonFinite where one of the
// `magnitudes` is not finite, the wire form of `number` (unless null) as the last 8 bytes of the fields, and the
// checksum.
int64_t payload_seal_workspace(int64_t nbytes);
void payload_seal(uint8_t* payload, int64_t nbytes, const PayloadHeader& header, const float* magnitudes,
                  int64_t magnitude_count, const RangeFloat* number, void* workspace, cudaStream_t stream);
// Walks `count` payloads that lie one behind the other: all that a host must know about them, in one table. The walk
// ends at the first that claims an impossible length; what it did not reach is zero.
void payload_inspect(const uint8_t* buffer, int64_t nbytes, int64_t count, PayloadInspection* table,
                     cudaStream_t stream);

// --- low_rank.cu
// As on the CPU, any rank. Only the sums of low_rank_project have other bits than the CPU's: they run in another order,
// that of the sizes, and have the same bits on every device.
int64_t low_rank_project_workspace(int64_t rows, int64_t columns, int64_t rank, bool transpose);
void low_rank_project(const float* m, float* e, int64_t rows, int64_t columns, const float* q, int64_t rank,
                      bool transpose, float* out, void* workspace, cudaStream_t stream);
void low_rank_expand(const float* p, const float* q, int64_t rows, int64_t columns, int64_t rank, const float* from,
                     float* out, cudaStream_t stream);
void low_rank_settle(float* m, float* e, const float* sent_p, const float* sent_q, const float* p, const float* q,
                     int64_t rows, int64_t columns, int64_t rank, cudaStream_t stream);

// --- orthogonalize.cu
// `matrices` is a table in host memory, read before the call returns, of matrices on the device: their addresses and
// sizes are arguments of the kernel, so nothing is copied. The bits of the CPU, but where columns depend on each other.
int64_t orthogonalize_workspace(const Matrix* matrices, int64_t count);
void orthogonalize(const Matrix* matrices, int64_t count, void* workspace, cudaStream_t stream);

// --- marked_indices.cu
// *set: how many bits are set.
int64_t count_marked_workspace(int64_t n);
void count_marked(const uint8_t* bitmap, int64_t n, int64_t* set, void* workspace, cudaStream_t stream);
// *set: how many bits are set; where that is not `count`, nothing is written.
int64_t marked_indices_workspace(int64_t n);
void marked_indices(const uint8_t* bitmap, int64_t n, const float* x, int64_t count, int32_t* indices, float* values,
                    int64_t* set, void* workspace, cudaStream_t stream);

// --- random_indices.cu
void random_indices(int64_t n, int64_t k, uint64_t key, int32_t* indices, cudaStream_t stream);

// --- index_code.cu
// *nbytes: how long the stream is, -1 for indices that the CPU refuses; above `capacity`, `out` stays as it was. A
// capacity of 0 only asks for the length.
int64_t encode_indices_workspace(int64_t count);
void encode_indices(const int32_t* indices, int64_t count, int64_t numel, uint8_t* out, int64_t capacity,
                    int64_t* nbytes, void* workspace, cudaStream_t stream);
// *failed becomes 1 when the stream is corrupt, and is left alone else; `indices` may be partly written then.
int64_t decode_indices_workspace(int64_t numel);
void decode_indices(const uint8_t* stream, int64_t nbytes, int64_t numel, int64_t count, int32_t* indices,
                    int32_t* failed, void* workspace, cudaStream_t cuda_stream);
// The same; `out` becomes NaN then, as that of spectrum_decode_add does.
int64_t sparse_decode_add_workspace(int64_t numel);
void sparse_decode_add(const uint8_t* stream, int64_t nbytes, const float* values, int64_t count, float weight,
                       float* out, int64_t numel, int32_t* failed, void* workspace, cudaStream_t cuda_stream);

// --- select_sampled.cu
// *count: how many are selected. As a rule one read of x; four at most, as on the CPU.
int64_t select_sampled_workspace(int64_t n, int64_t k);
void select_sampled(const float* x, int64_t n, int64_t k, uint64_t key, Selection* selection, int64_t* count,
                    void* workspace, cudaStream_t stream);

}  // namespace gradzip::cuda

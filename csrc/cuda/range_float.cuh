// The range-based N-bit float: fitted, encoded and decoded by the functions of common/range_float.h.
#pragma once

#include "common/philox.h"
#include "common/range_float_fit.h"
#include "cuda/block/bit_stream.cuh"
#include "cuda/block/bytes.cuh"
#include "cuda/block/quads.cuh"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

// The statistics that choose a format. Zero at launch.
struct FitState {
  uint32_t low, high;  // largest magnitudes below and above zero, as bits
  uint32_t histogram[kBins];
};

struct FitEntry {
  RangeFit source;
  FitState* state;
};

__global__ void __launch_bounds__(kBlock) range_kernel(Batch<FitEntry> batch) {
  const FitEntry& entry = batch.of[blockIdx.y];
  uint32_t low = 0, high = 0;
  for_each(entry.source.x, entry.source.n, [&](float value) {
    const uint32_t u = float_bits(value), m = u & 0x7fffffffu, number = m <= kInfBits ? m : 0u;  // NaN does not count
    const uint32_t down = u >> 31 ? number : 0u, up = u >> 31 ? 0u : number;
    low = low > down ? low : down;
    high = high > up ? high : up;
  });
  low = warp_max(low);
  high = warp_max(high);
  if (lane() == 0 && low > 0) atomicMax(&entry.state->low, low);
  if (lane() == 0 && high > 0) atomicMax(&entry.state->high, high);
}

__global__ void __launch_bounds__(kBlock) histogram_kernel(Batch<FitEntry> batch) {
  __shared__ uint32_t counts[kBins];
  const auto [source, state] = batch.of[blockIdx.y];
  const float* x = source.x;
  const int64_t n = source.n;
  for (int bin = int(threadIdx.x); bin < kBins; bin += kBlock) counts[bin] = 0;
  __syncthreads();
  const int64_t step = histogram_step(n);
  for (int64_t run = blockIdx.x * step; run < n; run += gridDim.x * step)
    for (int64_t i = run + threadIdx.x; i < n && i < run + kHistogramRun; i += kBlock)
      atomicAdd(&counts[magnitude(__ldg(x + i)) >> kBinShift], 1u);
  __syncthreads();
  for (int bin = int(threadIdx.x); bin < kBins; bin += kBlock)
    if (counts[bin]) atomicAdd(&state->histogram[bin], counts[bin]);
}

// A block for each entry, one warp per mantissa. mantissa < 0 picks the best; vmin > vmax uses the range found.
constexpr int kMostBits = 16;
constexpr int kFitBlock = kMostBits * kLanes;
__global__ void __launch_bounds__(kFitBlock)
    fit_kernel(Batch<FitEntry> batch, int bits, int mantissa, float vmin, float vmax) {
  __shared__ double errors[kMostBits];
  const FitState* state = batch.of[blockIdx.y].state;
  if (vmin > vmax) {
    vmin = state->low ? -bits_float(state->low) : 0.0f;
    vmax = bits_float(state->high);
  }
  if (mantissa < 0) {
    const RangeFloat candidate = make_range_float(bits, warp() + 1, vmin, vmax);
    const double eps = range_eps(candidate), most = range_most(candidate);
    double sum = 0.0;
    for (int bin = lane(); bin < kFiniteBins; bin += kErrorLanes) {
      const uint32_t count = state->histogram[bin];
      if (count != 0) sum += double(count) * bin_error(candidate, eps, most, bin);
    }
    sum = warp_sum(sum);  // in pairs, as the CPU does
    if (lane() == 0) errors[warp()] = sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (mantissa < 0) {
    mantissa = 1;
    for (int m = 2; m <= bits; ++m)
      if (errors[m - 1] < errors[mantissa - 1]) mantissa = m;
  }
  *batch.of[blockIdx.y].source.format = make_range_float(bits, mantissa, vmin, vmax);
}
static_assert(kErrorLanes == kLanes, "a lane forms one of the sums");

// Codes of four neighbouring values, the first at a multiple of four; returns how many are outside the range.
GZ_DEVICE int encode4(const RangeFloat& format, Rounding rounding, const float* x, int64_t first, int64_t n,
                      bool stochastic, uint64_t key, uint32_t* codes) {
  const int count = int(n - first < 4 ? n - first : 4);
  float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (count == 4 && reinterpret_cast<uintptr_t>(x) % 16 == 0) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(x + first));
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (j < count) value[j] = __ldg(x + first + j);
  }
  Philox4 draw{};
  if (stochastic) draw = philox(key, uint64_t(first) / 4);
  int outside = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    codes[j] = stochastic ? range_encode(format, value[j], draw.v[j] & rounding.noise,
                                         unit_interval(draw.v[j]) * rounding.underflow)
                          : range_encode(format, value[j], rounding.noise, rounding.underflow);
    outside += j < count && range_outside(format, value[j]);
  }
  return outside;
}

GZ_DEVICE void add_outside(int count, int64_t* outside) {
  count = warp_sum(count);
  if (lane() == 0 && count > 0) atomic_add(outside, int64_t(count));
}

// Adds the number of values outside the range to *outside.
template <bool kStochastic>
__global__ void __launch_bounds__(kBlock)
    encode_kernel(const RangeFloat* words, const float* x, int64_t n, uint64_t key, int32_t* codes, int64_t* outside) {
  const RangeFloat format = *words;
  const Rounding rounding = range_rounding(format, kStochastic);
  int out = 0;
  for (int64_t first = 4 * grid_thread(); first < n; first += 4 * grid_threads()) {
    uint32_t code[4];
    out += encode4(format, rounding, x, first, n, kStochastic, key, code);
    if (first + 4 <= n && reinterpret_cast<uintptr_t>(codes) % 16 == 0) {
      *reinterpret_cast<int4*>(codes + first) = make_int4(int(code[0]), int(code[1]), int(code[2]), int(code[3]));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (first + j < n) codes[first + j] = int32_t(code[j]);
    }
  }
  add_outside(out, outside);
}

// The same, packed. `bits` is that of the format, which the host knows.
template <bool kStochastic>
__global__ void __launch_bounds__(kBlock)
    encode_packed_kernel(Batch<RangeSource> batch, int bits, const int64_t* replays) {
  __shared__ uint32_t tile[kPackTile];
  const RangeSource& source = batch.of[blockIdx.y];
  const float* x = source.x;
  const int64_t n = source.n;
  const RangeFloat format = *source.format;
  const Rounding rounding = range_rounding(format, kStochastic);
  const CodeWidth width(bits);
  const uint64_t key = kStochastic ? replay_key(source.key, replays) : 0;
  int out = 0;
  for (int64_t first = int64_t(blockIdx.x) * kPackTile; first < n; first += int64_t(gridDim.x) * kPackTile) {
    const int64_t mine = first + 4 * int64_t(threadIdx.x);
    if (mine < n) out += encode4(format, rounding, x, mine, n, kStochastic, key, tile + 4 * threadIdx.x);
    __syncthreads();
    pack_tile(tile, int(n - first < kPackTile ? n - first : kPackTile), width, source.packed + first / 8 * bits);
    __syncthreads();
  }
  add_outside(out, source.outside);
}

// x[i] = the value of code_at(i). A code that there is not becomes NaN, since nobody may be reading the flag; so does every
// one if the format is invalid.
template <class F>
GZ_DEVICE void decode_all(const RangeFloat& format, bool valid, F code_at, int64_t n, float* x, int32_t* failed) {
  bool bad = !valid;
  for (int64_t i = grid_thread(); i < n; i += grid_threads()) {
    const uint32_t code = code_at(i);
    const bool exists = valid && code <= format.positive + format.negative;
    bad |= !exists;
    x[i] = exists ? range_decode(format, code) : undecodable();
  }
  if (bad) report(failed);
}

__global__ void __launch_bounds__(kBlock)
    decode_kernel(RangeFloat format, const int32_t* codes, int64_t n, float* x, int32_t* failed) {
  decode_all(format, true, [&](int64_t i) { return uint32_t(__ldg(codes + i)); }, n, x, failed);
}

constexpr int kRangeCodes = 124;  // entries whose table fits the 4 KB of kernel arguments

__global__ void __launch_bounds__(kBlock)
    decode_packed_kernel(Batch<RangeCodes, kRangeCodes> batch, int bits, int32_t* failed) {
  const RangeCodes& of = batch.of[blockIdx.y];
  const uint8_t* packed = of.packed;
  const int64_t n = of.n, nbytes = (n * bits + 7) / 8;
  RangeFloat format{};
  const bool valid = range_of_wire(load_bytes<uint64_t>(of.wire), bits, &format);
  decode_all(format, valid, [&](int64_t i) { return read_bits(packed, nbytes, i * bits, bits); }, n, of.x, failed);
}

}  // namespace gradzip::cuda

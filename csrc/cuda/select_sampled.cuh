// A threshold that keeps about k, as on the CPU: samples of growing size, then `select`. All kernels are queued at once
// and return immediately if they are no longer needed, so the host does not wait. A round is two kernels: one draws,
// and its last block finds the threshold of the sample; one counts, and its last block decides whether the count is
// close enough.
#pragma once

#include "common/philox.h"
#include "cuda/select.cuh"

namespace gradzip::cuda {

// Zero at launch.
struct SampleState {
  int64_t count;  // number of elements that reach the threshold
  uint32_t threshold;  // of the sample; 0 if it is mostly zeros
  uint32_t ticket[2];
};

struct SampledState {
  SampleState rounds[kSampleRounds];
  // State of the exact selection, whose kernels return if it is done, and of the search in a sample.
  SelectState exact, sample[kSampleRounds];
  Selection found[kSampleRounds];
  uint32_t exact_only;  // a sample was mostly zeros
};

// A vector, and its sample of a round: of `size` elements, drawn from `counter` on.
struct SampledEntry {
  SampledSource source;
  SampledState* state;
  const Selection* exact;
  float* sample;
  int64_t size, rank;
  uint64_t counter;
};

template <int kPass>
GZ_DEVICE void select_in_sample(const float* sample, int64_t size, int64_t rank, SelectState* state,
                                Selection* selection) {
  using Digit = SelectDigit<kPass>;
  constexpr int kBins = Digit::kBins;
  __shared__ uint32_t counts[kBins];
  for (int i = int(threadIdx.x); i < kBins; i += kSelectBlock) counts[i] = 0;
  __syncthreads();
  if (state->done) return;
  const uint32_t prefix = state->prefix;
  for (int64_t i = threadIdx.x; i < size; i += kSelectBlock) {
    const uint32_t m = magnitude(sample[i]);
    if (Digit::counts(m, prefix)) atomicAdd(&counts[Digit::bin(m)], 1u);
  }
  __syncthreads();
  for (int i = int(threadIdx.x); i < kBins; i += kSelectBlock) state->histogram[kPass][i] = counts[i];
  __syncthreads();
  select_find<kBins>(rank, Digit::kShift, kPass == kSelectPasses - 1, state->histogram[kPass], state, selection);
  __syncthreads();
}

__global__ void __launch_bounds__(kSelectBlock) sample_kernel(Batch<SampledEntry> batch, int round) {
  const auto& [source, state, exact, sample, size, rank, counter] = batch.of[blockIdx.y];
  if (state->exact.done || state->exact_only) return;
  const float* x = source.x;
  const int64_t n = source.n;
  for (int64_t i = grid_thread(); i < size / 4; i += grid_threads()) {
    const Philox4 random = philox(source.key, counter + uint64_t(i));
    float value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) value[j] = __ldg(x + sampled_index(random.v[j], n));
    reinterpret_cast<float4*>(sample)[i] = make_float4(value[0], value[1], value[2], value[3]);
  }
  if (!last_block(&state->rounds[round].ticket[0])) return;
  Selection* found = &state->found[round];
  select_in_sample<0>(sample, size, rank, &state->sample[round], found);
  select_in_sample<1>(sample, size, rank, &state->sample[round], found);
  select_in_sample<2>(sample, size, rank, &state->sample[round], found);
  if (threadIdx.x != 0) return;
  state->rounds[round].threshold = magnitude(found->threshold);
  if (state->rounds[round].threshold == 0) state->exact_only = 1;
}

__global__ void __launch_bounds__(kBlock) sample_count_kernel(Batch<SampledEntry> batch, int round) {
  __shared__ int64_t partial[kLanes];
  const SampledEntry& entry = batch.of[blockIdx.y];
  const auto [x, n, k, key, selection, count] = entry.source;
  SampledState* state = entry.state;
  if (state->exact.done || state->exact_only) return;
  SampleState& mine = state->rounds[round];
  const uint32_t threshold = mine.threshold;
  int64_t reach = 0;
  for_each(x, n, [&](float value) { reach += magnitude(value) >= threshold; });
  reach = block_sum(reach, partial);
  if (threadIdx.x == 0) atomic_add(&mine.count, reach);
  if (!last_block(&mine.ticket[1]) || threadIdx.x != 0) return;
  if (!close_enough(mine.count, k)) return;
  *selection = {bits_float(threshold), 0, n};
  *count = mine.count;
  state->exact.done = 1;
}

// Copies the exact selection to `selection` if no sample was close enough.
__global__ void sample_finish_kernel(Batch<SampledEntry> batch) {
  if (threadIdx.x != 0) return;
  const SampledEntry& entry = batch.of[blockIdx.y];
  const auto [x, n, k, key, selection, count] = entry.source;
  const SampledState* state = entry.state;
  const Selection* exact = entry.exact;
  for (int round = 0; round < kSampleRounds; ++round)
    if (state->rounds[round].ticket[1] && close_enough(state->rounds[round].count, k)) return;
  if (magnitude(exact->threshold) != 0) {
    *selection = *exact;
    *count = k;
  } else {  // fewer than k are nonzero: keep those
    *selection = {bits_float(1u), 0, n};
    *count = k - exact->ties;
  }
}

}  // namespace gradzip::cuda

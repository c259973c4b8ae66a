// The exact k-th largest magnitude: a radix select on the 31 bits of a magnitude, 11, 10 and 10 bits per pass. Each
// pass counts, by their next bits, the values that share the bits found so far; the last block to arrive finds the bin
// of the k-th largest. Zeros are not counted: in a gradient of mostly zeros whole warps would add to one counter. If
// the k-th largest is not among the nonzero values, it is 0, and one pass suffices. The second pass keeps the values
// that it counts, a few percent of a gradient: the third reads those instead of all.
#pragma once

#include "common/selection.h"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

constexpr int kSelectPasses = 3;
constexpr int kSelectBins = 2048;
constexpr int kSelectBlock = 512;
// Neighbouring lanes use different copies of the histogram, since gradients fall into few bins.
constexpr int kSelectCopies = 4;

// Zero at the first pass.
struct SelectState {
  uint64_t histogram[kSelectPasses][kSelectBins];
  uint64_t above;  // values larger than any with `prefix`
  uint32_t prefix;
  uint32_t done;
  uint32_t overflow;  // a block found more candidates than it has room for: the last pass reads all values
  uint32_t ticket[kSelectPasses];
};

// The magnitudes that the second pass counted, `room` for each block, and how many those are.
struct SelectCandidates {
  uint32_t *magnitudes, *counts;
  int64_t room;
};

// A vector of n elements, of which the k largest are selected.
struct SelectEntry {
  const float* x;
  int64_t n, k;
  SelectState* state;
  Selection* selection;
  SelectCandidates candidates;
};

// The bits of a magnitude by which pass kPass counts it.
template <int kPass>
struct SelectDigit {
  static constexpr int kBins = kPass == 0 ? 2048 : 1024, kShift = kPass == 0 ? 20 : kPass == 1 ? 10 : 0;
  static constexpr uint32_t kKnown = kPass == 0 ? 0u : ~0u << (kPass == 1 ? 20 : 10);

  // The bin of a magnitude that counts.
  static GZ_DEVICE int bin(uint32_t m) { return int((m >> kShift) % kBins); }
  static GZ_DEVICE bool counts(uint32_t m, uint32_t prefix) { return m != 0 && (m & kKnown) == prefix; }
};

// The bin, counted from the top, in which the k-th largest lies, by all kThreads threads of a block.
template <int kBins, int kThreads = kSelectBlock>
GZ_DEVICE void select_find(int64_t k, int shift, bool last_pass, uint64_t* histogram, SelectState* state,
                           Selection* selection) {
  __shared__ uint64_t partial[kLanes];
  constexpr int kPer = kBins / kThreads;
  const uint64_t rank = uint64_t(k) - state->above;  // among the values counted in this pass, from 1
  const int top = kBins - 1 - int(threadIdx.x) * kPer;
  uint64_t mine = 0, total;
  for (int j = 0; j < kPer; ++j) mine += histogram[top - j];
  uint64_t above = block_scan(mine, partial, &total);  // has barriers: all threads have read state->above
  if (above < rank && rank <= above + mine) {
    int bin = top;
    for (; above + histogram[bin] < rank; --bin) above += histogram[bin];
    state->prefix |= uint32_t(bin) << shift;
    state->above += above;
    if (last_pass) *selection = {bits_float(state->prefix), 0, int64_t(rank - above)};
  }
  if (rank > total && threadIdx.x == 0) {  // in the first pass only: the k-th largest is 0
    state->done = 1;
    *selection = {0.0f, 0, int64_t(rank - total)};
  }
}

template <int kPass>
__global__ void __launch_bounds__(kSelectBlock) select_kernel(Batch<SelectEntry> batch) {
  const SelectEntry& entry = batch.of[blockIdx.y];
  SelectState* state = entry.state;
  const SelectCandidates candidates = entry.candidates;
  using Digit = SelectDigit<kPass>;
  constexpr int kBins = Digit::kBins;
  __shared__ uint32_t counts[kBins * kSelectCopies];
  __shared__ uint32_t found;
  if (state->done) return;
  if (threadIdx.x == 0) found = 0;
  for (int i = int(threadIdx.x); i < kBins * kSelectCopies; i += kSelectBlock) counts[i] = 0;
  __syncthreads();
  const uint32_t prefix = state->prefix, copy = threadIdx.x % kSelectCopies;
  uint32_t* mine = candidates.magnitudes + blockIdx.x * candidates.room;
  const auto count = [&](uint32_t m) {
    if (!Digit::counts(m, prefix)) return;
    atomicAdd(&counts[Digit::bin(m) * kSelectCopies + copy], 1u);
    if constexpr (kPass == 1) {
      const uint32_t at = atomicAdd(&found, 1u);
      if (at < candidates.room) mine[at] = m;
    }
  };
  if (kPass == 2 && !state->overflow) {
    const uint32_t of_block = candidates.counts[blockIdx.x];
    for (uint32_t i = threadIdx.x; i < of_block; i += kSelectBlock) count(mine[i]);
  } else {
    for_each(entry.x, entry.n, [&](float value) { count(magnitude(value)); });
  }
  __syncthreads();
  if (kPass == 1 && threadIdx.x == 0) {
    candidates.counts[blockIdx.x] = found;
    if (found > candidates.room) report(&state->overflow);
  }
  uint64_t* histogram = state->histogram[kPass];
  for (int bin = int(threadIdx.x); bin < kBins; bin += kSelectBlock) {
    uint32_t count = 0;
    for (int c = 0; c < kSelectCopies; ++c) count += counts[bin * kSelectCopies + c];
    if (count) atomic_add(&histogram[bin], count);
  }
  if (!last_block(&state->ticket[kPass])) return;
  select_find<kBins>(entry.k, Digit::kShift, kPass == kSelectPasses - 1, histogram, state, entry.selection);
}

}  // namespace gradzip::cuda

// Indices as a bitmap or as Rice-coded gaps (common/index_code.h), with the bytes of the CPU. A thread block takes
// a block of gaps, or a tile of the bitmap, at a time; each determines the form by itself.
#pragma once

#include "common/index_code.h"
#include "common/weighted_sum.h"
#include "cuda/block/bit_stream.cuh"
#include "cuda/block/bitmap_tiles.cuh"
#include "cuda/block/bytes.cuh"
#include "cuda/block/quads.cuh"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

constexpr int kIndexPer = int(kIndexBlock) / kBlock;  // indices of a block per thread
static_assert(kIndexBlock == 2 * kPackTile && kTile == 32 * kBlock, "how the kernels below share out their work");

GZ_HD int64_t index_blocks(int64_t count) { return (count + kIndexBlock - 1) / kIndexBlock; }

// --- writing

// The smallest index that block b may hold.
GZ_DEVICE int64_t base_of(const int32_t* indices, int64_t b) {
  return b ? __ldg(indices + b * kIndexBlock - 1) + int64_t(1) : 0;
}

// Zero at launch.
struct IndexPlanState {
  uint32_t unsound, ticket;  // unsound: the indices do not ascend within [0, numel)
};

// The size of each block with its best k, and where it begins behind the table.
struct IndexPlan {
  IndexSource source;
  IndexPlanState* state;
  uint32_t* nbytes;
  uint8_t* ks;
  int64_t* offsets;
};

__global__ void __launch_bounds__(kBlock) index_plan_kernel(Batch<IndexPlan> batch) {
  __shared__ int64_t partial[kLanes];
  const auto [source, state, nbytes, ks, offsets] = batch.of[blockIdx.y];
  const int32_t* indices = source.indices;
  const int64_t count = source.count, numel = source.numel;
  for (int64_t b = blockIdx.x; b * kIndexBlock < count; b += gridDim.x) {
    const int64_t begin = b * kIndexBlock, base = base_of(indices, b);
    const int n = int(count - begin < kIndexBlock ? count - begin : kIndexBlock);
    const int64_t last = __ldg(indices + begin + n - 1), span = last + 1 - base - n;
    const int low = index_low_bits(n, span > 0 ? span : 0);
    int64_t above[3] = {0, 0, 0};
    bool bad = span < 0 || last >= numel;
    for (int i = int(threadIdx.x); i < n; i += kBlock) {
      const int64_t gap = __ldg(indices + begin + i) - (i ? __ldg(indices + begin + i - 1) + int64_t(1) : base);
      bad |= gap < 0;
#pragma unroll
      for (int j = 0; j < 3; ++j) above[j] += gap >> (low + j);
    }
    int64_t best = 0;
    int k = 0;
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      const int64_t size = index_block_nbytes(n, low + j, block_sum(above[j], partial));
      if (j == 0 || size < best) best = size, k = low + j;
    }
    if (bad) report(&state->unsound);
    if (threadIdx.x != 0) continue;
    nbytes[b] = uint32_t(best);
    ks[b] = uint8_t(k);
  }
  if (last_block(&state->ticket)) scan_counts<kBlock>(nbytes, index_blocks(count), offsets);
}

// store_bytes, by the first threads of the block.
GZ_DEVICE void store_bytes_together(uint8_t* at, uint64_t word, int nbytes) {
  if (int(threadIdx.x) < nbytes) at[threadIdx.x] = uint8_t(word >> (8 * threadIdx.x));
}

// Unary codes of a block take at most 1256 bytes: the best k takes no more than the k next to log2(mean gap * ln 2),
// for which the high parts of gaps sum to at most 26 / 9 per index.
constexpr int kUnaryWords = 320;

GZ_DEVICE void write_index_block(const int32_t* indices, int n, int64_t base, int k, int nbytes, uint8_t* out,
                                 uint32_t* codes, uint32_t* unary, uint32_t* partial) {
  for (int i = int(threadIdx.x); i < kUnaryWords; i += kBlock) unary[i] = 0;
  uint32_t gap[kIndexPer], sum = 0, total;
  const int first = int(threadIdx.x) * kIndexPer;
  int64_t next = first ? first <= n ? __ldg(indices + first - 1) + int64_t(1) : 0 : base;
#pragma unroll
  for (int j = 0; j < kIndexPer; ++j) {
    if (first + j >= n) break;
    const int32_t index = __ldg(indices + first + j);
    gap[j] = uint32_t(index - next);
    next = index + int64_t(1);
    sum += (gap[j] >> k) + 1;
  }
  uint32_t position = block_scan(sum, partial, &total);  // has barriers: `unary` is clear
#pragma unroll
  for (int j = 0; j < kIndexPer; ++j) {
    if (first + j >= n) break;
    codes[first + j] = gap[j] & ((1u << k) - 1);
    position += gap[j] >> k;
    if (position < 32 * kUnaryWords) atomicOr(&unary[position / 32], 1u << position % 32);
    ++position;
  }
  __syncthreads();
  store_bytes_together(out, uint64_t(k), 1);
  const int low_bytes = (n * k + 7) / 8;
  for (int done = 0; k > 0 && done < n; done += kPackTile)
    pack_tile(codes + done, n - done < kPackTile ? n - done : kPackTile, CodeWidth(k), out + 1 + done / 8 * k);
  for (int i = int(threadIdx.x); i < nbytes - 1 - low_bytes; i += kBlock)
    out[1 + low_bytes + i] = uint8_t(unary[i / 4] >> (i % 4 * 8));
  __syncthreads();
}

// The number of ascending indices below `value`.
GZ_DEVICE int64_t lower_bound(const int32_t* indices, int64_t count, int64_t value) {
  int64_t first = 0;
  while (count > 0) {
    const int64_t half = count / 2;
    const bool below = __ldg(indices + first + half) < value;
    first += below ? half + 1 : 0;
    count = below ? count - half - 1 : half;
  }
  return first;
}

// The same, by a search of the block that compares kBlock of them at a time.
GZ_DEVICE int64_t count_below(const int32_t* indices, int64_t count, int64_t value, uint32_t* partial) {
  int64_t first = 0, n = count;  // the answer is in [first, first + n]
  while (n > 0) {
    const int64_t step = (n + kBlock - 1) / kBlock, at = first + int64_t(threadIdx.x) * step;
    const int64_t below = block_sum(uint32_t(at < first + n && __ldg(indices + at) < value), partial);
    if (below == 0) break;
    const int64_t end = first + (below * step < n ? below * step : n);
    first += (below - 1) * step + 1;
    n = end - first;
  }
  return first;
}

GZ_DEVICE void write_bitmap_tile(const int32_t* indices, int64_t count, int64_t numel, int64_t tile, uint8_t* out,
                                 uint32_t* words, uint32_t* partial) {
  const int64_t begin = tile * kTile;
  const int64_t last = count_below(indices, count, begin + kTile, partial);
  words[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t i = count_below(indices, count, begin, partial) + threadIdx.x; i < last; i += kBlock) {
    const uint32_t bit = uint32_t(__ldg(indices + i) - begin);
    atomicOr(&words[bit / 32], 1u << bit % 32);
  }
  __syncthreads();
  store_word(out, tile_word(tile), numel, words[threadIdx.x]);
  __syncthreads();
}

// Writes the size of the stream, -1 for invalid indices; and the stream, unless it exceeds the capacity.
__global__ void __launch_bounds__(kBlock) index_write_kernel(Batch<IndexPlan> batch) {
  __shared__ uint32_t codes[kIndexBlock], unary[kUnaryWords], partial[kLanes];
  const IndexPlan& plan = shared_entry(batch);
  const auto [indices, count, numel, begin_of_stream, capacity, size] = plan.source;
  const int64_t* offsets = plan.offsets;
  const int64_t blocks = index_blocks(count), header = sizeof(IndexHeader),
                table = blocks * int64_t(sizeof(IndexBlock));
  const int64_t plain = header + (numel + 7) / 8, coded = header + table + offsets[blocks];
  const int64_t total = plan.state->unsound ? -1 : coded < plain ? coded : plain;
  if (grid_thread() == 0) *size = total;
  if (total < 0 || total > capacity) return;
  uint8_t* out = begin_of_stream;
  if (blockIdx.x == 0) {
    store_bytes_together(out, coded < plain, 4);
    store_bytes_together(out + 4, uint64_t(count), 4);
    store_bytes_together(out + 8, uint64_t(total), 4);
  }
  out += header;
  if (coded >= plain) {
    for (int64_t tile = blockIdx.x; tile * kTile < numel; tile += gridDim.x)
      write_bitmap_tile(indices, count, numel, tile, out, codes, partial);
    return;
  }
  for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
    const int64_t begin = b * kIndexBlock;
    const int n = int(count - begin < kIndexBlock ? count - begin : kIndexBlock);
    store_bytes_together(out + b * int64_t(sizeof(IndexBlock)), uint64_t(__ldg(indices + begin + n - 1)) + 1, 4);
    store_bytes_together(out + b * int64_t(sizeof(IndexBlock)) + 4, uint64_t(offsets[b + 1]), 4);
    write_index_block(indices + begin, n, base_of(indices, b), plan.ks[b], int(offsets[b + 1] - offsets[b]),
                      out + table + offsets[b], codes, unary, partial);
  }
}

// --- reading

enum class IndexForm { bitmap, coded, corrupt };

struct OpenedIndices {
  IndexForm form;
  const uint8_t* body;
  int64_t nbytes;  // of the body
};

GZ_DEVICE OpenedIndices open_index_stream(const uint8_t* stream, int64_t nbytes, int64_t numel, int64_t count) {
  const int64_t header = sizeof(IndexHeader);
  const OpenedIndices corrupt{IndexForm::corrupt, nullptr, 0};
  if (nbytes < header || count > numel) return corrupt;
  const uint32_t coded = load_bytes<uint32_t>(stream), claimed = load_bytes<uint32_t>(stream + 8);
  if (coded > 1 || load_bytes<uint32_t>(stream + 4) != count || !index_stream_fits(claimed, nbytes)) return corrupt;
  const OpenedIndices opened{coded ? IndexForm::coded : IndexForm::bitmap, stream + header, int64_t(claimed) - header};
  if (coded) {
    const int64_t table = index_blocks(count) * int64_t(sizeof(IndexBlock));
    return opened.nbytes < table || (count == 0 && opened.nbytes != 0) ? corrupt : opened;
  }
  if (opened.nbytes != (numel + 7) / 8) return corrupt;
  return numel % 8 && opened.body[opened.nbytes - 1] >> (numel % 8) ? corrupt : opened;
}

struct IndexRead {
  IndexStream stream;
  uint32_t* counts;  // of the tiles of a bitmap
  int64_t* offsets;
  int32_t* corrupt;  // becomes 1 if the stream is; may be null
};
constexpr int kIndexReads = 62;  // streams whose table fits the 4 KB of kernel arguments

// The number of bits set in each tile of a bitmap; 0 if the stream has none.
__global__ void __launch_bounds__(kBlock) index_count_kernel(Batch<IndexRead, kIndexReads> batch) {
  __shared__ uint32_t partial[kLanes];
  const auto [stream, counts, offsets, corrupt] = batch.of[blockIdx.y];
  const OpenedIndices opened = open_index_stream(stream.bytes, stream.nbytes, stream.numel, stream.count);
  const int64_t bits = opened.form == IndexForm::bitmap ? stream.numel : 0;
  for (int64_t tile = blockIdx.x; tile * kTile < stream.numel; tile += gridDim.x) {
    const uint32_t set = block_sum(uint32_t(__popc(load_word(opened.body, tile_word(tile), bits))), partial);
    if (threadIdx.x == 0) counts[tile] = set;
  }
}

// One block for each stream.
__global__ void __launch_bounds__(kScanBlock) index_scan_kernel(Batch<IndexRead, kIndexReads> batch) {
  const auto [stream, counts, offsets, corrupt] = batch.of[blockIdx.y];
  scan_counts(counts, (stream.numel + kTile - 1) / kTile, offsets);
}

// Reads the n indices of a block, in [base, end), to shared memory. Returns false unless there are exactly n, the last
// being end - 1.
GZ_DEVICE bool read_index_block(const uint8_t* block, int64_t nbytes, int64_t base, int64_t end, int n,
                                uint32_t* indices, uint32_t* partial, int64_t* wide_partial, int64_t* last) {
  const int k = block[0];
  if (k > 31) return false;
  const int64_t low_bytes = (n * k + 7) / 8, unary_bits = 8 * (nbytes - 1 - low_bytes);
  if (unary_bits < 0) return false;
  // More bits would pass `end`; with this many, nothing below overflows.
  if (unary_bits > n + ((end - base) >> k) + 8) return false;
  const uint8_t *low = block + 1, *unary = low + low_bytes;
  uint32_t found = 0;
  for (int64_t word = threadIdx.x; word - threadIdx.x < (unary_bits + 31) / 32; word += kBlock) {
    uint32_t bits = load_word(unary, word, unary_bits), more;
    uint32_t rank = found + block_scan(uint32_t(__popc(bits)), partial, &more);
    found += more;
    if (found > uint32_t(n)) return false;
    for (; bits; bits &= bits - 1) indices[rank++] = uint32_t(32 * word + __ffs(int(bits)) - 1);
  }
  if (found != uint32_t(n)) return false;
  // The i-th one bit is at i plus the sum of the high parts of gaps 0..i.
  const int first = int(threadIdx.x) * kIndexPer;
  int64_t gaps[kIndexPer], sum = 0, total;
#pragma unroll
  for (int j = 0; j < kIndexPer; ++j) {
    const int i = first + j;
    gaps[j] = i < n ? 1 + int64_t(k ? read_bits(low, low_bytes, int64_t(i) * k, k) : 0) : 0;
    sum += gaps[j];
  }
  int64_t next = base + block_scan(sum, wide_partial, &total);  // has barriers: all indices are stored
#pragma unroll
  for (int j = 0; j < kIndexPer; ++j) {
    const int i = first + j;
    next += gaps[j];
    if (i >= n) break;
    const int64_t index = next - 1 + ((int64_t(indices[i]) - i) << k);
    indices[i] = uint32_t(index);
    if (i == n - 1) *last = index;
  }
  __syncthreads();
  return *last + 1 == end;  // indices ascend for any bits, so checking the last suffices
}

__global__ void __launch_bounds__(kBlock) index_code_decode_kernel(Batch<IndexRead, kIndexReads> batch) {
  __shared__ uint32_t indices[kIndexBlock], partial[kLanes];
  __shared__ int64_t wide_partial[kLanes], last;
  const IndexRead& read = shared_entry(batch);
  const int64_t numel = read.stream.numel, count = read.stream.count;
  int32_t* out = read.stream.indices;
  const OpenedIndices opened = open_index_stream(read.stream.bytes, read.stream.nbytes, numel, count);
  if (opened.form == IndexForm::bitmap && read.offsets[(numel + kTile - 1) / kTile] == count) {
    for_each_bit<true>(
        opened.body, numel, read.offsets, [&](int64_t i, bool, int64_t) { return int32_t(i); },
        [&](int64_t, int64_t rank, int32_t index) { out[rank] = index; });
    return;
  }
  if (opened.form != IndexForm::coded) {
    report(read.corrupt);
    return;
  }
  const int64_t blocks = index_blocks(count), table = blocks * int64_t(sizeof(IndexBlock));
  for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
    const uint8_t* entry = opened.body + b * int64_t(sizeof(IndexBlock));
    const int64_t end = load_bytes<uint32_t>(entry), end_byte = load_bytes<uint32_t>(entry + 4);
    const int64_t base = b ? load_bytes<uint32_t>(entry - 8) : 0, begin_byte = b ? load_bytes<uint32_t>(entry - 4) : 0;
    const int64_t first = b * kIndexBlock;
    const int n = int(count - first < kIndexBlock ? count - first : kIndexBlock);
    // Each block checks its own bounds, so nothing outside is read, whatever other entries claim.
    const bool sound = base < end && end <= numel && begin_byte < end_byte && end_byte <= opened.nbytes - table &&
                       (b < blocks - 1 || end_byte == opened.nbytes - table) &&
                       read_index_block(opened.body + table + begin_byte, end_byte - begin_byte, base, end, n, indices,
                                        partial, wide_partial, &last);
    if (sound) {
      for (int i = int(threadIdx.x); i < n; i += kBlock) out[first + i] = int32_t(indices[i]);
    } else {
      report(read.corrupt);
    }
    __syncthreads();
  }
}

// --- weighted sums, of terms whose indices are decoded

struct IndexAdd {
  int32_t* indices;
  const float* values;
  int64_t count;
  double weight;
};

constexpr int kSumTile = 8192;  // elements that a block adds up at a time, in shared memory
constexpr int kTermsAtOnce = kBlock / 2;  // whose indices within a tile are found together

// A block takes a tile of a sum, and adds the terms to it one after the other. The sums of corrupt terms become NaN, since
// nobody may be reading the flag.
__global__ void __launch_bounds__(kBlock)
    index_add_kernel(const WeightedSumEntry* entries, int64_t count, const IndexAdd* adds, const int32_t* corrupt,
                     int32_t* failed) {
  alignas(16) __shared__ float sum[kSumTile];
  __shared__ int64_t bounds[kBlock];
  const int64_t which = entry_of_block(entries, count);
  const WeightedSumEntry& entry = entries[which];
  const int64_t begin = (int64_t(blockIdx.x) - entry.first_block) * kSumTile, left = entry.sum.n - begin;
  const int size = int(left < kSumTile ? left : kSumTile), terms = int(entry.sum.terms);
  float* out = static_cast<float*>(entry.sum.out) + begin;
  const bool bad = corrupt[which] != 0, add = entry.sum.add;
  if (bad && begin == 0 && threadIdx.x == 0) report(failed);
  for (int i = 4 * int(threadIdx.x); i < size; i += 4 * kBlock) {
    float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (bad)
      value[0] = value[1] = value[2] = value[3] = undecodable();
    else if (add)
      load4_changing(out, i, size, value);
    store4(sum, i, kSumTile, value);
  }
  for (int first = 0; first < terms && !bad; first += kTermsAtOnce) {
    const int some = terms - first < kTermsAtOnce ? terms - first : kTermsAtOnce, mine = int(threadIdx.x) / 2;
    const IndexAdd* of = adds + entry.first_term + first;
    if (mine < some)  // the first index of the tile, and the first one after it
      bounds[threadIdx.x] = lower_bound(of[mine].indices, of[mine].count, begin + (threadIdx.x % 2 ? size : 0));
    __syncthreads();
    for (int t = 0; t < some; ++t) {
      const float weight = float(of[t].weight);
      for (int64_t i = bounds[2 * t] + threadIdx.x; i < bounds[2 * t + 1]; i += kBlock)
        sum[__ldg(of[t].indices + i) - begin] += weight * __ldg(of[t].values + i);
      __syncthreads();
    }
  }
  __syncthreads();
  for (int i = 4 * int(threadIdx.x); i < size; i += 4 * kBlock) store4(out, i, size, sum + i);
}

}  // namespace gradzip::cuda

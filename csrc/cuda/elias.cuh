// Elias-coded levels. A block writes a chunk into its own slot, tokens in parallel: the position of each is a prefix
// sum of lengths. Then the chunks are moved together. Reading a chunk is serial; a warp reads several chunks of several
// terms side by side, a piece at a time, and processes the levels of a piece together.
#pragma once

#include "common/elias.h"
#include "cuda/block/bit_stream.cuh"
#include "cuda/block/bitmap_tiles.cuh"
#include "cuda/block/quantize_tile.cuh"

namespace gradzip::cuda {

static_assert(kEliasChunk == kMostTile, "levels of a chunk are drawn as a tile");
constexpr int kChunkWords = int(kEliasChunk) / kLanes;  // of 32 elements
constexpr int kPerThread = int(kEliasChunk) / kBlock;

// Most 32-bit words of a chunk: the longest token is a level of `bits` bits without a zero before it.
GZ_HD int slot_words(int bits) { return int(kEliasChunk) * (2 * bits - 1) / 32 + 4; }
constexpr int kEliasBits = 17;  // of the largest level, its sign included
constexpr int kMostSlotWords = int(kEliasChunk) * (2 * kEliasBits - 1) / 32 + 4;

GZ_DEVICE EliasCode gamma(uint32_t v) { return gamma_code(v, 31 - __clz(int(v))); }

GZ_DEVICE void put_bits(uint32_t* words, uint32_t at, EliasCode code) {
  const int shift = int(at % 32);
  uint32_t* word = words + at / 32;
  const uint64_t rest = code.bits >> (32 - shift);
  atomicOr(word, uint32_t(code.bits << shift));
  if (uint32_t(rest)) atomicOr(word + 1, uint32_t(rest));
  if (rest >> 32) atomicOr(word + 2, uint32_t(rest >> 32));
}

// The block codes `count` levels; level[j] of this thread is number j * kBlock + threadIdx.x (0 from count on). `words`
// is shared memory for the longest chunk. Returns the size of the chunk in bytes; all threads may then read the words.
GZ_DEVICE uint32_t write_chunk(const int32_t* level, int count, uint32_t* words) {
  __shared__ uint32_t marks[kChunkWords];  // masks of the nonzero levels
  __shared__ uint32_t upto[kChunkWords];  // past the last nonzero level before the word
  __shared__ uint32_t lengths[kChunkWords];  // in bits; then the position of a word's first token
  __shared__ uint32_t ends[2];  // past the last nonzero level, past its bits
  constexpr int kWordsPerLane = kChunkWords / kLanes;
  const unsigned below = (1u << lane()) - 1;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const unsigned marked = __ballot_sync(kAllLanes, level[j] != 0);
    if (lane() == 0) marks[j * warps() + warp()] = marked;
  }
  __syncthreads();
  if (warp() == 0) {
    uint32_t last = 0;
    for (int w = kWordsPerLane * lane(); w < kWordsPerLane * (lane() + 1); ++w)
      if (marks[w]) last = uint32_t(32 * (w + 1) - __clz(int(marks[w])));
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) {
      const uint32_t before = __shfl_up_sync(kAllLanes, last, d);
      last = lane() >= d && before > last ? before : last;
    }
    const uint32_t previous = __shfl_up_sync(kAllLanes, last, 1);
    uint32_t running = lane() > 0 ? previous : 0u;
    for (int w = kWordsPerLane * lane(); w < kWordsPerLane * (lane() + 1); ++w) {
      upto[w] = running;
      if (marks[w]) running = uint32_t(32 * (w + 1) - __clz(int(marks[w])));
    }
    if (lane() == kLanes - 1) ends[0] = running;
  }
  __syncthreads();
  const auto token = [&](int j) {
    const int w = j * warps() + warp(), i = 32 * w + lane();
    const unsigned before = marks[w] & below;
    const uint32_t next = before ? uint32_t(32 * (w + 1) - __clz(int(before))) : upto[w];
    const bool negative = level[j] < 0;
    return level_token(gamma(uint32_t(i) - next + 1), negative, gamma(uint32_t(negative ? -level[j] : level[j])));
  };
  uint32_t begin[kPerThread];  // position of the token within its word
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const uint32_t length = level[j] ? uint32_t(token(j).length) : 0u, end = warp_scan(length);
    begin[j] = end - length;
    if (lane() == kLanes - 1) lengths[j * warps() + warp()] = end;
  }
  __syncthreads();
  if (warp() == 0) {
    uint32_t sum = 0;
    for (int w = kWordsPerLane * lane(); w < kWordsPerLane * (lane() + 1); ++w) sum += lengths[w];
    uint32_t at = warp_scan(sum) - sum;
    for (int w = kWordsPerLane * lane(); w < kWordsPerLane * (lane() + 1); ++w) {
      const uint32_t length = lengths[w];
      lengths[w] = at;
      at += length;
    }
    if (lane() == kLanes - 1) ends[1] = at;
  }
  __syncthreads();
  const uint32_t zeros = uint32_t(count) - ends[0];  // at the end of the chunk
  EliasCode last{0, 0};
  if (zeros > 0) last = gamma(zeros + 1);
  const uint32_t bits = ends[1] + uint32_t(last.length);
  for (uint32_t w = threadIdx.x; 32 * w < bits; w += kBlock) words[w] = 0;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kPerThread; ++j)
    if (level[j]) put_bits(words, lengths[j * warps() + warp()] + begin[j], token(j));
  if (threadIdx.x == 0 && zeros > 0) put_bits(words, ends[1], last);
  __syncthreads();
  return (bits + 7) / 8;
}

// The chunks that encoders pass to the kernel that moves them together.
struct EliasSlots {
  uint32_t* words;  // of slot_words each
  uint32_t* sizes;  // bytes
  int words_each;
  int unused = 0;  // in place of padding, so that all bytes of a launch's parameters are defined
};

GZ_DEVICE void store_chunk(const EliasSlots& slots, int64_t chunk, const uint32_t* words, uint32_t nbytes) {
  uint32_t* to = slots.words + chunk * slots.words_each;
  for (uint32_t w = threadIdx.x; 4 * w < nbytes; w += kBlock) to[w] = words[w];
  if (threadIdx.x == 0) slots.sizes[chunk] = nbytes;
  __syncthreads();
}

// *beyond, 0 at launch, becomes 1 if a level has no code.
__global__ void __launch_bounds__(kBlock)
    elias_encode_kernel(const int32_t* codes, int64_t n, EliasSlots slots, uint32_t* beyond) {
  __shared__ uint32_t words[kMostSlotWords];
  bool bad = false;
  for (int64_t chunk = blockIdx.x; chunk * kEliasChunk < n; chunk += gridDim.x) {
    const int64_t first = chunk * kEliasChunk, left = n - first;
    const int count = int(left < kEliasChunk ? left : kEliasChunk);
    int32_t level[kPerThread];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = j * kBlock + int(threadIdx.x);
      level[j] = i < count ? __ldg(codes + first + i) : 0;
    }
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const bool none = level[j] > kEliasTop || level[j] < -kEliasTop;
      bad |= none;
      level[j] = none ? 0 : level[j];
    }
    store_chunk(slots, chunk, words, write_chunk(level, count, words));
  }
  if (bad) report(beyond);
}

// With kNorms, a chunk is whole buckets, and their norms are computed with it.
template <bool kNorms>
__global__ void __launch_bounds__(kBlock, 3) elias_quantize_kernel(Quantizer<float> q, EliasSlots slots) {
  alignas(16) __shared__ uint32_t words[kMostSlotWords];
  float* tile = reinterpret_cast<float*>(words);
  int32_t* levels = reinterpret_cast<int32_t*>(words);
  for (int64_t chunk = blockIdx.x; chunk * kEliasChunk < q.n; chunk += gridDim.x) {
    const int64_t first = chunk * kEliasChunk;
    const int count = int(q.n - first < kEliasChunk ? q.n - first : kEliasChunk);
    quantize_tile<kNorms>(q, first, count, tile, [&](int i, const float* value, const int32_t* level) {
#pragma unroll
      for (int k = 0; k < 4; ++k) levels[i + k] = float_bits(value[k]) >> 31 ? -level[k] : level[k];
    });
    __syncthreads();
    int32_t level[kPerThread];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = j * kBlock + int(threadIdx.x);
      level[j] = i < count ? levels[i] : 0;
    }
    store_chunk(slots, chunk, words, write_chunk(level, count, words));  // has barriers: all threads have their levels
  }
}

// One block per chunk: writes its size, and moves its bytes behind those of the chunks before it. offsets[chunks] is
// the total.
__global__ void __launch_bounds__(kBlock)
    move_chunks_kernel(EliasSlots slots, const int64_t* offsets, int64_t chunks, const uint32_t* beyond, uint8_t* out,
                       int64_t capacity, int64_t* nbytes) {
  const int64_t total = 2 * chunks + offsets[chunks];
  if (grid_thread() == 0) *nbytes = *beyond ? -1 : total > capacity ? -2 : total;
  if (total > capacity) return;
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const uint32_t size = slots.sizes[chunk];
    if (threadIdx.x < 2) out[2 * chunk + threadIdx.x] = uint8_t(size >> (8 * threadIdx.x));
    // Bytes are packed as 32-bit codes.
    pack_bytes(slots.words + chunk * slots.words_each, int((size + 3) / 4), CodeWidth(32), int(size),
               out + 2 * chunks + offsets[chunk]);
  }
}

struct EliasTerms {
  EliasTerm of[kLanes];
};

// The chunk sizes that a stream claims.
struct ClaimedSizes {
  EliasTerm term;
  GZ_DEVICE uint32_t operator[](int64_t c) const {
    return 2 * c + 2 <= term.nbytes ? uint32_t(term.bytes[2 * c]) | uint32_t(term.bytes[2 * c + 1]) << 8 : 0u;
  }
};

// For each term, the position of each chunk behind the table of sizes, and the end of the last one.
__global__ void __launch_bounds__(kScanBlock)
    elias_offsets_kernel(EliasTerms terms, int count, int64_t chunks, int64_t* offsets) {
  for (int t = int(blockIdx.x); t < count; t += int(gridDim.x))
    scan_counts(ClaimedSizes{terms.of[t]}, chunks, offsets + t * (chunks + 1));
}

// A chunk being read by a thread.
struct ChunkReader {
  const uint8_t *at, *end;  // of its bytes that are not in the window yet
  uint64_t window;  // bits to be read; zeros past the end
  int filled;  // bits in the window
  int next, count;  // the next element, and the number of elements
  uint32_t magnitude;  // of the level at `next`, which has been read but not taken; 0 if there is none
  bool negative, valid;

  // The next 32 bits, at least. Memory is read by aligned words.
  GZ_DEVICE uint32_t peek() {
    while (filled < 32) {
      const int over = int(reinterpret_cast<uintptr_t>(at) % 4);
      uint32_t word = 0;
      if (over == 0 && end - at >= 4)
        word = __ldg(reinterpret_cast<const uint32_t*>(at));
      else
        for (int b = 0; b < 4 - over && b < end - at; ++b) word |= uint32_t(at[b]) << (8 * b);
      window |= uint64_t(word) << filled;
      filled += 8 * (4 - over);
      at += 4 - over;
    }
    return uint32_t(window);
  }
  GZ_DEVICE void skip(int bits) {
    window >>= bits;
    filled -= bits;
  }
  // Reads up to the next nonzero level or the end. Every token covers at least one element and is checked before use,
  // so reading terminates within the chunk for any bytes.
  GZ_DEVICE void read_token(uint32_t top) {
    uint32_t word = peek();
    const int k = __ffs(int(word)) - 1;
    if (k < 0 || k > 12) return refuse();  // more zeros than a chunk has elements
    next += int(1u << k | (word >> (k + 1) & ((1u << k) - 1))) - 1;
    skip(2 * k + 1);
    if (next >= count) return;
    word = peek();
    negative = word & 1;
    word >>= 1;
    const int m = __ffs(int(word)) - 1;
    if (m < 0 || m > 15) return refuse();
    magnitude = 1u << m | (word >> (m + 1) & ((1u << m) - 1));
    if (magnitude > top) return refuse();
    skip(2 * m + 2);
  }
  GZ_DEVICE void refuse() {
    valid = false;
    magnitude = 0;
    next = count;
  }
  // Whether its levels were its elements, and its bits all of its bytes.
  GZ_DEVICE bool whole() const {
    const int64_t unread = 8 * (end - at) + filled;
    return valid && next == count && unread >= 0 && unread < 8;
  }
};

constexpr int kReadBlock = 4 * kLanes;  // threads

// The chunks that a warp reads at once: a lane has one of one term.
GZ_HD int chunks_together(int terms) { return terms <= 4 ? 8 : kLanes / terms; }

// take(first, size, rows, apart) for pieces of each chunk, by whole warps: rows[t * apart] has the levels of term t.
// Then spoil(first, size) for chunks that are invalid in a term.
template <class Level, class Take, class Spoil>
GZ_DEVICE void read_chunks(const EliasTerms& terms, int count, int64_t n, uint32_t top, const int64_t* offsets,
                           Take take, Spoil spoil) {
  constexpr int kPiece = 256 / int(sizeof(Level));
  constexpr int kRow = kPiece + 4 / int(sizeof(Level));  // so that lanes write to different banks
  __shared__ Level levels[kReadBlock / kLanes][kLanes][kRow];
  Level(*rows)[kRow] = levels[warp()];
  const int64_t chunks = (n + kEliasChunk - 1) / kEliasChunk, teams = grid_threads() / kLanes;
  const int together = chunks_together(count), t = lane() / together;
  for (int64_t base = grid_thread() / kLanes * together; base < chunks; base += teams * together) {
    const int64_t chunk = base + lane() % together, first = chunk * kEliasChunk, left = n - base * kEliasChunk;
    const bool reads = t < count && chunk < chunks;
    ChunkReader reader{nullptr, nullptr, 0, 0, 0, 0, 0, false, true};
    if (reads) {
      const EliasTerm& term = terms.of[t];
      const int64_t* offset = offsets + t * (chunks + 1);
      reader.count = int(n - first < kEliasChunk ? n - first : kEliasChunk);
      reader.at = term.bytes + 2 * chunks + offset[chunk];
      reader.end = term.bytes + 2 * chunks + offset[chunk + 1];
      if (2 * chunks + offset[chunks] != term.nbytes) reader.refuse();
    }
    for (int begin = 0; begin < kEliasChunk && begin < left; begin += kPiece) {
      const int end = begin + kPiece;
      for (int row = 0; row < count * together; ++row)
        for (int i = lane(); i < kPiece; i += kLanes) rows[row][i] = 0;
      __syncwarp();
      if (reads) {
        for (;;) {
          if (reader.magnitude == 0 && reader.next < end && reader.next < reader.count) reader.read_token(top);
          if (reader.magnitude == 0 || reader.next >= end) break;
          rows[lane()][reader.next++ - begin] = Level(reader.negative ? -int(reader.magnitude) : int(reader.magnitude));
          reader.magnitude = 0;
        }
      }
      __syncwarp();
      for (int c = 0; c < together; ++c) {
        const int64_t from = (base + c) * kEliasChunk + begin;
        if (from < n) take(from, int(n - from < kPiece ? n - from : kPiece), rows + c, together);
      }
      __syncwarp();
    }
    for (unsigned spoilt = __ballot_sync(kAllLanes, reads && !reader.whole()); spoilt; spoilt &= spoilt - 1) {
      const int64_t from = (base + (__ffs(int(spoilt)) - 1) % together) * kEliasChunk;
      spoil(from, int(n - from < kEliasChunk ? n - from : kEliasChunk));
    }
  }
}

__global__ void __launch_bounds__(kReadBlock)
    elias_decode_kernel(EliasTerms term, int64_t n, int32_t top, const int64_t* offsets, int32_t* codes,
                        int32_t* failed) {
  read_chunks<int32_t>(
      term, 1, n, uint32_t(top), offsets,
      [&](int64_t first, int size, const auto* rows, int) {
        for (int i = lane(); i < size; i += kLanes) codes[first + i] = rows[0][i];
      },
      [&](int64_t, int) { report(failed); });
}

// bits <= 16, so that a level is an int16_t.
__global__ void __launch_bounds__(kReadBlock)
    elias_decode_sum_kernel(EliasTerms terms, int count, int64_t n, int bits, int64_t bucket, float weight, bool add,
                            const int64_t* offsets, float* out, int32_t* failed) {
  const int32_t s = top_level(bits);
  bool bad = false;
  read_chunks<int16_t>(
      terms, count, n, uint32_t(s), offsets,
      [&](int64_t first, int size, const auto* rows, int apart) {
        const TileBuckets buckets(first, bucket);
        for (int i = lane(); i < size; i += kLanes) {
          const int64_t b = buckets.first + buckets.index(i);
          float sum = add ? out[first + i] : 0.0f;
          for (int t = 0; t < count; ++t) {
            const float norm = __ldg(terms.of[t].norms + b);
            const bool valid = valid_norm(norm);
            bad |= !valid;
            sum += valid ? weight * level_value(rows[t * apart][i], s, norm) : undecodable();
          }
          out[first + i] = sum;
        }
      },
      [&](int64_t first, int size) {
        bad = true;
        for (int i = lane(); i < size; i += kLanes) out[first + i] = undecodable();
      });
  if (bad) report(failed);
}

}  // namespace gradzip::cuda

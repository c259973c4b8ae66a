// Ternary gradients, five trits to a byte. A thread packs four neighbouring bytes, from four neighbouring elements in
// each of the five planes of a block.
#pragma once

#include "common/philox.h"
#include "common/ternary.h"
#include "cuda/block/quads.cuh"
#include "cuda/block/table.cuh"

namespace gradzip::cuda {

constexpr int kTritThreads = kTritWidth / 4;  // per block of trits
constexpr int64_t kTritTile = kBlock / kTritThreads * kTritBlock;  // elements of a block of threads

// This thread's four bytes of a whole block begin at byte `at` of the stream, their elements of plane k at
// element + k * kTritWidth.
struct TritQuad {
  int64_t at, element;
  GZ_DEVICE explicit TritQuad(int64_t task)
      : at(4 * task), element(task / kTritThreads * kTritBlock + task % kTritThreads * 4) {}
};

// f(byte, first element, elements between digits, digits) for the bytes of the last block of n elements, if it is not
// whole and in this tile; by the first threads.
template <class F>
GZ_DEVICE void for_last_bytes(int64_t tile, int64_t n, F f) {
  const int64_t begin = n / kTritBlock * kTritBlock;
  const int count = int(n - begin), width = (count + kDigits - 1) / kDigits, j = int(threadIdx.x);
  if (begin / kTritTile == tile && j < width) f(begin / kDigits + j, begin + j, width, (count - j + width - 1) / width);
}

struct TernaryEntry {
  TernarySource source;
  int64_t first_block;
};

__global__ void __launch_bounds__(kBlock)
    ternary_packed_kernel(const TernaryEntry* entries, int64_t count, const int64_t* replays) {
  const TernaryEntry entry = entries[entry_of_block(entries, count)];
  const auto [x, dtype, n, scale, clip, own_key, packed] = entry.source;
  const uint64_t key = replay_key(own_key, replays);
  const int64_t tile = blockIdx.x - entry.first_block, task = tile * kBlock + threadIdx.x;
  const LevelScale level = level_scale(*scale, 1);
  const float most = clip ? *clip : bits_float(kInfBits);
  if (task < n / kTritBlock * kTritThreads) {
    const TritQuad quad(task);
    float value[kDigits][4];
    typed_in(x, dtype, [&, n = n](auto* from) {
#pragma unroll
      for (int k = 0; k < kDigits; ++k) load4(from, quad.element + k * kTritWidth, n, value[k]);
    });
    uint32_t bytes = 0;  // without carry between bytes
#pragma unroll
    for (int k = kDigits - 1; k >= 0; --k) {
      const Philox4 draw = philox(key, uint64_t(quad.element + k * kTritWidth) / 4);
      uint32_t trits = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) trits |= draw_trit(value[k][j], level, most, draw.v[j]) << (8 * j);
      bytes = 3 * bytes + trits;
    }
    if (reinterpret_cast<uintptr_t>(packed) % 4 == 0) {
      *reinterpret_cast<uint32_t*>(packed + quad.at) = bytes;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) packed[quad.at + j] = uint8_t(bytes >> (8 * j));
    }
  }
  for_last_bytes(tile, n, [&, x = x, packed = packed](int64_t at, int64_t element, int width, int digits) {
    uint32_t byte = 0;
    for (int k = digits - 1; k >= 0; --k) {
      const int64_t i = element + k * width;
      const Philox4 draw = philox(key, uint64_t(i) / 4);
      const uint32_t low = i & 1 ? draw.v[1] : draw.v[0], high = i & 1 ? draw.v[3] : draw.v[2];
      float value = 0.0f;
      typed_in(x, entry.source.dtype, [&](auto* from) { value = to_float(from[i]); });
      byte = 3 * byte + draw_trit(value, level, most, i & 2 ? high : low);
    }
    packed[at] = uint8_t(byte);
  });
}

// Takes the lowest digit of *byte and returns its value; the others move down.
GZ_DEVICE float take_trit(uint32_t* byte, float value) {
  const uint32_t left = third(*byte);
  const int32_t trit = int32_t(*byte - 3 * left);
  *byte = left;
  return value * float((trit & 1) - (trit >> 1));
}

// A term, and the value of its trits.
struct TritValue {
  const uint8_t* packed;
  float value;
  bool valid;

  GZ_DEVICE explicit TritValue(const TernaryTerm& term) : packed(term.packed) {
    const float factor = term.scale ? *term.scale : 1.0f;
    value = float(term.weight * double(factor));
    valid = valid_norm(factor);
  }
};

__global__ void __launch_bounds__(kBlock) ternary_decode_add_kernel(const WeightedSumEntry* entries, int64_t count,
                                                                    const TernaryTerm* terms, int32_t* failed) {
  const WeightedSumEntry entry = entries[entry_of_block(entries, count)];
  const auto [out, n, own_terms, add, dtype] = entry.sum;
  const int64_t tile = blockIdx.x - entry.first_block, task = tile * kBlock + threadIdx.x;
  const TernaryTerm *first = terms + entry.first_term, *end = first + own_terms;
  bool bad = false;
  if (task < n / kTritBlock * kTritThreads) {
    const TritQuad quad(task);
    float sum[kDigits][4] = {};
    if (add) {
#pragma unroll
      for (int k = 0; k < kDigits; ++k)
        load4_changing(static_cast<float*>(out), quad.element + k * kTritWidth, n, sum[k]);
    }
    for (const TernaryTerm* t = first; t < end; ++t) {
      const TritValue term(*t);
      uint32_t byte[4];
      float values[4];
      if (reinterpret_cast<uintptr_t>(term.packed) % 4 == 0) {
        const uint32_t bytes = __ldg(reinterpret_cast<const uint32_t*>(term.packed + quad.at));
#pragma unroll
        for (int j = 0; j < 4; ++j) byte[j] = bytes >> (8 * j) & 0xff;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) byte[j] = __ldg(term.packed + quad.at + j);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool trits = term.valid && byte[j] <= kTopByte;
        bad |= !trits;
        values[j] = trits ? term.value : undecodable();
      }
#pragma unroll
      for (int k = 0; k < kDigits; ++k)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[k][j] += take_trit(byte + j, values[j]);
    }
    typed_out(out, dtype, [&, n = n](auto* to) {
#pragma unroll
      for (int k = 0; k < kDigits; ++k) store4(to, quad.element + k * kTritWidth, n, sum[k]);
    });
  }
  for_last_bytes(tile, n, [&, out = out, add = add, dtype = dtype](int64_t at, int64_t element, int width, int digits) {
    float sum[kDigits];
#pragma unroll
    for (int k = 0; k < kDigits; ++k) sum[k] = add && k < digits ? static_cast<float*>(out)[element + k * width] : 0.0f;
    for (const TernaryTerm* t = first; t < end; ++t) {
      const TritValue term(*t);
      uint32_t byte = __ldg(term.packed + at);
      const bool trits = term.valid && byte <= kTopByte;
      bad |= !trits;
#pragma unroll
      for (int k = 0; k < kDigits; ++k) sum[k] += take_trit(&byte, trits ? term.value : undecodable());
    }
    typed_out(out, dtype, [&](auto* to) {
#pragma unroll
      for (int k = 0; k < kDigits; ++k)
        if (k < digits) store1(to + element + k * width, sum[k]);
    });
  });
  if (bad) report(failed);
}

}  // namespace gradzip::cuda

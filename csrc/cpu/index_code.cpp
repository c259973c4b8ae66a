// Indices as a bitmap or as Rice-coded gaps (common/index_code.h). At a density p the gaps are geometric, for which
// Rice codes are within a few hundredths of a bit of the entropy; k is chosen per block, so clusters cost less.
#include "common/index_code.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/bit_stream.h"
#include "cpu/bitmap.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

constexpr int64_t kClearChunk = 1 << 16;

int64_t bitmap_bytes(int64_t numel) { return ceil_div(numel, 8); }

// --- writing

struct BlockPlan {
  int64_t nbytes;  // -1 if the indices are not ascending
  int k;
};

GZ_INLINE BlockPlan plan_block_body(const int32_t* indices, int64_t count, int64_t base) {
  const int64_t span = indices[count - 1] + int64_t(1) - base - count;
  if (span < 0) return {-1, 0};
  const int low = index_low_bits(count, span);
  int64_t above[3] = {0, 0, 0};
  int64_t next = base;
  bool ascending = true;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t gap = indices[i] - next;
    ascending &= gap >= 0;
    next = indices[i] + int64_t(1);
    above[0] += gap >> low;
    above[1] += gap >> (low + 1);
    above[2] += gap >> (low + 2);
  }
  if (!ascending) return {-1, 0};
  BlockPlan best{-1, 0};
  for (int j = 0; j < 3; ++j) {
    const int64_t nbytes = index_block_nbytes(count, low + j, above[j]);
    if (best.nbytes < 0 || nbytes < best.nbytes) best = {nbytes, low + j};
  }
  return best;
}
GZ_SIMD_DISPATCH(BlockPlan, plan_block, (const int32_t* indices, int64_t count, int64_t base), (indices, count, base))

GZ_INLINE void write_block_body(const int32_t* indices, int64_t count, int64_t base, BlockPlan plan, uint8_t* out) {
  const int k = plan.k;
  const int64_t low_bytes = ceil_div(count * k, 8);
  const uint32_t mask = (1u << k) - 1;
  *out = uint8_t(k);
  uint8_t *low = out + 1, *unary = low + low_bytes;
  std::memset(unary, 0, size_t(plan.nbytes - 1 - low_bytes));
  uint32_t codes[kBitBlock];
  int64_t next = base, position = 0;
  for (int64_t first = 0; first < count; first += kBitBlock) {
    const int n = int(count - first < kBitBlock ? count - first : kBitBlock);
    for (int i = 0; i < n; ++i) {
      const uint32_t gap = uint32_t(indices[first + i] - next);
      next = indices[first + i] + int64_t(1);
      codes[i] = gap & mask;
      position += gap >> k;
      unary[position / 8] |= uint8_t(1u << (position % 8));
      ++position;
    }
    if (k > 0) pack_block(codes, n, k, low + first / 8 * k);
  }
}
GZ_SIMD_DISPATCH(void, write_block, (const int32_t* indices, int64_t count, int64_t base, BlockPlan plan, uint8_t* out),
                 (indices, count, base, plan, out))

struct Plan {
  std::vector<BlockPlan> blocks;
  int64_t nbytes;  // of the smaller form; -1 if the indices are not ascending within [0, numel)
  bool coded;
};

int64_t base_of(const int32_t* indices, int64_t block) {
  return block ? indices[block * kIndexBlock - 1] + int64_t(1) : 0;
}

Plan make_plan(const int32_t* indices, int64_t count, int64_t numel, int threads) {
  Plan plan{std::vector<BlockPlan>(ceil_div(count, kIndexBlock)), -1, true};
  if (count > 0 && (indices[0] < 0 || indices[count - 1] >= numel)) return plan;
  parallel_chunks(count, kIndexBlock, threads, [&](int64_t b, int64_t begin, int64_t end) {
    plan.blocks[b] = plan_block(indices + begin, end - begin, base_of(indices, b));
  });
  int64_t coded = int64_t(sizeof(IndexHeader) + plan.blocks.size() * sizeof(IndexBlock));
  for (const BlockPlan& block : plan.blocks) {
    if (block.nbytes < 0) return plan;
    coded += block.nbytes;
  }
  const int64_t plain = int64_t(sizeof(IndexHeader)) + bitmap_bytes(numel);
  plan.coded = coded < plain;
  plan.nbytes = plan.coded ? coded : plain;
  return plan;
}

void write_bitmap(const int32_t* indices, int64_t count, int64_t numel, uint8_t* bitmap, int threads) {
  parallel_chunks(numel, kChunk, threads, [&](int64_t, int64_t begin, int64_t end) {
    std::memset(bitmap + begin / 8, 0, size_t(bitmap_bytes(end - begin)));
    const int32_t* last = indices + count;
    for (const int32_t* i = std::lower_bound(indices, last, begin); i < last && *i < end; ++i)
      bitmap[*i / 8] |= uint8_t(1u << (*i % 8));
  });
}

// --- reading

// Reads the indices of a block, in [base, end). Returns false unless there are exactly `count`, the last being end - 1.
GZ_INLINE bool read_block_body(const uint8_t* block, int64_t nbytes, int64_t base, int64_t end, int64_t count,
                               int32_t* indices) {
  if (nbytes < 1 || block[0] > 31) return false;
  const int k = block[0];
  const int64_t low_bytes = ceil_div(count * k, 8), unary_bits = 8 * (nbytes - 1 - low_bytes);
  if (unary_bits < 0) return false;
  // More bits would pass `end`; with this many, nothing below overflows.
  if (unary_bits > count + ((end - base) >> k) + 8) return false;
  const uint8_t *low = block + 1, *unary = low + low_bytes;
  uint32_t ones[kIndexBlock];
  int64_t found = 0;
  for (int64_t first = 0; first < unary_bits; first += 64) {
    uint64_t word = load_word(unary, first, unary_bits);
    const int more = __builtin_popcountll(word);
    if (found + more > count) return false;
    for (int j = 0; j < more; ++j, word &= word - 1) ones[found + j] = uint32_t(first + __builtin_ctzll(word));
    found += more;
  }
  if (found != count) return false;
  // ones[i] - i is the sum of what gaps 0..i are above. Indices ascend for any bits, so checking the last suffices.
  int64_t below = base, last = base - 1;
  for (int64_t i = 0; i < count; ++i) {
    below += int64_t(read_bits(low, nbytes - 1, i * k, k)) + 1;
    last = below - 1 + ((int64_t(ones[i]) - i) << k);
    indices[i] = int32_t(last);
  }
  return last + 1 == end;
}
GZ_SIMD_DISPATCH(bool, read_block,
                 (const uint8_t* block, int64_t nbytes, int64_t base, int64_t end, int64_t count, int32_t* indices),
                 (block, nbytes, base, end, count, indices))

// f(first, count, indices) for each run of indices of the stream. Returns false if the stream is corrupt.
template <class F>
bool for_each_run(const uint8_t* stream, int64_t nbytes, int64_t numel, int64_t count, int threads, F&& f) {
  IndexHeader header;
  if (nbytes < int64_t(sizeof header)) return false;
  std::memcpy(&header, stream, sizeof header);
  if (header.count != count || !index_stream_fits(header.nbytes, nbytes) || count > numel) return false;
  const uint8_t* body = stream + sizeof header;
  const int64_t body_bytes = int64_t(header.nbytes) - int64_t(sizeof header);

  if (header.coded == 0) {
    if (body_bytes != bitmap_bytes(numel)) return false;
    if (numel % 8 && body[body_bytes - 1] >> (numel % 8)) return false;
    const auto offsets = bitmap_offsets(body, numel, threads);
    if (offsets.back() != count) return false;
    parallel_chunks(numel, kChunk, threads, [&](int64_t c, int64_t begin, int64_t end) {
      BitRun run;
      int64_t first = offsets[c];
      for (int64_t i = begin; i < end; i += kBitRun) {
        const int64_t n = set_bits(body, i, end, run);
        f(first, n, run.at);
        first += n;
      }
    });
    return true;
  }

  const int64_t blocks = ceil_div(count, kIndexBlock), table_bytes = blocks * int64_t(sizeof(IndexBlock));
  if (header.coded != 1 || body_bytes < table_bytes) return false;
  const auto entry = [&](int64_t b) {
    IndexBlock block{0, 0};
    if (b >= 0) std::memcpy(&block, body + b * int64_t(sizeof block), sizeof block);
    return block;
  };
  for (int64_t b = 0; b < blocks; ++b) {
    const IndexBlock before = entry(b - 1), block = entry(b);
    if (block.end <= before.end || block.end_byte <= before.end_byte) return false;
  }
  const IndexBlock last = entry(blocks - 1);
  if (last.end > numel || last.end_byte != body_bytes - table_bytes) return false;
  std::atomic<bool> sound{true};
  parallel_chunks(count, kIndexBlock, threads, [&](int64_t b, int64_t begin, int64_t end) {
    int32_t indices[kIndexBlock];
    const IndexBlock before = entry(b - 1), block = entry(b);
    if (read_block(body + table_bytes + before.end_byte, block.end_byte - before.end_byte, before.end, block.end,
                   end - begin, indices))
      f(begin, end - begin, indices);
    else
      sound = false;
  });
  return sound;
}

void encode(const IndexSource& source, int threads) {
  const int32_t* indices = source.indices;
  const int64_t count = source.count, numel = source.numel;
  const Plan plan = make_plan(indices, count, numel, threads);
  *source.nbytes = plan.nbytes;
  if (plan.nbytes < 0 || plan.nbytes > source.capacity) return;
  const IndexHeader header{plan.coded, uint32_t(count), uint32_t(plan.nbytes)};
  std::memcpy(source.out, &header, sizeof header);
  uint8_t* out = source.out + sizeof header;
  if (!plan.coded) {
    write_bitmap(indices, count, numel, out, threads);
    return;
  }
  std::vector<IndexBlock> table(plan.blocks.size());
  uint32_t end_byte = 0;
  for (size_t b = 0; b < table.size(); ++b) {
    end_byte += uint32_t(plan.blocks[b].nbytes);
    table[b] = {uint32_t(indices[std::min<int64_t>(count, int64_t(b + 1) * kIndexBlock) - 1]) + 1, end_byte};
  }
  const int64_t table_bytes = int64_t(table.size() * sizeof(IndexBlock));
  if (!table.empty()) std::memcpy(out, table.data(), size_t(table_bytes));
  parallel_chunks(count, kIndexBlock, threads, [&](int64_t b, int64_t begin, int64_t end) {
    write_block(indices + begin, end - begin, base_of(indices, b), plan.blocks[b],
                out + table_bytes + (b ? table[b - 1].end_byte : 0));
  });
}

}  // namespace

void index_code_encode(const IndexSource* table, int64_t count, int threads) {
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].count; },
      [&](int64_t i, int of_piece) { encode(table[i], of_piece); });
}

void index_code_decode(const IndexStream* table, int64_t count, int32_t* failed, int threads) {
  for (int64_t i = 0; i < count && !*failed; ++i) {
    const IndexStream& stream = table[i];
    const bool sound = for_each_run(stream.bytes, stream.nbytes, stream.numel, stream.count, threads,
                                    [&](int64_t first, int64_t n, const int32_t* run) {
                                      std::memcpy(stream.indices + first, run, size_t(n) * sizeof(int32_t));
                                    });
    if (!sound) *failed = int32_t(i) + 1;
  }
}

void index_code_decode_add(const WeightedSum* table, int64_t count, const IndexTerm* terms, int32_t* failed,
                           int threads) {
  const IndexTerm* term = terms;
  for (int64_t i = 0; i < count; ++i) {
    auto* const out = static_cast<float*>(table[i].out);
    if (!table[i].add)
      parallel_chunks(table[i].n, kClearChunk, threads,
                      [&](int64_t, int64_t begin, int64_t end) { std::fill(out + begin, out + end, 0.0f); });
    for (const IndexTerm* end = term + table[i].terms; term < end; ++term) {
      const float weight = float(term->weight);
      const bool sound = for_each_run(term->stream, term->nbytes, table[i].n, term->count, threads,
                                      [&](int64_t first, int64_t n, const int32_t* run) {
                                        const float* values = term->values + first;
                                        for (int64_t j = 0; j < n; ++j) out[run[j]] += weight * values[j];
                                      });
      if (sound) continue;
      *failed = int32_t(term - terms) + 1;
      return;
    }
  }
}

}  // namespace gradzip::cpu

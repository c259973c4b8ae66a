// Entropy-coded status bitmaps (common/bitmap_code.h). A segment is read and written by tables, many bits at a time, if
// it is dense enough for that to be faster than code by code.
#include "common/bitmap_code.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "cpu/bit_stream.h"
#include "cpu/bitmap.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace gradzip::cpu {
namespace {

constexpr int kWords = kMostSegment / 64;
constexpr int kGroup = 128;  // segments per task, read in pairs
static_assert(kMostSegment <= kBitRun && kMostSegment / 8 < 1024 && kGroup % 2 == 0);

// --- writing

// What a byte of the bitmap appends to the stream. The zeros of a code are written as soon as 2^k bits are clear, so what
// a byte appends depends on the clear bits before it only modulo 2^k, which divides 8.
constexpr int kMostByteK = 3;

struct ByteCodes {
  uint64_t of[kMostByteK][8 * 256];  // at 8 * byte + clear: the number of bits appended; these << 8

  constexpr ByteCodes() : of{} {
    for (int k = 1; k <= kMostByteK; ++k)
      for (int at = 0; at < 8 * 256; ++at) {
        uint64_t bits = 0;
        int length = 0, clear = at % (1 << k);
        for (int byte = at / 8, i = 0; i < 8; ++i) {
          if (byte >> i & 1) {
            bits |= uint64_t(1 | clear << 1) << length;
            length += 1 + k;
            clear = 0;
          } else if (++clear == 1 << k) {
            ++length;
            clear = 0;
          }
        }
        of[k - 1][at] = uint64_t(length) | bits << 8;
      }
  }
};
constexpr ByteCodes kByteCodes;

struct Bits {
  uint64_t bits;
  unsigned length;

  GZ_INLINE Bits operator+(const Bits& next) const { return {bits | next.bits << length, length + next.length}; }
};

// Writes 8 bytes at a time: up to 8 past the end.
struct BitAppender {
  uint8_t* at;
  uint64_t pending = 0;
  unsigned filled = 0;  // below 8 between calls

  GZ_INLINE void put(Bits next) {  // of 56 bits at most
    pending |= next.bits << filled;
    std::memcpy(at, &pending, 8);
    filled += next.length;
    at += filled / 8;
    pending >>= filled & ~7u;
    filled %= 8;
  }
};

// Room for the stream of a segment: at most 1.09 times its bits, at the k that bitmap_low_bits picks, and 8 bytes.
constexpr int64_t kMostStream = kMostSegment / 4;

// A segment to write: its bits, inverted if most are set.
struct Segment {
  uint64_t words[kWords];
  int many, k;  // words, the last of which may have spare bits
  bool inverted;

  GZ_INLINE void load(const uint8_t* bitmap, int bits) {
    int count = 0;
    many = (bits + 63) / 64;
    for (int w = 0; w < many; ++w) {
      words[w] = load_word(bitmap, 64 * w, bits);
      count += __builtin_popcountll(words[w]);
    }
    inverted = 2 * count > bits;
    if (inverted) {
      for (int w = 0; w < many; ++w)
        words[w] ^= bits - 64 * w < 64 ? (uint64_t(1) << (bits - 64 * w)) - 1 : ~uint64_t(0);
      count = bits - count;
    }
    k = count ? bitmap_low_bits(count, bits) : 0;
  }
  // The bytes up to the last bit set.
  GZ_INLINE int plain_nbytes() const {
    int w = many;
    while (w > 0 && !words[w - 1]) --w;
    return w > 0 ? 8 * w - __builtin_clzll(words[w - 1]) / 8 : 0;
  }
  // Byte by byte, for k up to kMostByteK; returns the end.
  GZ_INLINE uint8_t* write_bytes(uint8_t* stream) const {
    BitAppender out{stream};
    const uint64_t* codes = kByteCodes.of[k - 1];
    uint64_t clear = 0;
    for (int w = 0; w < many; ++w) {
      const uint64_t word = words[w], last = uint64_t(1) << (63 - clear);  // the one before the clear bits
      for (int j = 0; j < 8; j += 4) {
        Bits of[4];
        for (int i = 0; i < 4; ++i) {
          const int at = 8 * (j + i);
          const uint64_t before = (at ? word << (64 - at) : 0) | last >> at;
          const uint64_t byte = (at ? word >> (at - 3) : word << 3) & 8 * 255;
          const uint64_t code = codes[byte + uint64_t(__builtin_clzll(before)) % 8];
          of[i] = {code >> 8, unsigned(code & 63)};
        }
        const Bits low = of[0] + of[1], high = of[2] + of[3];
        if (__builtin_expect(low.length + high.length <= 56, 1)) {
          out.put(low + high);
        } else {
          for (const Bits& each : of) out.put(each);
        }
      }
      if (word) clear = uint64_t(__builtin_clzll(word)) % 8;
    }
    return out.at + 1;
  }
  // Code by code.
  GZ_INLINE uint8_t* write_codes(uint8_t* stream) const {
    BitAppender out{stream};
    BitRun run;
    const int64_t count = set_bits(reinterpret_cast<const uint8_t*>(words), 0, 64 * many, run);
    int next = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int gap = run.at[i] - next;
      next = run.at[i] + 1;
      int zeros = gap >> k;
      for (; zeros > 32; zeros -= 32) out.put({0, 32});
      out.put({uint64_t(1 | (gap & ((1 << k) - 1)) << 1) << zeros, unsigned(zeros + 1 + k)});
    }
    return out.at + 1;
  }

  // Writes the segment, as it is if that is not longer, to memory of `room` bytes; returns its entry.
  GZ_INLINE BitmapSegment write(uint8_t* out, int64_t room) const {
    const int plain = plain_nbytes();
    if (k > 0) {
      uint8_t spare[kMostStream];
      uint8_t* stream = room >= kMostStream ? out : spare;
      const uint8_t* end = k <= kMostByteK ? write_bytes(stream) : write_codes(stream);
      while (!end[-1]) --end;
      const int nbytes = int(end - stream);
      if (nbytes < plain) {
        if (stream != out) std::memcpy(out, stream, size_t(nbytes));
        return {nbytes, k, inverted};
      }
    }
    std::memcpy(out, words, size_t(plain));
    return {plain, 0, inverted};
  }
};

// Writes the segments of bits [0, n) one after the other; returns the bytes written.
GZ_INLINE int64_t write_group_body(const uint8_t* bitmap, int64_t n, int size, uint8_t* entries, uint8_t* out) {
  const uint8_t* end = out + (n + 7) / 8;
  uint8_t* at = out;
  Segment segment;
  for (int64_t first = 0; first < n; first += size, entries += 2) {
    segment.load(bitmap + first / 8, int(n - first < size ? n - first : size));
    const BitmapSegment written = segment.write(at, end - at);
    const uint16_t entry = pack_segment(written);
    std::memcpy(entries, &entry, 2);
    at += written.nbytes;
  }
  return at - out;
}
GZ_SIMD_DISPATCH(int64_t, write_group, (const uint8_t* bitmap, int64_t n, int size, uint8_t* entries, uint8_t* out),
                 (bitmap, n, size, entries, out))

// --- reading

// What the next kTableBits bits of a stream append to the bitmap: whole codes, and zeros of the next one.
constexpr int kTableBits = 11;
constexpr int kMostTableK = 4;
constexpr int kMostAppended = 48;
constexpr int kLookups = 57 / kTableBits;  // that a window certainly holds

struct Runs {
  uint64_t of[kMostTableK][1 << kTableBits];  // the number of bits read; of those appended << 8; these << 16

  constexpr Runs() : of{} {
    for (int k = 1; k <= kMostTableK; ++k)
      for (int word = 0; word < 1 << kTableBits; ++word) {
        uint64_t bits = 0;
        int length = 0, read = 0;
        for (;;) {
          const bool one = word >> read & 1;
          const int clear = one ? word >> (read + 1) & ((1 << k) - 1) : 1 << k, size = one ? 1 + k : 1;
          if (read + size > kTableBits || length + clear + one > kMostAppended) break;
          bits |= uint64_t(one) << (length + clear);
          length += clear + one;
          read += size;
        }
        of[k - 1][word] = uint64_t(read) | uint64_t(length) << 8 | bits << 16;
      }
  }
};
constexpr Runs kRuns;

// Room for a segment, and for what the last steps of reading may append past its end.
constexpr int kReadWords = kWords + (kLookups * kMostAppended + 63) / 64 + 1;

// A segment being read. Every step reads some bits, so reading ends for any bytes; the table is not used past the last
// bit of the segment, so what it appends stays within the words.
struct SegmentReader {
  const uint8_t* stream;
  int64_t nbytes, readable;  // readable: with the segments after this one
  int k, bits;
  uint64_t* words;  // kReadWords, all 0
  BitAppender out{reinterpret_cast<uint8_t*>(words)};
  const uint64_t* runs = kRuns.of[k > 0 && k <= kMostTableK ? k - 1 : 0];
  uint64_t bit = 0;

  GZ_INLINE bool by_table() const { return k > 0 && k <= kMostTableK; }
  GZ_INLINE int64_t left() const { return 8 * nbytes - int64_t(bit); }  // bits; below 0 if a code is cut off
  GZ_INLINE bool more() const { return left() > 0 && out.at <= reinterpret_cast<const uint8_t*>(words) + bits / 8; }
  GZ_INLINE bool room() const { return more() && left() >= kLookups * kTableBits && whole(); }
  GZ_INLINE bool whole() const { return int64_t(bit) <= 8 * (readable - 8); }  // whether 8 bytes can be read
  // The next bits, with a one above them all by which to see how many were read.
  GZ_INLINE uint64_t open_window() const {
    uint64_t word;
    std::memcpy(&word, stream + bit / 8, 8);
    return word >> (bit % 8) | uint64_t(1) << 63;
  }
  GZ_INLINE void close_window(uint64_t word) { bit += unsigned(__builtin_clzll(word)); }
  GZ_INLINE void step(uint64_t& word) {
    const uint64_t run = runs[word % (1 << kTableBits)];
    word >>= run & 63;
    out.put({run >> 16, unsigned(run >> 8 & 63)});
  }
  // The next 57 bits; those past the segment are 0.
  GZ_INLINE uint64_t next_bits() const {
    if (__builtin_expect(!whole(), 0)) return window(stream, nbytes, int64_t(bit));
    uint64_t word;
    std::memcpy(&word, stream + bit / 8, 8);
    return word >> (bit % 8) & (left() < 64 ? (uint64_t(1) << left()) - 1 : ~uint64_t(0));
  }
  GZ_INLINE void step() {
    uint64_t word = next_bits() | uint64_t(1) << 63;
    step(word);
    close_window(word);
  }
  // What read_pair has not read.
  GZ_INLINE void read_rest() {
    if (k == 0) {
      std::memcpy(words, stream, size_t(nbytes));
      return;
    }
    if (by_table())
      while (more()) step();
    read_codes();
  }
  // Code by code: sparse segments, and what an invalid one has past its end. A one past the end becomes bit `bits`.
  GZ_INLINE void read_codes() {
    constexpr int kZeros = 40;  // after fewer, the rest of the code is within the window
    int64_t at = 8 * (out.at - reinterpret_cast<const uint8_t*>(words)) + out.filled;
    while (left() > 0) {
      const uint64_t word = next_bits();
      const int zeros = word << (64 - kZeros) ? __builtin_ctzll(word) : kZeros;
      at += int64_t(zeros) << k;
      bit += unsigned(zeros);
      if (zeros == kZeros) continue;
      at += int64_t(word >> (zeros + 1) & ((uint64_t(1) << k) - 1));
      bit += unsigned(1 + k);
      const int64_t to = at < bits ? at : bits;
      words[to / 64] |= uint64_t(1) << (to % 64);
      ++at;
    }
  }
};

// Each step waits for the one before, so two segments are read side by side.
GZ_INLINE void read_pair_body(SegmentReader a, SegmentReader b) {
  if (a.by_table() && b.by_table()) {
    while (a.room() && b.room()) {
      uint64_t of_a = a.open_window(), of_b = b.open_window();
      for (int j = 0; j < kLookups; ++j) {
        a.step(of_a);
        b.step(of_b);
      }
      a.close_window(of_a);
      b.close_window(of_b);
    }
    while (a.more() && b.more()) {
      a.step();
      b.step();
    }
  }
  a.read_rest();
  b.read_rest();
}
GZ_SIMD_DISPATCH(void, read_pair, (const SegmentReader& a, const SegmentReader& b), (a, b))

// Stores a segment that was read; returns how many bits are set, -1 if one is set past its end.
GZ_INLINE int64_t store_body(uint64_t* words, int bits, bool inverted, uint8_t* bitmap) {
  uint64_t beyond = 0;
  int64_t count = 0;
  const int many = (bits + 63) / 64 + kReadWords - kWords;
  for (int w = 0; w < many; ++w) {
    const int left = bits - 64 * w;
    const uint64_t mask = left >= 64 ? ~uint64_t(0) : left > 0 ? (uint64_t(1) << left) - 1 : 0;
    beyond |= words[w] & ~mask;
    if (inverted) words[w] ^= mask;
    count += __builtin_popcountll(words[w]);
  }
  std::memcpy(bitmap, words, (uint32_t(bits) + 7) / 8);
  return beyond ? -1 : count;
}
GZ_SIMD_DISPATCH(int64_t, store, (uint64_t* words, int bits, bool inverted, uint8_t* bitmap),
                 (words, bits, inverted, bitmap))

}  // namespace

static void encode(const BitmapSource& source, int threads) {
  const uint8_t* bitmap = source.bitmap;
  const int64_t n = source.n, segment = source.segment;
  uint8_t* out = source.out;
  const int64_t segments = ceil_div(n, segment), bits = int64_t(kGroup) * segment;
  // Segments are never longer than plain ones: each group is written where plain ones would be, then moved.
  uint8_t* body = out + 2 * segments;
  std::vector<int64_t> sizes(ceil_div(n, bits));
  parallel_chunks(n, bits, threads, [&](int64_t group, int64_t begin, int64_t end) {
    sizes[group] =
        write_group(bitmap + begin / 8, end - begin, int(segment), out + 2 * group * kGroup, body + begin / 8);
  });
  int64_t total = 0;
  for (size_t group = 0; group < sizes.size(); ++group) {
    std::memmove(body + total, body + int64_t(group) * (bits / 8), size_t(sizes[group]));
    total += sizes[group];
  }
  *source.nbytes = 2 * segments + total;
}

void bitmap_code_encode(const BitmapSource* table, int64_t count, int threads) {
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].n; },
      [&](int64_t i, int of_piece) { encode(table[i], of_piece); });
}

// Returns false if the stream is corrupt.
static bool decode_stream(const BitmapStream& stream, bool exact, int threads) {
  const int64_t n = stream.n, segment = stream.segment;
  const uint8_t* bytes = stream.bytes;
  const int64_t nbytes = stream.nbytes, segments = ceil_div(n, segment);
  if (nbytes < 2 * segments) return false;
  const auto size_of = [&](int64_t s) { return int(std::min<int64_t>(segment, n - s * segment)); };
  const auto entry_of = [&](int64_t s) {
    uint16_t entry;
    std::memcpy(&entry, bytes + 2 * s, 2);
    return entry;
  };
  std::vector<int64_t> offsets(ceil_div(segments, kGroup));
  bool valid = true;
  int64_t end = 2 * segments;
  for (int64_t s = 0; s < segments; ++s) {
    if (s % kGroup == 0) offsets[s / kGroup] = end;
    valid &= valid_segment(entry_of(s), size_of(s));
    end += unpack_segment(entry_of(s)).nbytes;
  }
  std::atomic<int64_t> set{0};
  std::atomic<bool> within{valid && (exact ? end == nbytes : end <= nbytes)};
  if (within)
    parallel_chunks(segments, kGroup, threads, [&](int64_t group, int64_t first, int64_t last) {
      uint64_t words[2][kReadWords];
      const uint8_t* at = bytes + offsets[group];
      int64_t found = 0;
      for (int64_t s = first; s < last; s += 2) {
        const auto reader_of = [&](int64_t t) {
          std::memset(words[t - s], 0, sizeof words[0]);
          const BitmapSegment claimed = t < last ? unpack_segment(entry_of(t)) : BitmapSegment{0, 0, false};
          const SegmentReader reader{
              at, claimed.nbytes, bytes + nbytes - at, claimed.k, t < last ? size_of(t) : 0, words[t - s]};
          at += claimed.nbytes;
          return reader;
        };
        const SegmentReader a = reader_of(s), b = reader_of(s + 1);
        read_pair(a, b);
        for (int64_t t = s; t < s + 2 && t < last; ++t) {
          const int64_t more =
              store(words[t - s], size_of(t), unpack_segment(entry_of(t)).inverted, stream.bitmap + t * (segment / 8));
          if (more < 0) within = false;
          found += more;
        }
      }
      set += found;
    });
  return within && set == stream.set;
}

void bitmap_code_decode(const BitmapStream* table, int64_t count, bool exact, int32_t* failed, int threads) {
  for (int64_t i = 0; i < count && !*failed; ++i)
    if (!decode_stream(table[i], exact, threads)) *failed = int32_t(1 + i);
}

}  // namespace gradzip::cpu

// The header of every payload, little-endian. A payload is this header, then the method's sections, zero-padded so that
// its length is a multiple of 16: payloads of several ranks are consecutive in a gathered buffer, and each must start
// aligned and state its size.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/macros.h"
#include "common/range_float.h"

namespace gradzip {

struct PayloadHeader {
  uint8_t magic[2];  // "gz"
  uint8_t version;  // kPayloadVersion
  uint8_t method;  // which codec wrote it
  uint32_t digest;  // of the codec's configuration: detects ranks configured differently at the first step
  uint64_t numel;  // elements of the gradient
  uint64_t nbytes;  // of the whole payload, header and padding included
  uint32_t checksum;  // of the whole payload, with this field 0
  uint32_t flags;  // the lower kSlackBit bits; the others are the slack
  uint8_t fields[16];  // the method's own parameters
};
static_assert(sizeof(PayloadHeader) == 48, "the wire format");

constexpr uint8_t kPayloadVersion = 2;
constexpr uint64_t kPayloadAlign = 16;
constexpr uint32_t kNonFinite = 1u;  // the gradient held an inf or a NaN: every rank's average becomes NaN
// 2^127. A larger magnitude counts as infinite: an average, a float32 sum of terms weight * x, may overflow. A device
// has to know that before it decodes one.
constexpr uint32_t kMostMagnitudeBits = 0x7f000000u;

// The slack, in units of kPayloadAlign, is the number of zeros at the end of a payload that follow the sections and
// their padding. It is 0 unless a payload was written before the host knew how long its last section is.
constexpr int kSlackBit = 8;

// One term of the checksum. Terms are added modulo 2^64, so blocks can be summed in any order by any number of
// threads; each term depends on the position, so swapped words are detected.
GZ_HD uint64_t checksum_term(uint64_t word, uint64_t position) {
  uint64_t x = word + (position + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  return x ^ (x >> 29);
}
constexpr int kNbytesAt = 16;  // offset of `nbytes` in the header
constexpr int kChecksumAt = 24;  // offset of the checksum in the header
constexpr int kChecksumWord = kChecksumAt / 8;  // whose lower half, the checksum itself, counts as 0
GZ_HD uint32_t checksum_fold(uint64_t sum) { return uint32_t(sum ^ (sum >> 32)); }

// A payload to be sealed: its header, and what is known of it once its sections are written, on CUDA to the device only.
// Pointers to that may be null.
struct PayloadSeal {
  uint8_t* payload;
  PayloadHeader header;  // without the results and the checksum
  const float* magnitudes;  // kNonFinite is set unless all are at most 2^127
  int64_t magnitude_count;
  const RangeFloat* number;  // its wire form becomes the last 8 bytes of the fields
  const float* scale;  // becomes the first 4 bytes of the fields
  const int64_t* stream_nbytes;  // size of the last section. What follows it becomes zeros. kNonFinite if it is invalid
  int64_t stream_begin;  // offset of that section in the payload
  int64_t padding_at;  // the byte of the fields that becomes the size of that section's padding, or -1
};
static_assert(sizeof(PayloadSeal) == 112, "gradzip/ops/payload.py writes it");

// Writes the header with the seal. Returns the end of the last section.
GZ_HD int64_t add_results(const PayloadSeal& seal, PayloadHeader* header) {
  *header = seal.header;
  for (int64_t i = 0; i < seal.magnitude_count; ++i)
    if ((float_bits(seal.magnitudes[i]) & 0x7fffffffu) > kMostMagnitudeBits) header->flags |= kNonFinite;
  if (seal.scale) memcpy(header->fields, seal.scale, sizeof(float));
  if (seal.number) {
    const uint64_t wire = range_wire(*seal.number);
    memcpy(header->fields + sizeof header->fields - sizeof wire, &wire, sizeof wire);
  }
  const int64_t nbytes = int64_t(header->nbytes), align = int64_t(kPayloadAlign);
  if (!seal.stream_nbytes) return nbytes;
  int64_t stream = *seal.stream_nbytes;
  if (stream < 0 || stream > nbytes - seal.stream_begin) header->flags |= kNonFinite, stream = 0;
  const int64_t end = seal.stream_begin + stream, padding = (align - end % align) % align;
  header->flags |= uint32_t((nbytes - end - padding) / align) << kSlackBit;
  if (seal.padding_at >= 0) header->fields[seal.padding_at] = uint8_t(padding);
  return end;
}

// A buffer that holds payloads, one after the other.
struct PayloadBuffer {
  const uint8_t* bytes;
  int64_t nbytes;
};
static_assert(sizeof(PayloadBuffer) == 16, "gradzip/ops/payload.py writes it");

// What the host needs to know of a payload, so that one copy from the device suffices.
struct PayloadInspection {
  PayloadHeader header;
  uint64_t begin;  // offset of the payload in its buffer
  uint64_t sum;  // of the checksum's terms, for checksum_fold
};
static_assert(sizeof(PayloadInspection) == 64, "gradzip/ops/payload.py reads it");

// Whether `left` bytes may begin with a payload that claims so many.
GZ_HD bool payload_fits(uint64_t claimed, uint64_t left) {
  return claimed >= sizeof(PayloadHeader) && claimed % kPayloadAlign == 0 && claimed <= left;
}

// A payload to verify, and what its header is to say.
struct PayloadExpectation {
  const uint8_t* payload;
  int64_t nbytes;  // of the memory that holds it
  uint64_t numel;
  uint64_t
      codec;  // the digest (4 bytes), the method (1), 0 (1), and which bytes of the fields are known: bit i for byte i
  uint64_t first_fields, last_fields;  // little-endian
};
static_assert(sizeof(PayloadExpectation) == 48, "gradzip/ops/payload.py writes it");

// What verification says of an inspected payload: 0, or NaN unless it is as expected and of a finite gradient. The rules
// are those of open_payloads in gradzip/ops/payload.py.
GZ_HD float payload_verdict(const PayloadInspection& row, const PayloadExpectation& expected) {
  const PayloadHeader& header = row.header;
  const uint64_t nbytes = uint64_t(expected.nbytes), slack = kPayloadAlign * (header.flags >> kSlackBit);
  bool valid = header.magic[0] == 'g' && header.magic[1] == 'z' && header.version == kPayloadVersion &&
               header.method == uint8_t(expected.codec >> 32) && header.digest == uint32_t(expected.codec) &&
               header.numel == expected.numel && header.nbytes == nbytes && payload_fits(header.nbytes, nbytes) &&
               header.checksum == checksum_fold(row.sum) && sizeof(PayloadHeader) + slack <= nbytes &&
               !(header.flags & kNonFinite);
  for (int i = 0; i < int(sizeof header.fields); ++i) {
    const uint64_t word = i < 8 ? expected.first_fields : expected.last_fields;
    valid &= !(expected.codec >> (48 + i) & 1) || header.fields[i] == uint8_t(word >> (8 * (i % 8)));
  }
  return valid ? 0.0f : bits_float(0x7fc00000u);
}

}  // namespace gradzip

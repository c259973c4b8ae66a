// The header of every payload, little-endian. A payload is this header, then the method's sections, zero-padded so that
// its length is a multiple of 16: payloads of several ranks are consecutive in a gathered buffer, and each must start
// aligned and state its size.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace gradzip {

struct PayloadHeader {
  uint8_t magic[2];  // "gz"
  uint8_t version;  // kPayloadVersion
  uint8_t method;  // which codec wrote it
  uint32_t digest;  // of the codec's configuration: detects ranks configured differently at the first step
  uint64_t numel;  // elements of the gradient
  uint64_t nbytes;  // of the whole payload, header and padding included
  uint32_t checksum;  // of the whole payload, with this field 0
  uint32_t flags;
  uint8_t fields[16];  // the method's own parameters
};
static_assert(sizeof(PayloadHeader) == 48, "the wire format");

constexpr uint8_t kPayloadVersion = 2;
constexpr uint64_t kPayloadAlign = 16;
constexpr uint32_t kNonFinite = 1u;  // the gradient held an inf or a NaN: every rank's average becomes NaN

// One term of the checksum. Terms are added modulo 2^64, so blocks can be summed in any order by any number of
// threads; each term depends on the position, so swapped words are detected.
GZ_HD uint64_t checksum_term(uint64_t word, uint64_t position) {
  uint64_t x = word + (position + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  return x ^ (x >> 29);
}
constexpr int kChecksumWord = 3;  // the word of the header whose lower half, the checksum itself, counts as 0
GZ_HD uint32_t checksum_fold(uint64_t sum) { return uint32_t(sum ^ (sum >> 32)); }

// What the host needs to know of a payload, so that one copy from the device suffices.
struct PayloadInspection {
  PayloadHeader header;
  uint64_t begin;  // offset of the payload in the gathered buffer
  uint64_t sum;  // of the checksum's terms, for checksum_fold
};
static_assert(sizeof(PayloadInspection) == 64, "gradzip/ops/payload.py reads it");

}  // namespace gradzip

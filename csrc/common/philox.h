// Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3; SC'11): a counter-based generator.
// Draw number i of a key is a pure function of (key, i): the same on every device, thread count and order.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace gradzip {

struct Philox4 {
  uint32_t v[4];
};

GZ_HD Philox4 philox(uint64_t key, uint64_t counter) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  uint32_t c0 = uint32_t(counter), c1 = uint32_t(counter >> 32), c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b);
    c3 = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The key of a draw. All replays of a CUDA graph launch a kernel with the same key: *replays, which differs between them,
// makes another key of it, two draws by the first. If replays is null, the key is as it is.
GZ_HD uint64_t replay_key(uint64_t key, const int64_t* replays) {
  if (!replays) return key;
  const Philox4 draw = philox(key, uint64_t(*replays));
  return draw.v[0] | uint64_t(draw.v[1]) << 32;
}

// Uniform in (0, 1], 24 bits.
GZ_HD float unit_interval(uint32_t word) { return float((word >> 8) + 1u) * 0x1p-24f; }

}  // namespace gradzip

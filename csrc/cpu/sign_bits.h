// Signs as bits, and back: bit i % 8 of byte i / 8 is set if x[i] counts as negative.
#pragma once

#include <cstdint>

namespace gradzip::cpu {

// Writes bits [begin, end) of the signs of a tensor, whose elements from `begin` on are at x; begin is a multiple of 8, and
// so is end unless it is the end of the tensor (spare bits are 0). 0, -0 and NaN have no sign: coin i of the key decides,
// bit i % 32 of its draw i / 32.
void write_signs(const float* x, int64_t begin, int64_t end, uint64_t key, uint8_t* packed);

// out[i] += positive, or negative if the bit is set, for begin <= i < end. Reads no byte past bit end - 1.
void add_by_sign(const uint8_t* packed, int64_t begin, int64_t end, float positive, float negative, float* out);

}  // namespace gradzip::cpu

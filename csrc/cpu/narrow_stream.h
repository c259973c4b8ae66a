// Bit streams of codes of up to 8 bits, held as bytes: eight codes are one 64-bit word unpacked and `bits` whole bytes
// packed.
#pragma once

#include <cstdint>

namespace gradzip::cpu {

// Packs n codes (bytes below 1 << bits) into ceil(n * bits / 8) bytes; nothing past them is written.
void pack_narrow(const uint8_t* codes, int n, int bits, uint8_t* stream);

// The inverse. Reads ceil(n * bits / 8) bytes; `codes` is writable up to the next multiple of 8.
void unpack_narrow(const uint8_t* stream, int n, int bits, uint8_t* codes);

}  // namespace gradzip::cpu

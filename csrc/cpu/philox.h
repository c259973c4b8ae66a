// Philox draws in bulk.
#pragma once

#include <cstdint>

#include "common/philox.h"

namespace gradzip::cpu {

// words[j] = draw number first + j of the key, for j < count: word i % 4 of philox(key, i / 4) is draw number i.
// first is a multiple of 4, count at most what the caller's block holds.
void philox_words(uint64_t key, uint64_t first, int count, uint32_t* words);

}  // namespace gradzip::cpu

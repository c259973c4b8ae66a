// Elias-coded levels; the format is in ops.h.
#pragma once

#include <cstdint>
#include <functional>

#include "common/elias.h"

namespace gradzip::cpu {

// Codes n levels that levels_of(begin, end, levels) supplies chunk by chunk, on any thread; it returns false where one
// is beyond the largest of `bits` bits, 2^(bits - 1) - 1 <= kEliasTop. Returns the bytes written, -1 when levels_of has
// refused, or -2 when there are more than capacity.
int64_t elias_write(int64_t n, int bits, uint8_t* out, int64_t capacity, int threads,
                    const std::function<bool(int64_t, int64_t, int32_t*)>& levels_of);

// The inverse: take(begin, end, levels) for each chunk, on any thread. False when the bytes are not what elias_write
// makes of n levels of at most `top`; some chunks may have been taken by then.
bool elias_read(const uint8_t* stream, int64_t nbytes, int64_t n, int32_t top, int threads,
                const std::function<void(int64_t, int64_t, const int32_t*)>& take);

}  // namespace gradzip::cpu

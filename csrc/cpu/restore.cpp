#include "common/restore.h"

#include <cstring>

#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace gradzip::cpu {

void restore(const float* number, const Restoration* table, int64_t count, int threads) {
  if (!restores(*number)) return;
  constexpr int64_t kPiece = 4 * kChunk;  // bytes; a multiple of those of a pattern
  const auto pieces = [&](int64_t i) { return ceil_div(table[i].nbytes, kPiece); };
  parallel_table(count, threads, pieces, [&](int64_t i, int64_t piece) {
    const auto [target, source, nbytes, pattern] = table[i];
    const int64_t begin = piece * kPiece, many = std::min(nbytes - begin, kPiece);
    uint8_t* to = static_cast<uint8_t*>(target) + begin;
    if (source) {
      std::memcpy(to, static_cast<const uint8_t*>(source) + begin, size_t(many));
      return;
    }
    int64_t done = 0;
    for (; done + 8 <= many; done += 8) std::memcpy(to + done, &pattern, 8);
    for (; done < many; ++done) to[done] = pattern_byte(pattern, done);
  });
}

}  // namespace gradzip::cpu

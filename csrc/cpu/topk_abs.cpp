#include <memory>

#include "cpu/bitmap.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace gradzip::cpu {

void topk_abs(const TopkSource* table, int64_t count, int threads) {
  parallel_pieces(
      count, threads, [&](int64_t i) { return table[i].n; },
      [&](int64_t i, int of_piece) {
        const auto [x, n, k, given, indices, values] = table[i];
        Selection selection;
        if (given)
          selection = *given;
        else
          select(x, n, k, &selection, of_piece);
        const std::unique_ptr<uint8_t[]> marks(new uint8_t[size_t(n + 7) / 8]);
        int64_t set;
        bitmap(x, n, &selection, marks.get(), &set, of_piece);
        walk_bitmap(marks.get(), n, bitmap_offsets(marks.get(), n, of_piece), x, indices, values, of_piece);
      });
}

}  // namespace gradzip::cpu

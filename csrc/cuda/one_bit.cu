#include "cuda/one_bit.cuh"

#include "cuda/block/launch.h"
#include "cuda/block/table.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

int64_t one_bit_packed(void* workspace, const OneBitSource* table, int64_t count, const int64_t* replays, float* most,
                       cudaStream_t stream) {
  std::vector<SignsSource> signs;
  std::vector<SidesEntry> entries;
  std::vector<RowsEntry> long_rows;
  int64_t blocks = 0, parts = 0, row_blocks = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto [x, rows, columns, key, packed, means] = table[i];
    signs.push_back({x, int64_t(Dtype::float32), rows * columns, key, packed});
    const int64_t segments = columns > 0 ? ceil_div(columns, kSumSegment) : 1, tasks = rows * segments;
    const int64_t rounds = std::clamp<int64_t>(kMostTile / (columns + 1), 1, 64);  // tasks of a team
    entries.push_back({table[i], segments, rounds, parts, blocks});
    blocks += ceil_div(tasks, rounds * (kBlock / kTeam));
    if (segments == 1) continue;
    long_rows.push_back({rows, columns, segments, parts, means, row_blocks});
    parts += tasks;
    row_blocks += ceil_div(rows, kBlock / kLanes);
  }
  Arena arena(workspace);
  const auto* on_device = upload(arena, entries, stream);
  const auto* rows_on_device = upload(arena, long_rows, stream);
  auto* sums = arena.take<Sides>(parts);
  auto* for_signs = arena.take<char>(signs_pack(nullptr, signs.data(), count, replays, nullptr, stream));
  if (!workspace) return arena.nbytes();
  signs_pack(for_signs, signs.data(), count, replays, nullptr, stream);
  if (most && count > 0) clear(most, count * int64_t(sizeof *most), stream);
  if (blocks > 0)
    launch(stream, grid_of(unsigned(blocks)), kBlock, kernel<side_sums_kernel>, on_device, count, sums,
           reinterpret_cast<uint32_t*>(most));
  if (row_blocks > 0)
    launch(stream, grid_of(unsigned(row_blocks)), kBlock, kernel<combine_sides_kernel>, rows_on_device,
           int64_t(long_rows.size()), sums);
  return 0;
}

int64_t one_bit_decode_add(void* workspace, const WeightedSum* table, int64_t count, const OneBitTerm* terms,
                           int32_t* failed, cudaStream_t stream) {
  return launch_sums(workspace, table, count, terms, kMostTile, stream, kernel<one_bit_decode_add_kernel>, failed);
}

}  // namespace gradzip::cuda

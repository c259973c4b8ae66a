#include "cuda/signs.cuh"

#include "cuda/block/launch.h"
#include "cuda/block/table.h"
#include "cuda/ops.h"

namespace gradzip::cuda {

int64_t signs_pack(void* workspace, const SignsSource* table, int64_t count, const int64_t* replays, float* statistics,
                   cudaStream_t stream) {
  std::vector<SignsPackEntry> entries;
  int64_t blocks = 0, segments = 0;
  for (int64_t i = 0; i < count; ++i) {
    entries.push_back({table[i], blocks, segments});
    blocks += ceil_div(table[i].n, kSignsTile);
    segments += ceil_div(table[i].n, kSumSegment);
  }
  Arena arena(workspace);
  const auto* on_device = upload(arena, entries, stream);
  auto* parts = statistics ? arena.take<SignsPart>(segments) : nullptr;
  if (!workspace) return arena.nbytes();
  if (blocks > 0)
    launch(stream, grid_of(unsigned(blocks)), kBlock, kernel<signs_pack_kernel>, on_device, count, replays, parts);
  if (statistics && count > 0)
    launch(stream, grid_of(grid_for(ceil_div(count, kBlock / kLanes))), kBlock, kernel<signs_statistics_kernel>,
           on_device, count, parts, statistics);
  return 0;
}

int64_t signs_majority(void* workspace, const SignsVote* table, int64_t count, const uint8_t* const* votes, int voters,
                       const int64_t* replays, int64_t* against, cudaStream_t stream) {
  std::vector<SignsVoteEntry> entries;
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) {
    entries.push_back({table[i], blocks});
    blocks += ceil_div(table[i].n, kVoteTile);
  }
  Arena arena(workspace);
  const auto* on_device = upload(arena, entries, stream);
  const auto* addresses = upload(arena, std::vector<const uint8_t*>(votes, votes + count * voters), stream);
  if (!workspace) return arena.nbytes();
  if (against && count > 0) clear(against, count * voters * int64_t(sizeof *against), stream);
  const auto vote = voters < 1 << 4   ? kernel<signs_majority_kernel<4>>
                    : voters < 1 << 8 ? kernel<signs_majority_kernel<8>>
                                      : kernel<signs_majority_kernel<16>>;
  if (blocks > 0)
    launch(stream, grid_of(unsigned(blocks)), kBlock, vote, on_device, count, addresses, voters, replays, against);
  return 0;
}

int64_t signs_decode_add(void* workspace, const WeightedSum* table, int64_t count, const SignsTerm* terms,
                         cudaStream_t stream) {
  return launch_sums(workspace, table, count, terms, kTile, stream, kernel<signs_decode_add_kernel>);
}

}  // namespace gradzip::cuda

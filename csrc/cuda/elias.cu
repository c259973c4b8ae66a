#include "cuda/elias.cuh"

#include <algorithm>

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

// The scratch memory of an encoder.
struct Encoder {
  int64_t chunks;
  int64_t *offsets, *total;
  uint32_t* beyond;
  EliasSlots slots;

  Encoder(Arena& arena, int64_t n, int bits)
      : chunks(ceil_div(n, kEliasChunk)),
        offsets(arena.take<int64_t>(chunks + 1)),
        total(arena.take<int64_t>(1)),
        beyond(arena.take<uint32_t>(1)) {
    auto* words = arena.take<uint32_t>(chunks * slot_words(bits));
    slots = {words, arena.take<uint32_t>(chunks), slot_words(bits)};
  }

  unsigned grid() const { return grid_for(chunks); }

  void finish(uint8_t* out, int64_t capacity, int64_t* nbytes, cudaStream_t stream) const {
    launch(stream, grid_of(1), kScanBlock, kernel<scan_counts_kernel>, slots.sizes, chunks, offsets, total);
    launch(stream, grid_of(grid()), kBlock, kernel<move_chunks_kernel>, slots, offsets, chunks, beyond, out, capacity,
           nbytes);
  }
};

// The chunks of terms that a launch reads.
struct Streams {
  int64_t chunks;
  int64_t* offsets;

  Streams(Arena& arena, int64_t n, int64_t count)
      : chunks(ceil_div(n, kEliasChunk)),
        offsets(arena.take<int64_t>(std::min<int64_t>(count, kLanes) * (chunks + 1))) {}

  // Computes their offsets. Returns the grid that reads them.
  dim3 locate(const EliasTerms& terms, int64_t count, cudaStream_t stream) const {
    launch(stream, grid_of(grid_for(count)), kScanBlock, kernel<elias_offsets_kernel>, terms, count, chunks, offsets);
    return grid_of(grid_for(ceil_div(chunks, chunks_together(int(count)) * (kReadBlock / kLanes)), 16));
  }
};

}  // namespace

int64_t elias_encode(void* workspace, const int32_t* codes, int64_t n, uint8_t* out, int64_t capacity, int64_t* nbytes,
                     cudaStream_t stream) {
  Arena arena(workspace);
  const Encoder encoder(arena, n, kEliasBits);
  if (!workspace) return arena.nbytes();
  clear(encoder.beyond, sizeof *encoder.beyond, stream);
  launch(stream, grid_of(encoder.grid()), kBlock, kernel<elias_encode_kernel>, codes, n, encoder.slots, encoder.beyond);
  encoder.finish(out, capacity, nbytes, stream);
  return 0;
}

int64_t elias_quantize(void* workspace, const float* x, int64_t n, int bits, int64_t bucket, int norm, uint64_t key,
                       uint8_t* out, int64_t capacity, float* norms, int64_t* nbytes, cudaStream_t stream) {
  const bool nested = kEliasChunk % bucket == 0;  // a chunk's norms can be computed with it
  const Quantizer<float> q{x, n, bucket, bits, Norm(norm), key, norms};
  Arena arena(workspace);
  const Encoder encoder(arena, n, bits);
  auto* scratch =
      nested ? nullptr
             : arena.take<uint8_t>(bucket_norms(nullptr, x, int(Dtype::float32), n, bucket, norm, norms, stream));
  if (!workspace) return arena.nbytes();
  clear(encoder.beyond, sizeof *encoder.beyond, stream);
  if (!nested) bucket_norms(scratch, x, int(Dtype::float32), n, bucket, norm, norms, stream);
  launch(stream, grid_of(encoder.grid()), kBlock,
         nested ? kernel<elias_quantize_kernel<true>> : kernel<elias_quantize_kernel<false>>, q, encoder.slots);
  encoder.finish(out, capacity, nbytes, stream);
  return 0;
}

int64_t elias_decode(void* workspace, const uint8_t* bytes, int64_t nbytes, int64_t n, int32_t top, int32_t* codes,
                     int32_t* failed, cudaStream_t stream) {
  Arena arena(workspace);
  const Streams streams(arena, n, 1);
  if (!workspace) return arena.nbytes();
  const EliasTerms terms{{{bytes, nbytes, nullptr}}};
  const dim3 grid = streams.locate(terms, 1, stream);
  launch(stream, grid, kReadBlock, kernel<elias_decode_kernel>, terms, n, top, streams.offsets, codes, failed);
  return 0;
}

int64_t elias_decode_sum(void* workspace, const EliasTerm* terms, int64_t count, int64_t n, int bits, int64_t bucket,
                         float weight, bool add, float* out, int32_t* failed, cudaStream_t stream) {
  Arena arena(workspace);
  const Streams streams(arena, n, count);
  if (!workspace) return arena.nbytes();
  int64_t first = 0;
  do {
    EliasTerms batch{};
    const int64_t some = std::min<int64_t>(count - first, kLanes);
    std::copy_n(terms + first, some, batch.of);
    const dim3 grid = streams.locate(batch, some, stream);
    launch(stream, grid, kReadBlock, kernel<elias_decode_sum_kernel>, batch, some, n, bits, bucket, weight,
           add || first > 0, streams.offsets, out, failed);
    first += some;
  } while (first < count);
  return 0;
}

}  // namespace gradzip::cuda

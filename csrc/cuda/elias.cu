#include "cuda/elias.cuh"

#include "cuda/block/launch.h"
#include "cuda/ops.h"

namespace gradzip::cuda {
namespace {

// The sizes and offsets of chunks.
struct Chunks {
  int64_t count;
  uint32_t* sizes;
  int64_t *offsets, *total;

  Chunks(Arena& arena, int64_t n)
      : count(ceil_div(n, kEliasChunk)),
        sizes(arena.take<uint32_t>(count)),
        offsets(arena.take<int64_t>(count + 1)),
        total(arena.take<int64_t>(1)) {}

  unsigned grid() const { return grid_for(count); }

  void scan(cudaStream_t stream) const {
    launch(stream, grid_of(1), kScanBlock, kernel<scan_counts_kernel>, sizes, count, offsets, total);
  }
};

// The scratch memory of an encoder.
struct Encoder {
  Chunks chunks;
  uint32_t* beyond;
  EliasSlots slots;

  Encoder(Arena& arena, int64_t n, int bits) : chunks(arena, n), beyond(arena.take<uint32_t>(1)) {
    slots = {arena.take<uint32_t>(chunks.count * slot_words(bits)), chunks.sizes, slot_words(bits)};
  }

  void finish(uint8_t* out, int64_t capacity, int64_t* nbytes, cudaStream_t stream) const {
    chunks.scan(stream);
    launch(stream, grid_of(chunks.grid()), kBlock, kernel<move_chunks_kernel>, slots, chunks.offsets, chunks.count,
           beyond, out, capacity, nbytes);
  }
};

// Computes the offsets of the chunks of a stream.
void locate(const Chunks& chunks, const uint8_t* bytes, int64_t nbytes, cudaStream_t stream) {
  launch(stream, grid_of(grid_for(ceil_div(chunks.count, kBlock))), kBlock, kernel<chunk_sizes_kernel>, bytes, nbytes,
         chunks.count, chunks.sizes);
  chunks.scan(stream);
}

dim3 read_grid(const Chunks& chunks) {
  return grid_of(grid_for(ceil_div(chunks.count, kReaders * (kReadBlock / kLanes)), 16));
}

}  // namespace

int64_t elias_encode(void* workspace, const int32_t* codes, int64_t n, uint8_t* out, int64_t capacity, int64_t* nbytes,
                     cudaStream_t stream) {
  Arena arena(workspace);
  const Encoder encoder(arena, n, kEliasBits);
  if (!workspace) return arena.nbytes();
  clear(encoder.beyond, sizeof *encoder.beyond, stream);
  launch(stream, grid_of(encoder.chunks.grid()), kBlock, kernel<elias_encode_kernel>, codes, n, encoder.slots,
         encoder.beyond);
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
  launch(stream, grid_of(encoder.chunks.grid()), kBlock,
         nested ? kernel<elias_quantize_kernel<true>> : kernel<elias_quantize_kernel<false>>, q, encoder.slots);
  encoder.finish(out, capacity, nbytes, stream);
  return 0;
}

int64_t elias_decode(void* workspace, const uint8_t* bytes, int64_t nbytes, int64_t n, int32_t top, int32_t* codes,
                     int32_t* failed, cudaStream_t stream) {
  Arena arena(workspace);
  const Chunks chunks(arena, n);
  if (!workspace) return arena.nbytes();
  locate(chunks, bytes, nbytes, stream);
  launch(stream, read_grid(chunks), kReadBlock, kernel<elias_decode_kernel>, bytes, nbytes, n, top, chunks.offsets,
         codes, failed);
  return 0;
}

int64_t elias_decode_add(void* workspace, const uint8_t* bytes, int64_t nbytes, const float* norms, int64_t n, int bits,
                         int64_t bucket, float weight, float* out, int32_t* failed, cudaStream_t stream) {
  Arena arena(workspace);
  const Chunks chunks(arena, n);
  if (!workspace) return arena.nbytes();
  locate(chunks, bytes, nbytes, stream);
  launch(stream, read_grid(chunks), kReadBlock, kernel<elias_decode_add_kernel>, bytes, nbytes, norms, n, bits, bucket,
         weight, chunks.offsets, out, failed);
  return 0;
}

}  // namespace gradzip::cuda

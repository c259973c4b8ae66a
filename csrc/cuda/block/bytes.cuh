// Little-endian numbers at any address.
#pragma once

#include "cuda/block/block.cuh"

namespace gradzip::cuda {

template <class T>
GZ_DEVICE T load_bytes(const uint8_t* at) {
  T word = 0;
#pragma unroll
  for (int b = 0; b < int(sizeof(T)); ++b) word = T(word | T(at[b]) << (8 * b));
  return word;
}

GZ_DEVICE void store_bytes(uint8_t* at, uint64_t word, int nbytes) {
  for (int b = 0; b < nbytes; ++b) at[b] = uint8_t(word >> (8 * b));
}

}  // namespace gradzip::cuda

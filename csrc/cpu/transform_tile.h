// Transforms of tiles (common/transform.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "common/transform.h"
#include "cpu/parallel.h"

namespace gradzip::cpu {

constexpr int kMostLength = kMostFourier;
constexpr int64_t kTileRoom = kTransformTile + 64;  // floats: a tile, and what vectors write past its end
constexpr int64_t kTransformAhead = 4096;           // elements between those being read and those being prefetched

struct Transform : TransformLayout {
  uint16_t slot[kMostLength], coefficient[kMostLength];

  explicit Transform(uint32_t code, int64_t size) {
    if (!make_layout(code, size, this)) throw std::invalid_argument("transform: there is no transform of this code");
    for (int i = 0; i < length; ++i) {
      slot[i] = uint16_t(element_slot(*this, i));
      coefficient[i] = uint16_t(slot_coefficient(*this, i));
    }
  }
};

// The coefficients of a tile of `count` elements, of any type (common/half.h), and the elements of coefficients.
template <class T>
void forward_tile(const Transform& t, const T* x, int64_t count, float* coefficients);
void inverse_tile(const Transform& t, const float* coefficients, int64_t count, float* x);

// transform_select (kernels.h).
void select_coefficients(const Transform& t, const TransformSource& source, int threads);

// f(tile) for every tile, several to a task.
template <class F>
void for_each_tile(const TransformLayout& t, int threads, F&& f) {
  const int64_t together = std::clamp<int64_t>(t.tiles / (8 * threads), 1, 16);
  parallel_chunks(t.tiles, together, threads, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

}  // namespace gradzip::cpu

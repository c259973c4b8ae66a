// Shared by the programs of this folder: edge-case sizes, data, exactly allocated buffers, comparison of bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "cuda_runtime.h"

namespace simt {

// Whether races are detected (races.h), which takes long: with few sizes, of which the last has more tiles than a grid
// has blocks, and few kinds of data.
inline constexpr bool kRaces = races::kDetected;

using Sizes = std::vector<int64_t>;
inline const Sizes kSizes = kRaces ? Sizes{33, 1025, 70001} : Sizes{0, 1, 31, 33, 1025, 8193, 65537};

// Memory of exactly n items, `skip` items off an aligned address, filled with a pattern on which no kernel may rely.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n, int64_t skip = 0) : n_(n), skip_(skip), data_(new T[size_t(n + skip)]) {
    std::memset(static_cast<void*>(data_.get()), 0xA5, size_t(n + skip) * sizeof(T));
  }
  Buffer(const std::vector<T>& from, int64_t skip = 0) : Buffer(int64_t(from.size()), skip) {
    if (n_) std::memcpy(static_cast<void*>(get()), from.data(), size_t(n_) * sizeof(T));
  }
  T* get() const { return data_.get() + skip_; }
  operator T*() const { return get(); }
  int64_t size() const { return n_; }

 private:
  int64_t n_, skip_;
  std::unique_ptr<T[]> data_;
};

// What kernels that draw get as `replays`: null for some sizes, so that both are tested.
inline const int64_t* replays_for(int64_t n) {
  static const Buffer<int64_t> number(std::vector<int64_t>{3});
  return n % 3 ? number.get() : nullptr;
}

// Both phases of a kernel that takes a workspace (cuda/ops.h), without the stream. The workspace is dirty and has
// exactly the size that the kernel asks for.
template <class Kernel, class... A>
void call(Kernel kernel, const A&... arguments) {
  const int before = launches;
  const int64_t nbytes = kernel(nullptr, arguments..., nullptr);
  if (nbytes == 0) return;
  if (launches != before) fail("a kernel was launched without the workspace it needs");
  const Buffer<ulonglong2> workspace((nbytes + 15) / 16);
  if (kernel(workspace.get(), arguments..., nullptr) != 0) fail("a kernel asks for its workspace a second time");
}

template <class T>
void expect_equal(const T* got, const T* expected, int64_t n, const std::string& what) {
  for (int64_t i = 0; i < n; ++i) {
    if (std::memcmp(static_cast<const void*>(got + i), static_cast<const void*>(expected + i), sizeof(T)) == 0)
      continue;
    unsigned long long a = 0, b = 0;
    std::memcpy(&a, got + i, sizeof(T) < 8 ? sizeof(T) : 8);
    std::memcpy(&b, expected + i, sizeof(T) < 8 ? sizeof(T) : 8);
    std::fprintf(stderr, "%s: item %lld of %lld is %#llx, expected %#llx (seed %u)\n", what.c_str(), (long long)i,
                 (long long)n, a, b, options.seed);
    std::exit(1);
  }
}
template <class T>
void expect_equal(const T& got, const T& expected, const std::string& what) {
  expect_equal(&got, &expected, 1, what);
}

// Kinds of gradients: dense, all zeros, mostly zeros, few distinct values (ties), extreme and non-finite values.
enum class Kind { normal, zeros, sparse, ties, wild };
#if defined(SIMT_RACES)
inline constexpr Kind kKinds[] = {Kind::ties, Kind::wild};
#else
inline constexpr Kind kKinds[] = {Kind::normal, Kind::zeros, Kind::sparse, Kind::ties, Kind::wild};
#endif

inline std::vector<float> data(Kind kind, int64_t n, bool finite = false) {
  std::mt19937 random(unsigned(n) * 8 + unsigned(kind));
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (auto& v : x) {
    v = normal(random);
    const unsigned draw = unsigned(random());
    if (kind == Kind::zeros) v = draw & 1 ? 0.0f : -0.0f;
    if (kind == Kind::sparse && draw % 50) v = 0.0f;
    if (kind == Kind::ties) v = float(int(draw % 5)) - 2.0f;
    if (kind == Kind::wild) {
      std::memcpy(&v, &draw, 4);  // any bits: subnormals, infinities, NaNs
      if (finite && !std::isfinite(v)) v = 1.0f;
    }
  }
  return x;
}

// The same numbers as Ts, rounded.
template <class T>
std::vector<T> as(const std::vector<float>& x) {
  std::vector<T> rounded;
  for (float value : x) rounded.push_back(gradzip::rounded<T>(value));
  return rounded;
}

// Runs f() in several block and thread orders, on simulated devices of several sizes; large inputs get fewer. Whether
// there is a race hardly depends on the order: one suffices.
template <class F>
void in_any_order(int64_t n, F f) {
  const unsigned first = kRaces ? 1 : unsigned(n % 2), orders = kRaces || n > 10000 ? 1 : 2;
  for (unsigned seed = first; seed < first + orders; ++seed) {
    options.seed = seed;
    options.multiprocessors = seed % 2 ? 1 : 3;
    f();
  }
}

}  // namespace simt

// A small thread pool. OpenMP would add a second runtime beside torch's, and the idle threads of one would spin on the
// cores that the other needs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace gradzip::cpu {

// Calls task(context, i) for i in [0, tasks) on at most `threads` threads, including the caller's. The assignment of
// tasks to threads is not fixed: kernels cut their work by size, never by thread count, so results do not depend on it.
// Rethrows the first exception of a task. Safe after fork(): a child starts its own pool.
void parallel_run(int64_t tasks, int threads, void (*task)(void*, int64_t), void* context);

template <class F>
void parallel_for(int64_t tasks, int threads, F&& f) {
  parallel_run(
      tasks, threads, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

// Lowers, or raises, a number that threads share.
inline void lower(std::atomic<int64_t>* number, int64_t to) {
  int64_t seen = *number;
  while (to < seen && !number->compare_exchange_weak(seen, to)) continue;
}
inline void raise(std::atomic<int64_t>* number, int64_t to) {
  int64_t seen = *number;
  while (to > seen && !number->compare_exchange_weak(seen, to)) continue;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Elements per task: large enough to amortise the scheduling, small enough to stay in the L2 cache.
constexpr int64_t kChunk = 1 << 15;

// f(chunk, begin, end) over [0, n) in chunks of `chunk_size`.
template <class F>
void parallel_chunks(int64_t n, int64_t chunk_size, int threads, F&& f) {
  parallel_for(ceil_div(n, chunk_size), threads, [&](int64_t chunk) {
    const int64_t begin = chunk * chunk_size, end = begin + chunk_size;
    f(chunk, begin, end < n ? end : n);
  });
}

// f(i, chunk) for chunk < chunks(i) of each of `count` pieces of work, all side by side.
template <class Chunks, class F>
void parallel_table(int64_t count, int threads, Chunks&& chunks, F&& f) {
  std::vector<int64_t> first(size_t(count) + 1, 0);
  for (int64_t i = 0; i < count; ++i) first[size_t(i) + 1] = first[size_t(i)] + chunks(i);
  parallel_for(first.back(), threads, [&](int64_t task) {
    const int64_t i = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
    f(i, task - first[size_t(i)]);
  });
}

// f(i, threads) for `count` pieces of work of size(i) elements each: large ones one after the other on all threads, then
// the others side by side, each on one.
template <class Size, class F>
void parallel_pieces(int64_t count, int threads, Size&& size, F&& f) {
  constexpr int64_t kLarge = 1 << 20;
  std::vector<int64_t> small;
  for (int64_t i = 0; i < count; ++i)
    if (count == 1 || size(i) >= kLarge)
      f(i, threads);
    else
      small.push_back(i);
  parallel_for(int64_t(small.size()), threads, [&](int64_t i) { f(small[i], 1); });
}

}  // namespace gradzip::cpu

// Runs CUDA kernels on the CPU, for tests: the same .cuh and .cu files, compiled as C++ after this header.
//
// Every thread of a block is a fiber. A fiber runs until it must wait for others (barrier, warp collective), then it
// switches to the next one, in an order shuffled by `options.seed`, so that a missing barrier is detected. Blocks run to
// completion one after the other, in shuffled order: a kernel passes only if it is correct with one block resident at a
// time. (Blocks that wait for each other therefore hang on purpose: no kernel here may rely on that.)
//
// Reported, with exit status 3: threads at different barriers, or ended while others wait at one; warp collectives that
// not all of their lanes reach or that read a lane outside the mask; masks without the caller; bad launch
// configurations. Shared memory is static or exactly allocated, so the address sanitizer detects accesses out of
// bounds; it keeps its contents from block to block, so that uninitialised memory is detected. With the thread sanitizer
// instead, races are reported: see races.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include "races.h"

// --- the language
#define __global__
#define __device__
#define __constant__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define GZ_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(simt::dynamic_shared.get())

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

// Saves the callee-saved registers on this stack and resumes the other stack. (swapcontext would make a system call for
// the signal mask each time, and the address sanitizer would clear the shadow of the whole stack.)
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
simt_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

namespace simt {

struct Options {
  unsigned seed = 0;
  int multiprocessors = 3;  // of the simulated device: few, so that grids are smaller than the work
  bool dry = false;  // count launches, and run nothing
};
inline Options options;

constexpr unsigned kLanes = 32;
constexpr unsigned kMostThreads = 1024;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 256 << 10;
#else
// Small, so that the page table entries of all stacks stay in the caches.
constexpr size_t kStackBytes = (races::kDetected ? 96 : 32) << 10;
#endif
// Between the tops of stacks, within a page. At one place of their pages, they would evict each other from the caches.
constexpr size_t kStackStagger = 5 * 64;

enum class State { ready, barrier, warp, done };

struct Fiber {
  void* stack_pointer = nullptr;
  std::unique_ptr<char[]> stack;
  const void* stack_begin = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;
  void* racer = nullptr;  // see races.h
  unsigned thread = 0;
  State state = State::done;
  int line = 0;  // of the source, where it waits
};

// A warp's collective in progress; complete when all lanes of its mask have arrived.
struct Warp {
  unsigned mask = 0, arrived = 0, completed = 0;
  int line = 0;
  const char* what = nullptr;
  uint64_t values[kLanes], results[kLanes];
  races::Object order[2];  // of successive collectives
};

inline std::vector<std::unique_ptr<Fiber>> fiber_sets[races::kFiberSets];  // kept from block to block
inline unsigned blocks_started = 0, barriers_passed = 0;
inline int barrier_counts[2];  // of successive barriers; 0 but for the one that threads are at
inline Warp warps[kMostThreads / kLanes];
inline races::Object barrier_order[2];  // of successive barriers
inline std::function<void()> body;
inline std::unique_ptr<unsigned char[]> dynamic_shared;
inline Fiber scheduler;  // the program's own stack
inline Fiber *current = &scheduler, *previous = nullptr;
inline unsigned unfinished = 0;  // threads of the block
// Threads take turns in rounds: of this round, `turn` is next; who can run again does so in the following one.
inline Fiber* round_order[kMostThreads];
inline unsigned round_size = 0, turn = 0;
inline Fiber* woken[kMostThreads];
inline unsigned woken_count = 0;

inline std::vector<std::unique_ptr<Fiber>>& fibers() { return fiber_sets[blocks_started % races::kFiberSets]; }

template <class... A>
[[noreturn]] void fail(const char* format, A... arguments) {
  std::fprintf(stderr, "simt: block %u, thread %u: ", blockIdx.x, current->thread);
  std::fprintf(stderr, format, arguments...);
  std::fputc('\n', stderr);
  std::_Exit(3);
}

// The address sanitizer must know which stack is in use. It tells the place of the one that was left.
inline void leave([[maybe_unused]] Fiber& from, [[maybe_unused]] const Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack_begin, to.stack_bytes);
#endif
}
inline void arrive([[maybe_unused]] void* fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, &previous->stack_begin, &previous->stack_bytes);
#endif
}

SIMT_UNCHECKED inline void switch_to(Fiber& to) {
  Fiber& from = *current;
  previous = &from;
  current = &to;
  threadIdx.x = to.thread;
  leave(from, to);
  races::become(to.racer);
  simt_switch(&from.stack_pointer, to.stack_pointer);
  arrive(from.fake_stack);
}

SIMT_UNCHECKED inline void suspend(State state, int line) {
  current->state = state;
  current->line = line;
  switch_to(turn < round_size ? *round_order[turn++] : scheduler);
}

SIMT_UNCHECKED inline void wake(Fiber& fiber) {
  fiber.state = State::ready;
  woken[woken_count++] = &fiber;
}

SIMT_UNCHECKED inline void fiber_main() {
  arrive(nullptr);
  for (;;) {
    races::acquire(races::objects.begin);
    body();
    races::release(races::objects.end);
    --unfinished;
    suspend(State::done, 0);
  }
}

inline void start_fibers(unsigned threads) {
  while (fibers().size() < threads) {
    fibers().push_back(std::make_unique<Fiber>());
    Fiber& fiber = *fibers().back();
    fiber.thread = unsigned(fibers().size()) - 1;
    fiber.stack.reset(new char[kStackBytes]);
    fiber.stack_begin = fiber.stack.get();
    fiber.stack_bytes = kStackBytes;
    fiber.racer = races::thread_of(blocks_started % races::kFiberSets, fiber.thread);
    // The stack as simt_switch leaves it: six registers and the return address; fiber_main sees it as after a call.
    const uintptr_t end = reinterpret_cast<uintptr_t>(fiber.stack_begin) + kStackBytes;
    auto** top = reinterpret_cast<void**>((end - fiber.thread * kStackStagger % 4096) & ~uintptr_t(15));
    *(top -= 2) = reinterpret_cast<void*>(fiber_main);
    fiber.stack_pointer = top - 6;
  }
  for (unsigned t = 0; t < threads; ++t) wake(*fibers()[t]);
  unfinished = threads;
  std::fill_n(warps, threads / kLanes, Warp{});
  races::release(races::objects.begin);
}

// No fiber can run: all wait at one barrier, or there is a fault.
inline void release_barrier(unsigned threads) {
  const Fiber* waiting = nullptr;
  for (unsigned t = 0; t < threads; ++t) {
    current = fibers()[t].get();
    if (current->state == State::warp) {
      const Warp& warp = warps[t / kLanes];
      fail("%s at line %d is waited for by lanes %08x, but only %08x came", warp.what, warp.line, warp.mask,
           warp.arrived);
    }
    if (current->state == State::barrier && !waiting) waiting = current;
  }
  for (unsigned t = 0; t < threads; ++t) {
    current = fibers()[t].get();
    if (current->state == State::done)
      fail("has ended while thread %u waits at line %d", waiting->thread, waiting->line);
    if (current->line != waiting->line)
      fail("is at the barrier of line %d, thread %u at that of line %d", current->line, waiting->thread, waiting->line);
    wake(*current);
  }
  current = &scheduler;
  ++barriers_passed;
  barrier_counts[barriers_passed % 2] = 0;
}

inline void run_block(unsigned threads, std::mt19937& random) {
  start_fibers(threads);
  while (unfinished > 0) {
    if (woken_count == 0) release_barrier(threads);
    // Another order each time: numbers i and i ^ flip are exchanged.
    round_size = std::exchange(woken_count, 0u);
    const unsigned flip = unsigned(random()) % std::min(kMostThreads, 2 * round_size);
    for (unsigned i = 0; i < round_size; ++i) round_order[i] = woken[(i ^ flip) < round_size ? i ^ flip : i];
    turn = 1;
    switch_to(*round_order[0]);
  }
}

template <class F>
void launch(dim3 grid, dim3 block, size_t shared_bytes, F kernel) {
  if (grid.x < 1 || grid.y < 1 || grid.y > 65535 || block.x < 1 || block.x > kMostThreads || block.x % kLanes ||
      block.y != 1)
    fail("cannot launch %u x %u blocks of %u x %u threads", grid.x, grid.y, block.x, block.y);
  if (races::kDetected && shared_bytes) fail("has dynamic shared memory, in which races are not detected");
  scheduler.racer = races::this_thread();
  body = kernel;
  gridDim = grid;
  blockDim = block;
  dynamic_shared.reset(new unsigned char[shared_bytes]);
  std::mt19937 random(options.seed);
  std::vector<unsigned> order(size_t(grid.x) * grid.y);
  std::iota(order.begin(), order.end(), 0u);
  if (options.seed) std::shuffle(order.begin(), order.end(), random);
  for (unsigned index : order) {
    races::forget_static_memory();
    ++blocks_started;
    blockIdx.x = index % grid.x;
    blockIdx.y = index / grid.x;
    run_block(block.x, random);
  }
  races::acquire(races::objects.end);
}

// The contributions of all lanes of `mask`, once all have arrived.
SIMT_UNCHECKED inline const uint64_t* exchange(const char* what, unsigned mask, uint64_t value, int line) {
  const unsigned lane = threadIdx.x % kLanes, bit = 1u << lane;
  Warp& warp = warps[threadIdx.x / kLanes];
  if (!(mask & bit)) fail("%s at line %d: mask %08x leaves out lane %u itself", what, line, mask, lane);
  if (!warp.arrived) {
    warp.mask = mask;
    warp.line = line;
    warp.what = what;
  } else if (warp.mask != mask || warp.line != line || warp.what != what) {
    fail("is at %s of line %d with mask %08x, other lanes of its warp at %s of line %d with mask %08x", what, line,
         mask, warp.what, warp.line, warp.mask);
  }
  warp.values[lane] = value;
  warp.arrived |= bit;
  if (warp.arrived != mask) {
    suspend(State::warp, line);
  } else {
    // volatile: not to become a call of memcpy, which the thread sanitizer checks
    for (unsigned l = 0; l < kLanes; ++l) static_cast<volatile uint64_t&>(warp.results[l]) = warp.values[l];
    warp.arrived = 0;
    ++warp.completed;
    const std::unique_ptr<Fiber>* lanes = fibers().data() + threadIdx.x / kLanes * kLanes;
    for (unsigned l = 0; l < kLanes; ++l)
      if (mask >> l & 1 && l != lane) wake(*lanes[l]);
  }
  return warp.results;
}

template <class T>
SIMT_UNCHECKED T shuffle(const char* what, unsigned mask, T value, unsigned source, int line) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "as on the device");
  uint64_t raw = 0;
  std::memcpy(&raw, &value, sizeof(T));
  const uint64_t* all = exchange(what, mask, raw, line);
  if (!(mask >> source & 1)) fail("%s at line %d reads lane %u, outside of mask %08x", what, line, source, mask);
  std::memcpy(&value, &all[source], sizeof(T));
  return value;
}

SIMT_UNCHECKED inline unsigned vote(const char* what, unsigned mask, bool predicate, int line) {
  const uint64_t* all = exchange(what, mask, predicate, line);
  unsigned ballot = 0;
  for (unsigned l = 0; l < kLanes; ++l)
    if (mask >> l & 1 && all[l]) ballot |= 1u << l;
  return ballot;
}

}  // namespace simt

// --- barriers and fences
SIMT_UNCHECKED inline void __syncthreads(int line = __builtin_LINE()) {
  simt::races::Object& order = simt::barrier_order[simt::barriers_passed % 2];
  simt::races::release(order);
  simt::suspend(simt::State::barrier, line);
  simt::races::acquire(order);
}
SIMT_UNCHECKED inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
  int& count = simt::barrier_counts[simt::barriers_passed % 2];
  count += predicate != 0;
  __syncthreads(line);
  return count;
}
SIMT_UNCHECKED inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
  simt::Warp& warp = simt::warps[threadIdx.x / simt::kLanes];
  simt::races::Object& order = warp.order[warp.completed % 2];
  simt::races::release(order);
  simt::exchange("__syncwarp", mask, 0, line);
  simt::races::acquire(order);
}
inline void __threadfence() {
  simt::races::acquire(simt::races::objects.fence);
  simt::races::release(simt::races::objects.fence);
}
inline void __threadfence_block() {}

// --- warp collectives
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int line = __builtin_LINE()) {
  return simt::shuffle("__shfl_sync", mask, value, unsigned(source) % 32, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int line = __builtin_LINE()) {
  return simt::shuffle("__shfl_xor_sync", mask, value, (threadIdx.x ^ unsigned(lanes)) % 32, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int line = __builtin_LINE()) {
  const unsigned lane = threadIdx.x % 32;
  return simt::shuffle("__shfl_up_sync", mask, value, lane < delta ? lane : lane - delta, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int line = __builtin_LINE()) {
  const unsigned lane = threadIdx.x % 32;
  return simt::shuffle("__shfl_down_sync", mask, value, lane + delta > 31 ? lane : lane + delta, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return simt::vote("__ballot_sync", mask, predicate, line);
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return simt::vote("__any_sync", mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return simt::vote("__all_sync", mask, predicate, line) == mask;
}

// --- atomics: one fiber runs at a time
namespace simt {
template <class T, class F>
T update(T* address, F f) {
  const T old = races::atomic_load(address);
  races::atomic_store(address, f(old));
  return old;
}
}  // namespace simt
#define SIMT_ATOMIC(NAME, EXPRESSION)                                \
  template <class T>                                                 \
  T NAME(T* address, std::common_type_t<T> value) {                  \
    return simt::update(address, [=](T old) { return EXPRESSION; }); \
  }
SIMT_ATOMIC(atomicAdd, T(old + value))
SIMT_ATOMIC(atomicMax, old > value ? old : value)
SIMT_ATOMIC(atomicMin, old < value ? old : value)
SIMT_ATOMIC(atomicOr, T(old | value))
SIMT_ATOMIC(atomicAnd, T(old& value))
SIMT_ATOMIC(atomicExch, (void(old), value))
#undef SIMT_ATOMIC
template <class T>
T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
  return simt::update(address, [=](T old) { return old == expected ? value : old; });
}

// --- intrinsics
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
template <class T>
T __ldg(const T* address) {
  return *address;
}
inline unsigned __float_as_uint(float x) {
  unsigned u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float __uint_as_float(unsigned u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

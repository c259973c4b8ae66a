// Race detection: with -fsanitize=thread, GPU threads are threads of the thread sanitizer.
//
// It reports two accesses to one address, at least one of them a write, that nothing orders. What orders accesses is
// what orders them on a device: `__syncthreads` those of a block, `__syncwarp` those of a warp, `__threadfence` those
// before one fence and after a later one, and the ends of a kernel. Shuffles, votes and atomics order nothing; atomics
// do not race with each other. Shared memory is new in every block. The order in which simt.h runs threads matters
// little: a race is found whichever access comes first. Not found are races between the 8 lanes that share a thread of
// the sanitizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SIMT_RACES
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define SIMT_RACES
#endif

#if defined(SIMT_RACES)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* object);
void __tsan_release(void* object);
void __tsan_java_init(uintptr_t begin, uintptr_t bytes);
void __tsan_java_alloc(uintptr_t begin, uintptr_t bytes);
void __tsan_java_free(uintptr_t begin, uintptr_t bytes);
extern char __data_start[], _end[];
}

// Marks functions of simt.h in which threads and scheduler share memory of their own, which is not checked.
#define SIMT_UNCHECKED __attribute__((no_sanitize("thread"), noinline))
#else
#define SIMT_UNCHECKED
#endif

namespace simt::races {

// Orders accesses: what a thread did before a release happens before what another does after a later acquire.
struct Object {
  [[maybe_unused]] uint64_t address;
};

#if defined(SIMT_RACES)
constexpr bool kDetected = true;
constexpr unsigned kFiberSets = 2;  // so that successive blocks have different threads

inline void* this_thread() { return __tsan_get_current_fiber(); }

// The sanitizer's thread for a GPU thread. One for each lane would take too long: a barrier takes the square of their
// number. Four serve a warp; lanes whose numbers differ in one bit, which exchange values in reductions, have different
// ones.
inline void* thread_of(unsigned set, unsigned thread) {
  static std::vector<void*> threads[kFiberSets];
  const unsigned lane = thread % 32, index = thread / 32 * 4 + ((lane ^ lane >> 2 ^ lane >> 4) & 3);
  while (threads[set].size() <= index) threads[set].push_back(__tsan_create_fiber(0));
  return threads[set][index];
}
SIMT_UNCHECKED inline void become(void* thread) {
  constexpr unsigned kUnordered = 1;
  __tsan_switch_to_fiber(thread, kUnordered);
}
SIMT_UNCHECKED inline void release(Object& object) { __tsan_release(&object); }
SIMT_UNCHECKED inline void acquire(Object& object) { __tsan_acquire(&object); }

// Forgets the accesses to static memory, where shared memory is, and what was released there. The sanitizer offers this
// for the heap of a Java machine only: static memory is registered as one, with a single object, replaced each time.
inline void forget_static_memory() {
  const uintptr_t begin = (uintptr_t(__data_start) + 7) / 8 * 8, bytes = uintptr_t(_end) / 8 * 8 - begin;
  static bool registered = false;
  registered ? __tsan_java_free(begin, bytes) : __tsan_java_init(begin, bytes);
  registered = true;
  __tsan_java_alloc(begin, bytes);
}
#else
constexpr bool kDetected = false;
constexpr unsigned kFiberSets = 1;

inline void* this_thread() { return nullptr; }
inline void* thread_of(unsigned, unsigned) { return nullptr; }
inline void become(void*) {}
inline void release(Object&) {}
inline void acquire(Object&) {}
inline void forget_static_memory() {}
#endif

// Of a launch: from its caller to its threads, from its threads to its caller; of all fences.
struct Objects {
  Object begin, end, fence;
};
inline Objects& objects = *new Objects;  // not in static memory

// One thread at a time runs, so an access and its atomic counterpart do the same.
template <class T>
T atomic_load(const T* address) {
#if defined(SIMT_RACES)
  return __atomic_load_n(address, __ATOMIC_RELAXED);
#else
  return *address;
#endif
}
template <class T>
void atomic_store(T* address, T value) {
#if defined(SIMT_RACES)
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
#else
  *address = value;
#endif
}

}  // namespace simt::races

#include "cpu/parallel.h"

#include <immintrin.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace gradzip::cpu {
namespace {

struct Job {
  void (*task)(void*, int64_t);
  void* context;
  int64_t tasks;
  int helpers_wanted;
  // Rounding and denormal flushing are settings of each thread: workers take over the caller's.
  unsigned float_mode = _mm_getcsr();
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;

  void work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      try {
        task(context, i);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
        next.store(tasks, std::memory_order_relaxed);
      }
    }
  }
};

class Pool {
 public:
  // False if another thread is using the pool: the caller then works alone instead of waiting.
  bool run(Job& job) {
    std::unique_lock<std::mutex> busy(busy_, std::try_to_lock);
    if (!busy.owns_lock()) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (int(workers_.size()) < job.helpers_wanted) workers_.emplace_back([this] { serve(); });
      job_ = &job;
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;  // no worker joins from here on; wait for those that did
    done_.wait(lock, [this] { return active_ == 0; });
    return true;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return job_ != nullptr && job_->helpers_wanted > 0; });
      Job* job = job_;
      --job->helpers_wanted;
      ++active_;
      lock.unlock();
      _mm_setcsr(job->float_mode);
      job->work();
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Job* job_ = nullptr;
  int active_ = 0;
};

// Never destroyed: workers may still wait in it while the process exits. A forked child does not have its parent's
// threads, so it starts its own pool.
Pool& pool() {
  static std::mutex mutex;
  static Pool* instance = nullptr;
  static pid_t owner = 0;
  const pid_t pid = getpid();
  std::lock_guard<std::mutex> lock(mutex);
  if (owner != pid) {
    instance = new Pool;
    owner = pid;
  }
  return *instance;
}

}  // namespace

void parallel_run(int64_t tasks, int threads, void (*task)(void*, int64_t), void* context) {
  Job job;
  job.task = task;
  job.context = context;
  job.tasks = tasks;
  job.helpers_wanted = int(std::min<int64_t>(threads, tasks)) - 1;
  if (job.helpers_wanted <= 0 || !pool().run(job)) job.work();
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace gradzip::cpu

#include "threads.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace threads {
namespace {

constexpr int kSpins = 4000;         // looks at a quiet pool before a helper offers its core, about 100 us: longer than between two kernels
constexpr int kYields = 1000;        // more of them before it lies down, half a millisecond if nobody wants the core: longer than a short step
constexpr int kSpinsForHelpers = 1000;  // looks at helpers in the middle of a task before they are offered this core

// What is to be done lies in `left_`: the number of the job, then the first task that nobody has taken, then the one behind
// the last. The other fields of a job are written while there is none and hold still until there is none again, so whoever takes a task by
// changing `left_` has read the fields of its job.
//
// The caller takes tasks from the front, helpers from the back. So of work that is done again and again each core has about the same part
// each time, and finds what it reads in its own caches.
class Pool {
 public:
  void run(int64_t wanted, int64_t count, void (*task)(void*, int64_t), void* context) {
    if (count > kMost || busy_.test_and_set(std::memory_order_acquire)) {
      for (int64_t i = 0; i < count; ++i) task(context, i);
      return;
    }
    grow(std::min(wanted, count) - 1);
    offer(std::min(wanted, count) - 1, count, task, context);
    while (take()) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins)
      spins < kSpinsForHelpers ? _mm_pause() : static_cast<void>(sched_yield());
    busy_.clear(std::memory_order_release);
  }

  uint64_t begin(void (*task)(void*, int64_t), void* context) {
    if (busy_.test_and_set(std::memory_order_acquire)) return 0;
    grow(1);
    if (!num_helpers_) {
      busy_.clear(std::memory_order_release);
      return 0;
    }
    const uint64_t begun = job_ + 1;
    offer(1, 1, task, context, begun);
    return begun;
  }

  // Another job's number where this one's was means that it has ended, or that this is a forked process, which has no such job.
  void finish(uint64_t begun) {
    for (int spins = 0; begun_.load(std::memory_order_acquire) == begun && ended_.load(std::memory_order_acquire) < begun; ++spins)
      if (!take(-1, begun)) spins < kSpinsForHelpers ? _mm_pause() : static_cast<void>(sched_yield());
  }

 private:
  // begun: the job's number, if nobody stays until it is done: whoever does it ends it.
  void offer(int64_t wanted, int64_t count, void (*task)(void*, int64_t), void* context, uint64_t begun = 0) {
    begun_.store(begun, std::memory_order_release);
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    num_wanted_.store(wanted, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    left_.store(++job_ * kJob + static_cast<uint64_t>(count));  // in one order with `num_asleep_`: who lies down sees it, or is seen
    if (num_asleep_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      waken_.notify_all();
    }
  }

  static constexpr uint64_t kFront = 1 << 20, kJob = uint64_t{1} << 40;
  static constexpr int64_t kMost = kFront - 1;
  static int64_t front(uint64_t left) { return static_cast<int64_t>(left % kJob / kFront); }
  static int64_t back(uint64_t left) { return static_cast<int64_t>(left % kFront); }
  static bool some(uint64_t left) { return front(left) < back(left); }

  // Do one task; false if there is none. only: of this job, if it was begun.
  bool take(int64_t helper = -1, uint64_t only = 0) {
    uint64_t left = left_.load(std::memory_order_acquire);
    while (some(left)) {
      if (helper >= num_wanted_.load(std::memory_order_relaxed)) return false;
      const auto task = task_.load(std::memory_order_relaxed);
      void* const context = context_.load(std::memory_order_relaxed);
      const uint64_t begun = begun_.load(std::memory_order_relaxed);
      if (only && begun != only) return false;
      const int64_t i = helper < 0 ? front(left) : back(left) - 1;
      if (!left_.compare_exchange_weak(left, helper < 0 ? left + kFront : left - 1, std::memory_order_acq_rel)) continue;
      task(context, i);
      if (begun) {
        ended_.store(begun, std::memory_order_release);
        busy_.clear(std::memory_order_release);
      } else {
        done_.fetch_add(1, std::memory_order_release);
      }
      return true;
    }
    return false;
  }

  void help(int64_t helper) {
    for (;;) {
      for (int looks = 0; looks < kSpins + kYields; ++looks) {
        if (take(helper))
          looks = 0;
        else
          looks < kSpins ? _mm_pause() : static_cast<void>(sched_yield());
      }
      std::unique_lock<std::mutex> lock(mutex_);
      num_asleep_.fetch_add(1);
      waken_.wait(lock, [&] { return some(left_.load()) && helper < num_wanted_.load(std::memory_order_relaxed); });
      num_asleep_.fetch_sub(1);
    }
  }

  void grow(int64_t wanted) {
    try {
      for (; num_helpers_ < wanted; ++num_helpers_) std::thread(&Pool::help, this, num_helpers_).detach();
    } catch (const std::system_error&) {  // no more threads are to be had: those that are there do
    }
  }

  std::atomic<uint64_t> left_{0};
  std::atomic<int64_t> done_{0}, num_wanted_{0};
  std::atomic<uint64_t> begun_{0}, ended_{0};  // numbers of jobs that `begin` offered: the latest job, else 0; the last one that is done
  std::atomic<void (*)(void*, int64_t)> task_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int> num_asleep_{0};
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  std::mutex mutex_;
  std::condition_variable waken_;
  int64_t num_helpers_ = 0;  // these two are the caller's
  uint64_t job_ = 0;
};

// Never destroyed: helpers wait in it until the process ends. A forked process has no helpers, whatever its copy says.
Pool*& the_pool() {
  static Pool* pool = [] {
    pthread_atfork(nullptr, nullptr, [] { the_pool() = new Pool; });
    return new Pool;
  }();
  return pool;
}

}  // namespace

void run(int64_t wanted, int64_t count, void (*task)(void*, int64_t), void* context) { the_pool()->run(wanted, count, task, context); }
uint64_t begin(void (*task)(void*, int64_t), void* context) { return the_pool()->begin(task, context); }
void finish(uint64_t begun) { the_pool()->finish(begun); }

}  // namespace threads

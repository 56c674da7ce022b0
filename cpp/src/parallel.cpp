#include "factormax/parallel.hpp"

#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(_MSC_VER)
#include <intrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace factormax {
namespace {

std::atomic<int> requested_threads{0};

// With fewer, another thread takes longer to join than it saves.
constexpr int kChunksPerThread = 4;

struct Job {
  const std::function<Worker()>* make_worker;
  std::int64_t count;
  std::int64_t chunk;
  int helpers;  // how many more workers may join
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::atomic<int> working{0};  // workers inside

  // Throws only for want of memory, mostly where a worker is made.
  void run(bool is_caller) noexcept {
    try {
      const Worker work = (*make_worker)();
      for (;;) {
        const std::int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
        if (begin >= count) return;
        const std::int64_t end = std::min(count, begin + chunk);
        for (std::int64_t i = begin; i < end; ++i) work(i, is_caller);
      }
    } catch (...) {
      failed.store(true);
      next.store(count);
    }
  }
};

inline void pause() {
#if defined(_MSC_VER) && (defined(_M_X64) || defined(_M_IX86))
  _mm_pause();
#elif defined(_MSC_VER) && defined(_M_ARM64)
  __yield();
#elif defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
  using clock = std::chrono::steady_clock;

 public:
  void run(Job& job, const std::function<void()>& idle) {
    const bool one = job.helpers == 1;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(job.helpers);
      jobs_.push_back(&job);
      posted_.fetch_add(1, std::memory_order_relaxed);
    }
    if (one) {
      wake_.notify_one();
    } else {
      wake_.notify_all();
    }
    job.run(true);
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));  // nobody joins any more
    lock.unlock();
    // The others are at their last index: waiting for them awake is faster than going to sleep.
    for (int spin = 0; spin < 4000 && job.working.load() > 0; ++spin) pause();
    lock.lock();
    while (job.working.load() > 0) {
      if (done_.wait_for(lock, std::chrono::milliseconds(50)) == std::cv_status::timeout) {
        lock.unlock();
        idle();
        lock.lock();
      }
    }
  }

 private:
  void grow(int wanted) {
    try {
      while (threads_ < wanted) {
        std::thread([this] { work(); }).detach();
        ++threads_;
      }
    } catch (const std::system_error&) {
      // No more threads to be had: the caller and those there are do the work.
    }
  }

  void work() {
    clock::time_point awake_until = clock::now();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      for (Job* candidate : jobs_) {
        if (candidate->helpers > 0 && candidate->next.load() < candidate->count) {
          job = candidate;
          break;
        }
      }
      if (job == nullptr) {
        const std::uint64_t seen = posted_.load(std::memory_order_relaxed);
        if (clock::now() < awake_until) {
          lock.unlock();
          linger(seen, awake_until);
          lock.lock();
        }
        if (posted_.load(std::memory_order_relaxed) == seen) wake_.wait(lock);
        continue;
      }
      --job->helpers;
      ++job->working;
      lock.unlock();
      job->run(false);
      awake_until = clock::now() + kLinger;
      lock.lock();
      if (--job->working == 0) done_.notify_all();
    }
  }

  // A batch is often followed by another, and a thread that sleeps takes long to wake. So one that
  // has just worked waits awake for the next job. It yields: whoever else has work goes first.
  void linger(std::uint64_t seen, clock::time_point end) const {
    while (posted_.load(std::memory_order_relaxed) == seen && clock::now() < end) {
      for (int spin = 0; spin < 16; ++spin) pause();
      std::this_thread::yield();
    }
  }

  static constexpr std::chrono::microseconds kLinger{500};

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<std::uint64_t> posted_{0};  // jobs so far
  std::vector<Job*> jobs_;
  int threads_ = 0;
};

// Never destroyed: its threads wait until the process ends. In a forked child they do not exist,
// so the child starts a pool of its own.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
#if !defined(_WIN32)
  static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool); });
  (void)registered;
#endif
  Pool* current = pool.load();
  if (current == nullptr) {
    Pool* fresh = new Pool;
    if (pool.compare_exchange_strong(current, fresh)) return *fresh;
    delete fresh;
  }
  return *current;
}

}  // namespace

void set_num_threads(int threads) { requested_threads.store(threads); }

int get_num_threads() {
  const int requested = requested_threads.load();
  if (requested > 0) return requested;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void parallel_for(std::int64_t count, const std::function<Worker()>& make_worker,
                  const std::function<void()>& idle, int most_threads) {
  if (count <= 0) return;
  const std::int64_t most = std::min<std::int64_t>(count, most_threads);
  const int threads = static_cast<int>(std::min<std::int64_t>(get_num_threads(), most));
  Job job;
  job.make_worker = &make_worker;
  job.count = count;
  job.chunk = std::max<std::int64_t>(1, count / (std::int64_t(threads) * 64));
  job.helpers = threads - 1;
  if (threads <= 1) {
    job.run(true);
  } else {
    the_pool().run(job, idle);
  }
  if (job.failed.load()) throw std::bad_alloc();
}

void share_chunks(int size, int length, void (*run)(const void* body, int begin, int end),
                  const void* body) {
  const auto chunk = [=](std::int64_t k, bool) {
    const int begin = static_cast<int>(k) * length;
    run(body, begin, std::min(size, begin + length));
  };
  const std::function<Worker()> make_worker = [&]() -> Worker { return std::cref(chunk); };
  const int count = (size + length - 1) / length;
  parallel_for(count, make_worker, [] {}, count / kChunksPerThread);
}

}  // namespace factormax

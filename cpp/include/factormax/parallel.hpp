// A pool of threads that survives a fork, and serves several callers at once.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>

namespace factormax {

// 0 restores the default, one thread per core.
void set_num_threads(int threads);
int get_num_threads();

using Worker = std::function<void(std::int64_t index, bool is_caller)>;

// Calls a worker for every index in [0, count), from up to get_num_threads() threads, the calling
// one among them. Every thread that takes part asks `make_worker` for a worker of its own. While
// it waits for the others, the caller calls `idle`. most_threads: no more take part.
void parallel_for(std::int64_t count, const std::function<Worker()>& make_worker,
                  const std::function<void()>& idle,
                  int most_threads = std::numeric_limits<int>::max());

// Calls run(body, begin, end) for ranges of `length` that make up [0, size), as above. `run` throws
// nothing.
void share_chunks(int size, int length, void (*run)(const void* body, int begin, int end),
                  const void* body);

}  // namespace factormax

// A pool of threads that survives a fork, and serves several callers at once.
#pragma once

#include <cstdint>
#include <functional>

namespace factormax {

// 0 restores the default, one thread a core.
void set_num_threads(int threads);
int get_num_threads();

// Calls body(index, is_caller) for every index in [0, count), from up to get_num_threads() threads,
// the calling one among them. While it waits for the others, the caller calls `idle`.
void parallel_for(std::int64_t count, const std::function<void(std::int64_t, bool)>& body,
                  const std::function<void()>& idle);

}  // namespace factormax

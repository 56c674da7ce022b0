// The memory that a thread keeps from one batch to the next.
#pragma once

#include <cstdint>

#include "factormax/span.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace factormax {

// A thread keeps its memory from one batch to the next, unless it is large. A batch begun from
// within another on the same thread (a signal handler that solves, or what float leaves to double)
// gets memory of its own.
class ThreadMemory {
 public:
  class Lease {
   public:
    Lease(ThreadMemory& memory, std::size_t bytes, bool all_used = true) {
      if (memory.busy_) {
        own_ = make(bytes, all_used);
        workspace_ = &own_;
        return;
      }
      memory.reserve(bytes, all_used);
      memory.busy_ = true;
      memory_ = &memory;
      workspace_ = &memory.workspace_;
    }
    ~Lease() {
      if (memory_ != nullptr) memory_->give_back();
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    // Null if the memory could not be had.
    Workspace* get() { return workspace_->valid() ? workspace_ : nullptr; }

   private:
    ThreadMemory* memory_ = nullptr;
    Workspace own_;
    Workspace* workspace_;
  };

 private:
  void give_back() {
    busy_ = false;
    if (capacity_ > kKeep) {
      workspace_ = Workspace();
      capacity_ = 0;
    }
  }

  void reserve(std::size_t bytes, bool all_used) {
    if (bytes > capacity_) {
      workspace_ = Workspace();
      workspace_ = make(bytes, all_used);
      capacity_ = workspace_.valid() ? bytes : 0;
    }
    workspace_.rewind();
  }

  // What is too large to keep is handed over by the system page by page, whenever it is touched for
  // the first time: up to a third of a solve. Large pages, of 2 MB, are far fewer. Where much is
  // never touched, such as room for structures that are never found, they would take up more.
  static Workspace make(std::size_t bytes, bool all_used) {
    Workspace workspace(bytes);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (all_used && bytes > kKeep && workspace.valid()) {
      const auto begin = reinterpret_cast<std::uintptr_t>(workspace.data());
      const std::uintptr_t first = (begin + kLargePage - 1) / kLargePage * kLargePage;
      const std::uintptr_t last = (begin + bytes) / kLargePage * kLargePage;
      madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // no more than a hint
    }
#endif
    return workspace;
  }

  static constexpr std::size_t kKeep = std::size_t(64) << 20;
  static constexpr std::uintptr_t kLargePage = std::uintptr_t(2) << 20;
  Workspace workspace_;
  std::size_t capacity_ = 0;
  bool busy_ = false;
};

// A function, since MinGW's linker makes two of an inline thread_local variable.
inline ThreadMemory& memory_of_thread() {
  thread_local ThreadMemory memory;
  return memory;
}

// A state and the memory it is laid out in. `lay_out` is called twice, to count and to lay out: one
// state serves both, for it is large, and making another would slow down a small solve. all_used:
// whether most of the memory will be.
template <class State>
class Leased {
 public:
  template <class LayOut>
  Leased(bool all_used, LayOut lay_out) : lease_(memory_of_thread(), bytes(lay_out), all_used) {
    if (Workspace* workspace = lease_.get()) lay_out(state, *workspace);
  }

  // False if the memory could not be had.
  bool valid() { return lease_.get() != nullptr; }

  State state;

 private:
  template <class LayOut>
  std::size_t bytes(LayOut lay_out) {
    Workspace counter;
    lay_out(state, counter);
    return counter.used();
  }

  ThreadMemory::Lease lease_;
};

}  // namespace factormax

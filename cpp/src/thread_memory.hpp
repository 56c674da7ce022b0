// The memory that a thread keeps from one batch to the next.
#pragma once

#include "factormax/span.hpp"

namespace factormax {

// A thread keeps its memory from one batch to the next, unless it is large. A batch begun from
// within another on the same thread (a signal handler that solves, or what float leaves to double)
// gets memory of its own.
class ThreadMemory {
 public:
  class Lease {
   public:
    Lease(ThreadMemory& memory, std::size_t bytes) {
      if (memory.busy_) {
        own_ = Workspace(bytes);
        workspace_ = &own_;
        return;
      }
      memory.reserve(bytes);
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

  void reserve(std::size_t bytes) {
    if (bytes > capacity_) {
      workspace_ = Workspace();
      workspace_ = Workspace(bytes);
      capacity_ = workspace_.valid() ? bytes : 0;
    }
    workspace_.rewind();
  }

  static constexpr std::size_t kKeep = std::size_t(64) << 20;
  Workspace workspace_;
  std::size_t capacity_ = 0;
  bool busy_ = false;
};

inline thread_local ThreadMemory memory;

// A state and the memory it is laid out in.
template <class State>
struct Leased {
  explicit Leased(std::size_t bytes) : lease(memory, bytes) {}
  ThreadMemory::Lease lease;
  State state;
};

}  // namespace factormax

// The GIL, signals, and the end of the interpreter.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

#include "factormax/parallel.hpp"

namespace factormax::python {

// When the interpreter ends, daemon threads may still be inside a solve. Up to Python 3.13, a
// thread that asks a finalising interpreter for the GIL is ended by pthread_exit, which unwinds the
// C++ stack like an exception that no function may stop: the process aborts. From 3.14 on, the
// thread hangs. Here it hangs in all versions. Everything that touches Python from within a solve
// goes through this file.
struct Ending {
  std::atomic<bool> begun{false};
  std::thread::id thread;  // the one that ends the interpreter: it alone still has the GIL

  bool excludes_me() const {
    return begun.load(std::memory_order_acquire) && std::this_thread::get_id() != thread;
  }
};
inline Ending ending;

// Registered with atexit, which comes before the interpreter begins to refuse the GIL. Whatever
// the ending thread still solves, it solves by itself.
inline void begin_ending() {
  if (ending.begun.load()) return;
  ending.thread = std::this_thread::get_id();
  ending.begun.store(true, std::memory_order_release);
  set_num_threads(1);
}

[[noreturn]] inline void wait_for_the_end() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

// Calls a Python function that may end the calling thread.
template <class Function>
auto survive(Function function) {
#if defined(__GLIBCXX__)
  try {
    return function();
  } catch (abi::__forced_unwind&) {
    wait_for_the_end();
  }
#else
  return function();
#endif
}

class GilAcquired {
 public:
  GilAcquired() {
    if (ending.excludes_me()) wait_for_the_end();
    state_ = survive([] { return PyGILState_Ensure(); });
  }
  ~GilAcquired() { PyGILState_Release(state_); }
  GilAcquired(const GilAcquired&) = delete;
  GilAcquired& operator=(const GilAcquired&) = delete;

 private:
  PyGILState_STATE state_;
};

template <class Function>
void without_gil(Function function) {
  PyThreadState* state = PyEval_SaveThread();
  std::exception_ptr error;
  try {
    function();
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  if (ending.excludes_me()) wait_for_the_end();
  survive([&] { return PyEval_RestoreThread(state); });
  if (error) std::rethrow_exception(error);
}

// Asks Python about a pending Ctrl-C a few times a second. A thread that can no longer hand over
// its answer stops.
inline bool poll_signals() {
  using clock = std::chrono::steady_clock;
  thread_local clock::time_point last = clock::now();
  const clock::time_point now = clock::now();
  if (now - last < std::chrono::milliseconds(100)) return false;
  last = now;
  if (ending.excludes_me()) return true;
  const GilAcquired gil;
  return PyErr_CheckSignals() != 0;
}

}  // namespace factormax::python

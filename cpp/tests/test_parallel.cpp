// The pool of threads: every index once, several callers at once, after a fork, and stopping.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "factormax/parallel.hpp"
#include "solution.hpp"

namespace {

using namespace factormax;

void nothing() {}

// Runs `count` indices; returns how often each was met.
std::vector<int> visits(std::int64_t count) {
  std::unique_ptr<std::atomic<int>[]> met(new std::atomic<int>[count]());
  const auto make_worker = [&]() -> Worker { return [&](std::int64_t i, bool) { ++met[i]; }; };
  parallel_for(count, make_worker, nothing);
  return {met.get(), met.get() + count};
}

bool each_once(const std::vector<int>& met) {
  return std::all_of(met.begin(), met.end(), [](int times) { return times == 1; });
}

void test_each_index_once() {
  for (const int threads : {1, 2, 3, 4, 9}) {
    set_num_threads(threads);
    CHECK(get_num_threads() == threads);
    for (const std::int64_t count : {0, 1, 2, 3, 7, 33, 100, 1001, 40000}) {
      test::current_case =
          std::to_string(count) + " indices, " + std::to_string(threads) + " threads";
      CHECK(each_once(visits(count)));
    }
  }
  set_num_threads(0);
  CHECK(get_num_threads() >= 1);
  CHECK(each_once(visits(500)));
}

// A worker belongs to one thread, only one of them is the caller's, and there are no more of them
// than the threads asked for.
void test_workers() {
  test::current_case = "workers";
  set_num_threads(4);
  std::mutex mutex;
  std::set<std::thread::id> makers;
  int made = 0, moved = 0, wrong_caller = 0;
  const std::thread::id here = std::this_thread::get_id();
  const auto make_worker = [&]() -> Worker {
    const std::thread::id owner = std::this_thread::get_id();
    const std::lock_guard<std::mutex> lock(mutex);
    ++made;
    makers.insert(owner);
    return [&, owner](std::int64_t, bool is_caller) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      const std::lock_guard<std::mutex> guard(mutex);
      moved += std::this_thread::get_id() != owner;
      wrong_caller += is_caller != (owner == here);
    };
  };
  parallel_for(100, make_worker, nothing);
  CHECK(moved == 0);
  CHECK(wrong_caller == 0);
  CHECK(made >= 1 && made <= 4 && makers.size() == static_cast<std::size_t>(made));
  CHECK(makers.count(here) == 1);
  set_num_threads(0);
}

void test_many_callers() {
  test::current_case = "many callers";
  set_num_threads(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&wrong, c] {
      for (int repeat = 0; repeat < 60; ++repeat) wrong += !each_once(visits(10 * c + repeat));
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
  set_num_threads(0);
}

// From inside a worker: each inner loop is complete.
void test_nested() {
  test::current_case = "nested";
  set_num_threads(3);
  std::atomic<int> wrong{0};
  const auto make_worker = [&]() -> Worker {
    return [&](std::int64_t i, bool) { wrong += !each_once(visits(i)); };
  };
  parallel_for(40, make_worker, nothing);
  CHECK(wrong == 0);
  set_num_threads(0);
}

// While the caller waits for a helper, `idle` is called.
void test_idle() {
  test::current_case = "idle";
  set_num_threads(2);
  std::atomic<bool> helper_began{false}, idle_seen{false};
  const auto soon = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto wait_for = [&](const std::atomic<bool>& flag) {
    while (!flag && std::chrono::steady_clock::now() < soon) std::this_thread::yield();
  };
  const auto make_worker = [&]() -> Worker {
    return [&](std::int64_t, bool is_caller) {
      if (is_caller) {
        wait_for(helper_began);
      } else {
        helper_began = true;
        wait_for(idle_seen);
      }
    };
  };
  parallel_for(2, make_worker, [&] { idle_seen = true; });
  CHECK(helper_began);
  CHECK(idle_seen);
  set_num_threads(0);
}

// The threads of the pool do not exist in a child, nor does what they were doing.
[[maybe_unused]] void test_fork() {
  test::current_case = "fork";
  set_num_threads(4);
  CHECK(each_once(visits(1000)));
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) visits(200);
  });
  for (int repeat = 0; repeat < 5; ++repeat) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a deadlock ends the child, and fails the test
      bool right = true;
      for (int k = 0; k < 20; ++k) right &= each_once(visits(1000));
      _exit(right ? 0 : 1);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(each_once(visits(1000)));
  }
  stop = true;
  busy.join();
  set_num_threads(0);
}

// ---- Control -------------------------------------------------------------------------

std::atomic<int> polls{0};
std::atomic<int> polls_allowed{0};
std::thread::id polling_thread;
std::atomic<int> polls_elsewhere{0};

bool poll() {
  polls_elsewhere += std::this_thread::get_id() != polling_thread;
  return ++polls > polls_allowed;
}

// With steps far too short, ADMM takes for ever; the compact dual is stopped between instances.
void test_stop(Method method, int threads) {
  test::current_case = "stop, " + std::to_string(threads) + " threads";
  set_num_threads(threads);
  const int batch = 50;
  test::Random random(1);
  test::Graph<double> graph = test::matching<double>(8, 8, RowKind::equality);
  graph.normal_scores(random, batch, 1);
  Options options;
  options.tol = 0;
  options.step_size = 1e-7;
  options.max_iter = std::numeric_limits<int>::max();
  for (const int allowed : {0, 1, 7}) {
    test::Solution<double> out(graph, batch);
    Control control;
    control.poll = &poll;
    polls = 0;
    polls_allowed = allowed;
    polling_thread = std::this_thread::get_id();
    FoundStructures found;
    solve_batch<double>(graph.problem(), batch, method, options, {}, out.outputs(), found, control);
    CHECK(control.stop && !control.out_of_memory);
    int untouched = 0;
    for (const int status : out.status) untouched += status == -77;
    CHECK(allowed > 0 || threads > 1 || untouched == batch);
    CHECK(untouched > 0);
    for (int i = 0; i < batch; ++i) {
      const bool finished = out.status_of(i) == Status::converged;
      const bool interrupted = out.status_of(i) == Status::interrupted;
      CHECK(finished || interrupted || out.status[i] == -77);
      CHECK(method != Method::admm || !finished);
    }
  }
  CHECK(polls_elsewhere == 0);
  set_num_threads(0);
}

// If told to stop before it begins, a batch writes nothing; nor does its gradient.
void test_stopped_before() {
  test::current_case = "stopped before";
  test::Graph<double> graph = test::matching<double>(3, 3, RowKind::equality);
  graph.eta_u.assign(9, 0.5);
  test::Solution<double> out(graph, 4);
  Control control;
  control.stop = true;
  FoundStructures found;
  solve_batch<double>(graph.problem(), 4, Method::compact, Options(), {}, out.outputs(), found,
                      control);
  for (const int status : out.status) CHECK(status == -77);
}

}  // namespace

int main() {
  test_each_index_once();
  test_workers();
  test_many_callers();
  test_nested();
  test_idle();
#ifndef __SANITIZE_THREAD__  // it can't follow a child that starts threads
  test_fork();
#endif
  test_stop(Method::admm, 1);
  test_stop(Method::admm, 4);
  test_stop(Method::compact, 1);  // with more threads, the others may be done before the first poll
  test_stopped_before();
  return test::finish();
}

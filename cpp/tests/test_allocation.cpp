// The kernels allocate nothing: a call takes as much memory for many instances as for a few. And
// they read nothing that they did not write: whatever the memory holds, the answer is the same.
#include <cstdlib>
#include <new>
#include <thread>

#include "factormax/parallel.hpp"
#include "solution.hpp"

namespace {

std::atomic<long> allocations{0};
std::atomic<int> filler{0};  // what fresh memory holds

void* allocate(std::size_t bytes) noexcept {
  ++allocations;
  void* memory = std::malloc(bytes > 0 ? bytes : 1);
  if (memory != nullptr) std::memset(memory, filler, bytes);
  return memory;
}

void* allocate_or_throw(std::size_t bytes) {
  void* memory = allocate(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate_or_throw(bytes); }
void* operator new[](std::size_t bytes) { return allocate_or_throw(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using namespace factormax;
using test::Graph;
using test::Solution;

// Overlapping factors of every kind, pairs, a mask, large scores, and now and then no solution.
template <class T>
Graph<T> graph_of(int batch) {
  Graph<T> graph = test::matching<T>(5, 5, RowKind::equality);
  graph.or_out({{0}, {6, true}, {12}, {18}});
  graph.row({{1}, {7}, {13, true}}, {T(1), T(2), T(1.5)}, T(2), RowKind::inequality);
  for (int j = 0; j < 20; ++j) graph.pair({j, j % 3 == 0}, {j + 5, j % 4 == 0});
  test::Random random(1);
  graph.normal_scores(random, batch, 1);
  graph.mask.assign(std::size_t(batch) * graph.n, 1);
  for (int i = 0; i < batch; ++i) {
    T* eta = &graph.eta_u[std::size_t(i) * graph.n];
    std::uint8_t* mask = &graph.mask[std::size_t(i) * graph.n];
    if (i % 3 == 1) mask[3] = 0;
    if (i % 5 == 2) std::fill_n(mask, 5, std::uint8_t(0));  // the first row has nothing left
    if (i % 4 == 3) std::transform(eta, eta + graph.n, eta, [](T s) { return 100 * s; });
  }
  return graph;
}

// The allocations of a solve and of its gradient.
template <class T>
long count(Graph<T>& graph, int batch, Method method) {
  Solution<T> out(graph, batch);
  const Problem<T> problem = graph.problem();
  const std::vector<T> ones(std::size_t(batch) * graph.n, T(1)), ones_v(graph.num_pairs(), T(1));
  std::vector<T> grad_u(ones.size()), grad_v(std::size_t(batch) * graph.num_pairs());
  std::vector<double> residual(batch);
  BatchGradients<T> grads{{ones.data(), graph.n},
                          {ones_v.data(), 0},
                          {out.var_side.data(), out.n},
                          {out.row_side.data(), out.dual},
                          out.status.data(),
                          {grad_u.data(), graph.n},
                          {grad_v.data(), graph.num_pairs()},
                          residual.data()};
  Options options;
  options.max_iter = 300;
  Control control;
  const long before = allocations;
  FoundStructures found;
  solve_batch<T>(problem, batch, method, options, {}, out.outputs(), found, control);
  vjp_batch<T>(problem, batch, grads, control);
  return allocations - before;
}

// The same graph twice in one, side by side: components.
template <class T>
Graph<T> twice(const Graph<T>& once, int batch) {
  Graph<T> graph = once;
  graph.n = 2 * once.n;
  const int rows = once.num_rows(), entries = once.num_entries();
  for (int k = 0; k < entries; ++k) graph.col.push_back(once.col[k] + once.n);
  for (int r = 0; r < rows; ++r) graph.row_ptr.push_back(once.row_ptr[r + 1] + entries);
  for (int f = 0; f < once.num_blocks(); ++f) {
    graph.block_ptr.push_back(once.block_ptr[f + 1] + rows);
  }
  for (const int j : once.pair_var) graph.pair_var.push_back(j + once.n);
  const auto append = [](auto& to, const auto& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(graph.coef, once.coef);
  append(graph.rhs, once.rhs);
  append(graph.kind, once.kind);
  append(graph.block_kind, once.block_kind);
  append(graph.pair_negated, once.pair_negated);
  const auto repeat = [&](auto& to, const auto& from, int columns) {
    to.clear();
    for (int i = 0; i < 2 * batch; ++i) {
      const auto begin = from.begin() + std::ptrdiff_t(i / 2) * columns;
      to.insert(to.end(), begin, begin + columns);
    }
  };
  repeat(graph.mask, once.mask, once.n);
  repeat(graph.eta_u, once.eta_u, once.n);
  repeat(graph.eta_v, once.eta_v, once.num_pairs());
  graph.split();
  return graph;
}

template <class T>
void test_components(Method method) {
  test::current_case = std::string("components, ") + (sizeof(T) == 4 ? "float" : "double") +
                       (method == Method::admm ? ", ADMM" : ", compact");
  const int batch = test::times(200);
  Graph<T> few = twice(graph_of<T>(4), 4), many = twice(graph_of<T>(batch), batch);
  CHECK(few.components != nullptr && few.components->num_kinds() == 1);
  set_num_threads(1);
  count(few, 4, method);  // the thread keeps its memory
  const long once = count(few, 4, method);
  CHECK(once < 30);
  CHECK(count(many, batch, method) == once);
  set_num_threads(0);
}

template <class T>
void test_count(Method method) {
  test::current_case = std::string(sizeof(T) == 4 ? "float" : "double") +
                       (method == Method::admm ? ", ADMM" : ", compact");
  const int batch = test::times(200);
  Graph<T> few = graph_of<T>(4), many = graph_of<T>(batch);
  set_num_threads(1);
  count(few, 4, method);  // the thread keeps its memory
  const long once = count(few, 4, method);
  CHECK(once < 20);
  CHECK(count(many, batch, method) == once);

  // A thread that takes part allocates once per call; how many do is up to chance.
  const int threads = 4;
  set_num_threads(threads);
  for (int repeat = 0; repeat < 3; ++repeat) {
    const long all = count(many, batch, method);
    if (repeat > 0) CHECK(all <= threads * (once + 4));
  }
  set_num_threads(0);
}

template <class T>
void test_fresh_memory(Method method) {
  test::current_case = std::string("fresh memory, ") + (sizeof(T) == 4 ? "float" : "double") +
                       (method == Method::admm ? ", ADMM" : ", compact");
  set_num_threads(1);
  const int batch = 12;
  Options options;
  options.max_iter = 300;
  // A thread begins with memory of its own: zeros, NaN, or large numbers.
  const auto solve_on_fresh = [&](Graph<T>& graph, int fill, Solution<T>& out,
                                  test::Gradient<T>& grad) {
    std::thread([&] {
      filler = fill;
      test::solve_into(graph, method, options, out);
      const std::vector<T> ones(std::size_t(batch) * graph.n, T(1));
      const std::vector<T> ones_v(std::size_t(batch) * graph.num_pairs(), T(1));
      grad = test::vjp(graph, out, batch, ones, ones_v);
      filler = 0;
    }).join();
  };
  Graph<T> graph = graph_of<T>(batch);
  Solution<T> zeros(graph, batch);
  test::Gradient<T> zeros_grad;
  solve_on_fresh(graph, 0, zeros, zeros_grad);
  for (const int fill : {0xff, 0x7f, 0x3f}) {
    Solution<T> other(graph, batch);
    test::Gradient<T> other_grad;
    solve_on_fresh(graph, fill, other, other_grad);
    CHECK(other.same_as(zeros));
    CHECK(other_grad.eta_u == zeros_grad.eta_u && other_grad.eta_v == zeros_grad.eta_v);
    CHECK(other_grad.residual == zeros_grad.residual);
  }
  set_num_threads(0);
}

// A lack of memory is reported, not thrown.
void test_workspace() {
  test::current_case = "workspace";
  Workspace counter, memory(1000);
  CHECK(!counter.valid() && memory.valid());
  const Span<double> a = memory.take<double>(3), b = memory.take<double>(1);
  CHECK(a.size == 3 && b.data - a.data >= 3);
  CHECK(reinterpret_cast<std::uintptr_t>(a.data) % 64 == 0);
  CHECK(reinterpret_cast<std::uintptr_t>(b.data) % 64 == 0);
  counter.take<double>(3);
  counter.take<double>(1);
  CHECK(counter.used() == memory.used());
}

}  // namespace

int main() {
  for (const Method method : {Method::compact, Method::admm}) {
    test_count<double>(method);
    test_count<float>(method);
    test_components<double>(method);
    test_components<float>(method);
    test_fresh_memory<double>(method);
    test_fresh_memory<float>(method);
  }
  test_workspace();
  return test::finish();
}

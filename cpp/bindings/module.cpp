// The only file that knows Python. It checks what it is given, so that no call can read or write
// out of bounds, releases the GIL, and calls the core.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

#include "factormax/batch.hpp"
#include "factormax/local_search.hpp"
#include "factormax/parallel.hpp"
#include "factormax/structured/oracle.hpp"
#include "factormax/structured/row_form.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using factormax::Batched;
using factormax::Problem;

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using OptionalMatrix = std::optional<Matrix<T>>;

void require(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

// The shape must be (batch, columns), or (1, columns) if the array may be shared.
template <class T>
Batched<T> batched(const Matrix<T>& array, std::size_t batch, std::size_t columns, const char* name,
                   bool may_share = true) {
  const bool fits =
      array.shape(1) == columns && (array.shape(0) == batch || (may_share && array.shape(0) == 1));
  if (!fits) {
    throw nb::value_error((std::string(name) + " has the wrong shape").c_str());
  }
  return {array.data(), array.shape(0) == batch ? static_cast<std::int64_t>(columns) : 0};
}

template <class T>
void require_range(const T* values, std::size_t count, T end, const char* name) {
  T low = 0, high = 0;
  for (std::size_t k = 0; k < count; ++k) {
    low = std::min(low, values[k]);
    high = std::max(high, values[k]);
  }
  if (low < 0 || (count > 0 && high >= end)) {
    throw nb::value_error((std::string(name) + " holds an index out of range").c_str());
  }
}

void require_offsets(const Vector<const std::int32_t>& ptr, std::size_t end, const char* name) {
  const std::size_t size = ptr.shape(0);
  bool valid = size > 0 && ptr(0) == 0 && static_cast<std::size_t>(ptr(size - 1)) == end;
  for (std::size_t k = 1; valid && k < size; ++k) valid = ptr(k - 1) <= ptr(k);
  if (!valid) throw nb::value_error((std::string(name) + " is not a list of offsets").c_str());
}

// Whether the shape of a structured factor is one, and agrees with its variables and scores.
bool shape_fits(factormax::OracleKind kind, factormax::Span<const std::int32_t> shape,
                std::int64_t vars, std::int64_t scores) {
  using factormax::OracleKind;
  const auto sized = [&](int size) {
    return shape.size == size &&
           std::all_of(shape.begin(), shape.end(), [](int s) { return s >= 0 && s < (1 << 20); });
  };
  const auto at = [&](int i) { return std::int64_t(shape[i]); };
  switch (kind) {
    case OracleKind::tree:
    case OracleKind::projective_tree:
      return sized(2) && at(0) > 0 && vars == at(0) * at(0) && scores == 0;
    case OracleKind::matching:
      return sized(2) && 0 < at(0) && at(0) <= at(1) && vars == at(0) * at(1) && scores == 0;
    case OracleKind::sequence: {
      if (!sized(5) || at(0) < 1 || at(1) < 1 || vars != at(0) * at(1)) return false;
      const std::int64_t steps = at(2) != 0 ? at(0) - 1 : 1;
      const std::int64_t ends = (at(3) != 0) + (at(4) != 0);
      return scores == steps * at(1) * at(1) + ends * at(1);
    }
    case OracleKind::sequence_budget:
      return sized(3) && at(0) > 0 && vars == at(0) && scores == (at(1) != 0 ? at(0) - 1 : 1);
    case OracleKind::table: {
      std::int64_t sum = 0, product = 1;
      if (shape.size < 1) return false;
      for (const int s : shape) {
        if (s < 1 || (product *= s) >= (std::int64_t(1) << 30)) return false;
        sum += s;
      }
      return vars == sum && scores == product;
    }
    case OracleKind::callback:
      return sized(1) && vars > 0 && scores == at(0);
  }
  return false;
}

// The index arrays of a compiled graph, `factormax.compiled.CompiledGraph`: checked once, kept
// alive, and never written to.
struct Graph {
  int num_vars = 0, num_links = 0;
  Vector<const std::int32_t> row_ptr;
  Vector<const std::int32_t> col;
  Vector<const std::int8_t> row_kind;
  Matrix<const std::int32_t> pairs;
  Matrix<const std::uint8_t> pair_negated;
  Vector<const std::int32_t> block_ptr;
  Vector<const std::int8_t> block_kind;
  Vector<const std::uint8_t> block_isolated;
  Vector<const std::int8_t> oracle_kind;
  Vector<const std::uint8_t> oracle_linked;
  Vector<const std::int32_t> oracle_var_ptr;
  Vector<const std::int32_t> oracle_var;
  Vector<const std::int32_t> oracle_shape_ptr;
  Vector<const std::int32_t> oracle_shape;
  Vector<const std::int32_t> oracle_score_ptr;

  void check() {
    const std::size_t limit = std::size_t(1) << 30, count = pairs.shape(0);
    require(row_ptr.shape(0) > 0 && block_ptr.shape(0) > 0, "a list of offsets is empty");
    const std::size_t rows = row_ptr.shape(0) - 1, blocks = block_kind.shape(0);
    const std::int32_t entries = row_ptr(rows);
    require(num_vars >= 0 && std::size_t(num_vars) < limit && rows + count < limit &&
                entries >= 0 && entries + 2 * count < limit,
            "the graph is too large: the core indexes with 32 bits");
    require_offsets(row_ptr, static_cast<std::size_t>(entries), "row_ptr");
    require(col.shape(0) == std::size_t(entries), "col has the wrong shape");
    require_range(col.data(), col.size(), num_vars, "col");
    require(row_kind.shape(0) == rows, "row_kind has the wrong shape");
    require(block_ptr.shape(0) == blocks + 1, "block_ptr has the wrong shape");
    require_offsets(block_ptr, rows, "block_ptr");
    require(pairs.shape(1) == 2 && pair_negated.shape(1) == 2 && pair_negated.shape(0) == count,
            "pairs have the wrong shape");
    require(block_isolated.shape(0) == blocks + count, "block_isolated has the wrong shape");
    require_range(pairs.data(), pairs.size(), num_vars, "pairs");
    for (std::size_t f = 0; f < blocks; ++f) {
      const int length = block_ptr(f + 1) - block_ptr(f);
      const auto kind = static_cast<factormax::BlockKind>(block_kind(f));
      const int last = block_ptr(f + 1) - 1;
      bool fits = length >= 1;
      if (kind == factormax::BlockKind::row) {
        fits = length == 1;
      } else if (kind == factormax::BlockKind::band) {  // of the same entries
        fits =
            length == 2 && row_ptr(last) - row_ptr(last - 1) == row_ptr(last + 1) - row_ptr(last);
      } else if (kind != factormax::BlockKind::or_out) {
        fits = false;
      }
      require(fits, "a block has the wrong kind or number of rows");
    }
    check_structured();
  }

  // Without the numbers of a batch.
  template <class T>
  factormax::Structured<T> structured() const {
    factormax::Structured<T> s;
    s.count = static_cast<int>(oracle_kind.shape(0));
    s.num_links = num_links;
    s.num_scores = oracle_score_ptr(oracle_kind.shape(0));
    s.kind = oracle_kind.data();
    s.linked = oracle_linked.data();
    s.var_ptr = oracle_var_ptr.data();
    s.var = oracle_var.data();
    s.shape_ptr = oracle_shape_ptr.data();
    s.shape = oracle_shape.data();
    s.score_ptr = oracle_score_ptr.data();
    return s;
  }

 private:
  void check_structured() {
    const std::size_t count = oracle_kind.shape(0);
    require(oracle_linked.shape(0) == count && oracle_var_ptr.shape(0) == count + 1 &&
                oracle_shape_ptr.shape(0) == count + 1 && oracle_score_ptr.shape(0) == count + 1,
            "an array of the structured factors has the wrong shape");
    require_offsets(oracle_var_ptr, oracle_var.shape(0), "oracle_var_ptr");
    require_offsets(oracle_shape_ptr, oracle_shape.shape(0), "oracle_shape_ptr");
    const std::int32_t scores = oracle_score_ptr(count);
    require(scores >= 0, "oracle_score_ptr is not a list of offsets");
    require_offsets(oracle_score_ptr, static_cast<std::size_t>(scores), "oracle_score_ptr");
    require_range(oracle_var.data(), oracle_var.size(), num_vars, "oracle_var");
    const factormax::Structured<double> s = structured<double>();
    std::vector<bool> taken(count > 0 ? num_vars : 0);
    for (int f = 0; f < s.count; ++f) {
      require(s.kind[f] >= 0 && s.kind[f] <= static_cast<int>(factormax::OracleKind::callback) &&
                  shape_fits(static_cast<factormax::OracleKind>(s.kind[f]), s.shapes(f),
                             s.vars(f).size, s.scores(f)),
              "a structured factor has the wrong kind or shape");
      if (s.linked[f] != 0) num_links += s.vars(f).size;
      for (const std::int32_t j : s.vars(f)) {
        require(s.linked[f] != 0 || !taken[j], "two hubs share a variable");
        if (s.linked[f] == 0) taken[j] = true;
      }
    }
  }
};

// The numbers of a batch, as they come from `factormax.engine`.
template <class T>
struct Batch {
  Matrix<const T> coef, rhs;
  Matrix<const double> oracle_param;
  OptionalMatrix<const std::uint8_t> mask;
  Matrix<const T> eta_u, eta_v;
};

template <class T>
Problem<T> make_problem(const Graph& g, const Batch<T>& b) {
  const std::size_t batch = b.eta_u.shape(0), n = g.num_vars;
  const std::size_t rows = g.row_ptr.shape(0) - 1, entries = g.row_ptr(rows);
  Problem<T> p;
  p.num_vars = g.num_vars;
  p.num_rows = static_cast<int>(rows);
  p.num_entries = static_cast<int>(entries);
  p.num_pairs = static_cast<int>(g.pairs.shape(0));
  p.num_blocks = p.num_factors = static_cast<int>(g.block_kind.shape(0));
  p.row_ptr = g.row_ptr.data();
  p.col = g.col.data();
  p.kind = g.row_kind.data();
  p.pair_var = g.pairs.data();
  p.pair_negated = g.pair_negated.data();
  p.block_ptr = g.block_ptr.data();
  p.block_kind = g.block_kind.data();
  p.block_isolated = g.block_isolated.data();
  p.structured = g.structured<T>();
  p.structured.param = batched(b.oracle_param, batch, g.oracle_kind.shape(0), "oracle_param");
  p.coef = batched(b.coef, batch, entries, "coef");
  p.rhs = batched(b.rhs, batch, rows, "rhs");
  if (b.mask) p.mask = batched(*b.mask, batch, n, "mask");
  p.eta_u = batched(b.eta_u, batch, n, "eta_u");
  p.eta_v = batched(b.eta_v, batch, p.num_scores(), "eta_v");
  return p;
}

// ---- The GIL, and the end of the interpreter
// -----------------------------------------------------

// When the interpreter ends, daemon threads may still be inside a solve. Up to Python 3.13 a thread
// that asks a finalising interpreter for the GIL is ended by pthread_exit, which unwinds the stack
// of C++ like an exception that no function may stop: the process aborts. From 3.14 on it hangs.
// Here it hangs in all versions. All that touches Python from within a solve goes through this
// part.
struct Ending {
  std::atomic<bool> begun{false};
  std::thread::id thread;  // the one that ends the interpreter: it alone still has the GIL

  bool excludes_me() const {
    return begun.load(std::memory_order_acquire) && std::this_thread::get_id() != thread;
  }
};
Ending ending;

// Registered with atexit, which comes before the interpreter begins to refuse the GIL. Whatever
// the ending thread still solves, it solves by itself.
void begin_ending() {
  if (ending.begun.load()) return;
  ending.thread = std::this_thread::get_id();
  ending.begun.store(true, std::memory_order_release);
  factormax::set_num_threads(1);
}

[[noreturn]] void wait_for_the_end() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

// Calls a function of Python's that may end the calling thread.
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

// Asks Python for a pending Ctrl-C a few times a second. A thread that could no longer hand its
// answer over stops.
bool poll_signals() {
  using clock = std::chrono::steady_clock;
  thread_local clock::time_point last = clock::now();
  const clock::time_point now = clock::now();
  if (now - last < std::chrono::milliseconds(100)) return false;
  last = now;
  if (ending.excludes_me()) return true;
  const GilAcquired gil;
  return PyErr_CheckSignals() != 0;
}

// ---- Oracles of the user's own
// -------------------------------------------------------------------

// What Python functions raise, kept until the solve has ended. All of it under the GIL.
struct PythonOracle {
  nb::object function;
  nb::object* raised = nullptr;  // shared by all: the first exception
};

// function(instance, eta_u, eta_v) -> (m, n), arrays of float64, or None if there is no structure.
int call_python(const double* eta_u, std::int64_t d, const double* eta_v, std::int64_t s, double* m,
                double* n, void* context, std::int64_t instance) {
  const GilAcquired gil;
  auto* oracle = static_cast<PythonOracle*>(context);
  if (oracle->raised->is_valid()) return -1;
  try {
    // Copies: the function may keep what it is given.
    const auto array = [](const double* data, std::int64_t size) {
      auto* copy = new double[static_cast<std::size_t>(std::max<std::int64_t>(size, 1))];
      std::copy(data, data + size, copy);
      nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<double*>(p); });
      return nb::ndarray<nb::numpy, double, nb::ndim<1>>(copy, {static_cast<std::size_t>(size)},
                                                         owner);
    };
    const nb::object given[] = {nb::cast(instance), nb::cast(array(eta_u, d)),
                                nb::cast(array(eta_v, s))};
    PyObject* arguments[] = {given[0].ptr(), given[1].ptr(), given[2].ptr()};
    const auto answer = nb::steal(survive([&] {
      return PyObject_Vectorcall(oracle->function.ptr(), arguments, std::size(arguments), nullptr);
    }));
    if (!answer.is_valid()) throw nb::python_error();
    if (answer.is_none()) return 1;
    const auto parts = nb::cast<nb::tuple>(answer);
    const auto structure = nb::cast<Vector<const double>>(parts[0]);
    const auto features = nb::cast<Vector<const double>>(parts[1]);
    require(structure.size() == static_cast<std::size_t>(d) &&
                features.size() == static_cast<std::size_t>(s),
            "the answer of an oracle has the wrong shape");
    std::copy(structure.data(), structure.data() + d, m);
    std::copy(features.data(), features.data() + s, n);
    return 0;
  } catch (nb::python_error& error) {
    *oracle->raised = nb::borrow(error.value());
  } catch (const std::exception& error) {
    nb::object type = nb::borrow(PyExc_ValueError);
    *oracle->raised = type(error.what());
  }
  return -1;
}

// One entry a structured factor: None, a Python function, or (address, data) of a C function.
class Callbacks {
 public:
  Callbacks(const nb::object& given, int count) : faults_(static_cast<std::size_t>(count)) {
    if (given.is_none()) return;
    const auto list = nb::cast<nb::list>(given);
    require(static_cast<int>(nb::len(list)) == count, "callbacks: one for each structured factor");
    functions_.resize(static_cast<std::size_t>(count));
    python_.resize(static_cast<std::size_t>(count));
    for (int f = 0; f < count; ++f) {
      const nb::object entry = nb::borrow(list[f]);
      factormax::CallbackFunction& function = functions_[f];
      function.fault = &faults_[f];
      if (entry.is_none()) continue;
      if (nb::isinstance<nb::tuple>(entry)) {
        const auto pair = nb::cast<nb::tuple>(entry);
        function.call =
            reinterpret_cast<factormax::CallbackFunction::Call>(nb::cast<std::uintptr_t>(pair[0]));
        function.context = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(pair[1]));
      } else {
        python_[f] = {entry, &raised_};
        function.call = &call_python;
        function.context = &python_[f];
      }
    }
  }

  template <class T>
  void give_to(Problem<T>& p) const {
    for (int f = 0; f < p.structured.count; ++f) {
      if (p.structured.kind[f] != static_cast<int>(factormax::OracleKind::callback)) continue;
      require(!functions_.empty() && functions_[f].call != nullptr,
              "a structured factor of the user's own has no callback");
    }
    p.structured.callback = functions_.empty() ? nullptr : functions_.data();
  }

  // The first factor whose answer was no structure, and what was wrong with it.
  std::pair<int, int> fault() const {
    for (std::size_t f = 0; f < faults_.size(); ++f) {
      if (faults_[f].load() != static_cast<int>(factormax::CallbackFault::none)) {
        return {static_cast<int>(f), faults_[f].load()};
      }
    }
    return {-1, 0};
  }

  void raise_if_raised() const {
    if (raised_.is_valid()) {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised_.ptr())), raised_.ptr());
      throw nb::python_error();
    }
  }

 private:
  std::vector<factormax::CallbackFunction> functions_;
  std::vector<PythonOracle> python_;
  std::vector<std::atomic<int>> faults_;
  nb::object raised_;
};

template <class U>
nb::ndarray<nb::numpy, U, nb::ndim<1>> as_array(std::vector<U>&& values) {
  auto* kept = new std::vector<U>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<U>*>(p); });
  return {kept->data(), {kept->size()}, owner};
}

// The lists of structures must be as long as their counts say, and point into their factors.
template <class T>
void require_structures(const Problem<T>& p, std::size_t batch,
                        const Vector<const std::int32_t>& count, const Vector<const double>& prob,
                        const Vector<const std::int32_t>& on,
                        const Vector<const std::int32_t>& features,
                        const Vector<const double>& dense) {
  const auto sizes = factormax::structure_sizes(p);
  require(count.shape(0) == batch * sizes.size(), "count has the wrong shape");
  std::size_t structures = 0, variables = 0, scores = 0, numbers = 0;
  bool valid = true;
  const auto inside = [](const Vector<const std::int32_t>& list, std::size_t begin,
                         std::size_t length, int end) {
    if (begin + length > list.shape(0)) return false;
    return std::all_of(list.data() + begin, list.data() + begin + length,
                       [&](std::int32_t j) { return j >= -1 && j < end; });
  };
  for (std::size_t k = 0; valid && k < count.shape(0); ++k) {
    const std::size_t f = k % sizes.size(), here = static_cast<std::size_t>(count(k));
    const int vars = p.structured.vars(static_cast<int>(f)).size;
    valid = count(k) >= 0 && count(k) <= vars + 1;
    valid = valid && inside(on, variables, here * sizes[f].slots, vars);
    valid = valid && inside(features, scores, here * sizes[f].feature_slots,
                            p.structured.scores(static_cast<int>(f)));
    structures += here;
    variables += here * sizes[f].slots;
    scores += here * sizes[f].feature_slots;
    numbers += here * sizes[f].dense;
  }
  require(valid && structures == prob.shape(0) && variables == on.shape(0) &&
              scores == features.shape(0) && numbers == dense.shape(0),
          "the lists of structures do not fit together");
}

// An instance is solved by rows as a whole, or not at all; a sequence is solved by flows or not.
template <class T>
void require_cuts(const Problem<T>& p, std::size_t batch, const Vector<const std::int32_t>& count,
                  const Vector<const std::int32_t>& num_cuts,
                  const Vector<const std::uint8_t>& cuts) {
  const std::size_t factors = static_cast<std::size_t>(p.structured.count);
  require(num_cuts.shape(0) == batch * factors, "num_cuts has the wrong shape");
  const bool possible = factormax::RowForm<T>::possible(p);
  std::size_t members = 0;
  for (std::size_t k = 0; k < num_cuts.shape(0); ++k) {
    const int f = static_cast<int>(k % factors), kind = p.structured.kind[f];
    const bool is_sequence = kind == static_cast<int>(factormax::OracleKind::sequence);
    const bool is_tree = kind == static_cast<int>(factormax::OracleKind::tree);
    const bool listed = num_cuts(k) >= 0;
    require((listed == (num_cuts(k - k % factors) >= 0) || !possible) &&
                (possible || is_sequence || !listed) && (count(k) == 0 || !listed),
            "num_cuts does not fit the structures");
    if (!listed) continue;
    require(is_tree || num_cuts(k) == 1, "a matching, or a sequence, has one list");
    members += static_cast<std::size_t>(num_cuts(k)) *
               static_cast<std::size_t>(factormax::list_length(p, f));
  }
  require(members == cuts.shape(0), "cuts has the wrong shape");
}

void raise_if_failed(const factormax::Control& control) {
  if (control.out_of_memory.load()) throw std::bad_alloc();
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
}

#define FACTORMAX_BATCH_PARAMETERS                                                \
  const Graph &graph, Matrix<const T> coef, Matrix<const T> rhs,                  \
      Matrix<const double> oracle_param, OptionalMatrix<const std::uint8_t> mask, \
      Matrix<const T> eta_u, Matrix<const T> eta_v

#define FACTORMAX_BATCH_NAMES \
  "graph"_a, "coef"_a, "rhs"_a, "oracle_param"_a, "mask"_a.none(), "eta_u"_a, "eta_v"_a

#define FACTORMAX_PROBLEM \
  make_problem<T>(graph, Batch<T>{coef, rhs, oracle_param, mask, eta_u, eta_v})

using Structures = std::tuple<
    nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>, nb::ndarray<nb::numpy, double, nb::ndim<1>>,
    nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>,
    nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>, nb::ndarray<nb::numpy, double, nb::ndim<1>>,
    nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>,
    nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>>;

// Returns the structures of the structured factors: count, prob, on, features, dense; and of those
// that were solved by rows or flows num_cuts, cuts.
template <class T>
std::optional<Structures> solve(FACTORMAX_BATCH_PARAMETERS, OptionalMatrix<const T> warm,
                                nb::object callbacks, Vector<std::int32_t> fault, int method,
                                double tol, int max_iter, int max_inner_iter, double step_size,
                                int by_rows, double seconds, Matrix<T> mu, Matrix<T> mu_v,
                                Matrix<T> tau, Matrix<std::int8_t> var_side,
                                Matrix<std::int8_t> row_side, Vector<double> objective,
                                Vector<double> primal_residual, Vector<double> dual_residual,
                                Vector<std::int32_t> iterations, Vector<std::int32_t> status,
                                Vector<std::int32_t> oracle_calls, Vector<double> upper_bound,
                                Vector<std::uint8_t> integral) {
  Problem<T> p = FACTORMAX_PROBLEM;
  const Callbacks functions(callbacks, p.structured.count);
  functions.give_to(p);
  const std::size_t batch = eta_u.shape(0), n = p.num_vars, rows = p.num_dual();
  require(0 <= method && method <= 3, "method must be 0 (compact) to 3 (AD3)");
  require(objective.shape(0) == batch && primal_residual.shape(0) == batch &&
              dual_residual.shape(0) == batch && iterations.shape(0) == batch &&
              status.shape(0) == batch && oracle_calls.shape(0) == batch &&
              upper_bound.shape(0) == batch && integral.shape(0) == batch,
          "a per-instance output has the wrong shape");
  require(fault.shape(0) == 2, "fault has the wrong shape");
  factormax::Outputs<T> out;
  out.mu = batched(mu, batch, n, "mu", false);
  out.mu_v = batched(mu_v, batch, p.num_scores(), "mu_v", false);
  out.tau = batched(tau, batch, rows, "tau", false);
  out.var_side = batched(var_side, batch, n, "var_side", false);
  out.row_side = batched(row_side, batch, rows, "row_side", false);
  out.objective = objective.data();
  out.primal_residual = primal_residual.data();
  out.dual_residual = dual_residual.data();
  out.iterations = iterations.data();
  out.status = status.data();
  out.oracle_calls = oracle_calls.data();
  out.upper_bound = upper_bound.data();
  out.integral = integral.data();
  factormax::Options options;
  options.tol = tol;
  options.max_iter = max_iter;
  options.max_inner_iter = max_inner_iter;
  options.step_size = step_size;
  require(0 <= by_rows && by_rows <= 3, "by_rows must be 0 (never) to 3 (listed)");
  options.by_rows = static_cast<factormax::ByRows>(by_rows);
  Batched<const T> start;
  if (warm) start = batched(*warm, batch, rows, "warm");
  factormax::Control control;
  control.poll = &poll_signals;
  require(seconds >= 0, "seconds must not be negative");
  if (seconds < 1e9) {
    const std::chrono::duration<double> left(seconds);
    using Clock = factormax::Control::Clock;
    control.deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(left);
  }
  factormax::FoundStructures found;
  without_gil([&] {
    factormax::solve_batch<T>(p, static_cast<std::int64_t>(batch),
                              static_cast<factormax::Method>(method), options, start, out, found,
                              control);
  });
  functions.raise_if_raised();
  std::tie(fault(0), fault(1)) = functions.fault();
  raise_if_failed(control);
  if (p.structured.count == 0) return std::nullopt;
  return Structures{as_array(std::move(found.count)), as_array(std::move(found.prob)),
                    as_array(std::move(found.on)),    as_array(std::move(found.features)),
                    as_array(std::move(found.dense)), as_array(std::move(found.num_cuts)),
                    as_array(std::move(found.cuts))};
}

// Returns the worst residual, NaN if there is one.
template <class T>
double vjp(FACTORMAX_BATCH_PARAMETERS, Matrix<const T> grad_mu, Matrix<const T> grad_mu_v,
           Matrix<const std::int8_t> var_side, Matrix<const std::int8_t> row_side,
           Vector<const std::int32_t> status, Vector<const std::int32_t> count,
           Vector<const double> prob, Vector<const std::int32_t> on,
           Vector<const std::int32_t> features, Vector<const double> dense,
           Vector<const std::int32_t> num_cuts, Vector<const std::uint8_t> cuts,
           std::optional<Vector<const double>> grad_prob, Matrix<T> grad_eta_u,
           Matrix<T> grad_eta_v, Vector<double> residual) {
  const Problem<T> p = FACTORMAX_PROBLEM;
  const std::size_t batch = eta_u.shape(0), n = p.num_vars, rows = p.num_dual();
  require(status.shape(0) == batch && residual.shape(0) == batch,
          "a per-instance array has the wrong shape");
  factormax::BatchGradients<T> grads;
  grads.grad_mu = batched(grad_mu, batch, n, "grad_mu");
  grads.grad_mu_v = batched(grad_mu_v, batch, p.num_scores(), "grad_mu_v");
  grads.var_side = batched(var_side, batch, n, "var_side");
  grads.row_side = batched(row_side, batch, rows, "row_side");
  grads.status = status.data();
  grads.grad_eta_u = batched(grad_eta_u, batch, n, "grad_eta_u", false);
  grads.grad_eta_v = batched(grad_eta_v, batch, p.num_scores(), "grad_eta_v", false);
  grads.residual = residual.data();
  if (p.structured.count > 0) {
    require_structures(p, batch, count, prob, on, features, dense);
    require(!grad_prob || grad_prob->shape(0) == prob.shape(0), "grad_prob has the wrong shape");
    grads.count = count.data();
    grads.prob = prob.data();
    grads.on = on.data();
    grads.features = features.data();
    grads.dense = dense.data();
    require_cuts(p, batch, count, num_cuts, cuts);
    grads.num_cuts = num_cuts.data();
    grads.cuts = cuts.data();
    if (grad_prob) grads.grad_prob = grad_prob->data();
  }
  factormax::Control control;
  control.poll = &poll_signals;
  without_gil(
      [&] { factormax::vjp_batch<T>(p, static_cast<std::int64_t>(batch), grads, control); });
  raise_if_failed(control);
  double worst = 0;
  for (std::size_t i = 0; i < batch && !std::isnan(worst); ++i) {
    if (!(residual(i) <= worst)) worst = residual(i);
  }
  return worst;
}

template <class T>
bool all_finite(Matrix<const T> scores) {
  return factormax::all_finite(scores.data(), static_cast<std::int64_t>(scores.size()));
}

template <class T>
std::size_t workspace_bytes(FACTORMAX_BATCH_PARAMETERS, int method) {
  const Problem<T> p = FACTORMAX_PROBLEM;
  return factormax::workspace_bytes<T>(p, static_cast<factormax::Method>(method));
}

// The best structure of a structured factor for each row of scores: the variables that are on, the
// features that count, and whether there is one.
std::tuple<nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>,
           nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>,
           nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>>
best_structures(int kind, Vector<const std::int32_t> shape, Matrix<const double> eta_u,
                Matrix<const double> eta_v, Vector<const double> param) {
  using factormax::OracleKind;
  const std::size_t batch = eta_u.shape(0);
  const auto which = static_cast<OracleKind>(kind);
  const factormax::Span<const std::int32_t> sizes{shape.data(), static_cast<int>(shape.size())};
  require(0 <= kind && kind < static_cast<int>(OracleKind::callback) &&
              shape_fits(which, sizes, static_cast<std::int64_t>(eta_u.shape(1)),
                         static_cast<std::int64_t>(eta_v.shape(1))),
          "the structured factor has the wrong kind or shape");
  require(eta_v.shape(0) == batch && param.shape(0) == batch, "the batch sizes differ");
  const int vars = static_cast<int>(eta_u.shape(1));
  factormax::Oracle oracle;
  factormax::Workspace counter;
  oracle.allocate(which, sizes, vars, counter);
  factormax::Workspace workspace(counter.used());
  if (!workspace.valid()) throw std::bad_alloc();
  oracle.allocate(which, sizes, vars, workspace);
  std::vector<std::int32_t> on(batch * oracle.slots()), features(batch * oracle.feature_slots());
  std::vector<std::uint8_t> found(batch);
  without_gil([&] {
    for (std::size_t i = 0; i < batch; ++i) {
      const double* scores = eta_u.data() + i * eta_u.shape(1);
      if (!oracle.prepare(scores, param(i), nullptr, 0)) continue;
      found[i] =
          oracle.map(scores, eta_v.data() + i * eta_v.shape(1), on.data() + i * oracle.slots(),
                     features.data() + i * oracle.feature_slots(),
                     nullptr) == factormax::OracleAnswer::found;
    }
  });
  return {as_array(std::move(on)), as_array(std::move(features)), as_array(std::move(found))};
}

// A local search with its model, which is copied nowhere: the arrays are kept alive.
class Search {
 public:
  Search(Vector<const std::int32_t> state_ptr, Vector<const double> score,
         Vector<const std::uint8_t> allowed, Vector<const std::int32_t> scope_ptr,
         Vector<const std::int32_t> scope, Vector<const std::int64_t> table_ptr,
         Vector<const double> table, Vector<const std::int32_t> row_ptr,
         Vector<const std::int32_t> row_state, Vector<const double> coef, Vector<const double> rhs,
         Vector<const std::uint8_t> equal)
      : kept_{state_ptr, score,   allowed,   scope_ptr, scope, table_ptr,
              table,     row_ptr, row_state, coef,      rhs,   equal} {
    const std::size_t states = score.shape(0), rows = rhs.shape(0);
    require_offsets(state_ptr, states, "state_ptr");
    require_offsets(scope_ptr, scope.shape(0), "scope_ptr");
    require_offsets(row_ptr, row_state.shape(0), "row_ptr");
    const std::size_t units = state_ptr.shape(0) - 1, tables = scope_ptr.shape(0) - 1;
    for (std::size_t u = 0; u < units; ++u) {
      require(state_ptr(u) < state_ptr(u + 1), "a unit has no states");
    }
    require(allowed.shape(0) == states && row_ptr.shape(0) == rows + 1 && equal.shape(0) == rows &&
                coef.shape(0) == row_state.shape(0) && table_ptr.shape(0) == tables + 1 &&
                table_ptr(0) == 0,
            "an array of the search has the wrong shape");
    require_range(allowed.data(), states, std::uint8_t(2), "allowed");
    require_range(scope.data(), scope.size(), static_cast<std::int32_t>(units), "scope");
    require_range(row_state.data(), row_state.size(), static_cast<std::int32_t>(states),
                  "row_state");
    const std::int64_t limit = static_cast<std::int64_t>(table.shape(0));
    for (std::size_t f = 0; f < tables; ++f) {
      std::int64_t size = 1;
      for (int k = scope_ptr(f); k < scope_ptr(f + 1) && size <= limit; ++k) {
        size *= state_ptr(scope(k) + 1) - state_ptr(scope(k));
      }
      require(table_ptr(f + 1) - table_ptr(f) == size && table_ptr(f + 1) <= limit,
              "a table has the wrong size");
    }
    require(factormax::all_finite(score.data(), static_cast<std::int64_t>(states)) &&
                factormax::all_finite(table.data(), limit) &&
                factormax::all_finite(coef.data(), static_cast<std::int64_t>(coef.shape(0))) &&
                factormax::all_finite(rhs.data(), static_cast<std::int64_t>(rows)),
            "the numbers of the search must be finite");
    model_.num_units = static_cast<int>(units);
    model_.num_states = static_cast<int>(states);
    model_.num_tables = static_cast<int>(tables);
    model_.num_rows = static_cast<int>(rows);
    model_.state_ptr = state_ptr.data();
    model_.score = score.data();
    model_.allowed = allowed.data();
    model_.scope_ptr = scope_ptr.data();
    model_.scope = scope.data();
    model_.table_ptr = table_ptr.data();
    model_.table = table.data();
    model_.row_ptr = row_ptr.data();
    model_.row_state = row_state.data();
    model_.coef = coef.data();
    model_.rhs = rhs.data();
    model_.equal = equal.data();
    factormax::Workspace counter;
    search_.allocate(model_, counter);
    workspace_ = std::make_unique<factormax::Workspace>(counter.used());
    if (!workspace_->valid()) throw std::bad_alloc();
    search_.allocate(model_, *workspace_);
    search_.prepare();
  }

  // Improves the states x in place; returns whether all rows hold.
  bool run(Vector<std::int32_t> x, Vector<const std::uint8_t> movable, std::int64_t work,
           std::uint64_t seed) {
    check_states(x.data(), x.shape(0));
    require(movable.shape(0) == x.shape(0), "movable has the wrong shape");
    bool hold = false;
    without_gil([&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      hold = search_.run(x.data(), movable.data(), work, seed);
    });
    return hold;
  }

  void conditional(Vector<const std::int32_t> x, Vector<double> out) {
    check_states(x.data(), x.shape(0));
    require(out.shape(0) == static_cast<std::size_t>(model_.num_states), "out: the wrong shape");
    without_gil([&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      search_.conditional(x.data(), out.data());
    });
  }

 private:
  void check_states(const std::int32_t* x, std::size_t size) const {
    require(size == static_cast<std::size_t>(model_.num_units), "x has the wrong shape");
    for (int u = 0; u < model_.num_units; ++u) {
      require(x[u] >= 0 && x[u] < model_.states(u), "x holds a state out of range");
    }
  }

  std::tuple<Vector<const std::int32_t>, Vector<const double>, Vector<const std::uint8_t>,
             Vector<const std::int32_t>, Vector<const std::int32_t>, Vector<const std::int64_t>,
             Vector<const double>, Vector<const std::int32_t>, Vector<const std::int32_t>,
             Vector<const double>, Vector<const double>, Vector<const std::uint8_t>>
      kept_;
  factormax::SearchModel model_;
  std::unique_ptr<factormax::Workspace> workspace_;
  factormax::LocalSearch search_;
  std::mutex mutex_;
};

template <class T>
void bind(nb::module_& m) {
  m.def("solve", &solve<T>, FACTORMAX_BATCH_NAMES, "warm"_a.none(), "callbacks"_a.none(),
        "fault"_a.noconvert(), "method"_a, "tol"_a, "max_iter"_a, "max_inner_iter"_a, "step_size"_a,
        "by_rows"_a, "seconds"_a, "mu"_a.noconvert(), "mu_v"_a.noconvert(), "tau"_a.noconvert(),
        "var_side"_a.noconvert(), "row_side"_a.noconvert(), "objective"_a.noconvert(),
        "primal_residual"_a.noconvert(), "dual_residual"_a.noconvert(), "iterations"_a.noconvert(),
        "status"_a.noconvert(), "oracle_calls"_a.noconvert(), "upper_bound"_a.noconvert(),
        "integral"_a.noconvert(),
        "Solve a batch of instances into the given output arrays; returns the structures.");
  m.def("vjp", &vjp<T>, FACTORMAX_BATCH_NAMES, "grad_mu"_a, "grad_mu_v"_a, "var_side"_a,
        "row_side"_a, "status"_a, "count"_a, "prob"_a, "on"_a, "features"_a, "dense"_a,
        "num_cuts"_a, "cuts"_a, "grad_prob"_a.none(), "grad_eta_u"_a.noconvert(),
        "grad_eta_v"_a.noconvert(), "residual"_a.noconvert(),
        "Differentiate a solved batch into the given output arrays.");
  m.def("all_finite", &all_finite<T>, "scores"_a.noconvert(),
        "Whether there is no NaN and no infinity.");
  m.def("workspace_bytes", &workspace_bytes<T>, FACTORMAX_BATCH_NAMES, "method"_a,
        "Bytes of working memory that one thread uses.");
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The native core of factormax.";
  nb::set_leak_warnings(false);  // graphs that are remembered live as long as the interpreter
  nb::class_<Graph>(m, "Graph", "The index arrays of a compiled graph, checked.")
      .def(
          "__init__",
          [](Graph* self, int num_vars, Vector<const std::int32_t> row_ptr,
             Vector<const std::int32_t> col, Vector<const std::int8_t> row_kind,
             Matrix<const std::int32_t> pairs, Matrix<const std::uint8_t> pair_negated,
             Vector<const std::int32_t> block_ptr, Vector<const std::int8_t> block_kind,
             Vector<const std::uint8_t> block_isolated, Vector<const std::int8_t> oracle_kind,
             Vector<const std::uint8_t> oracle_linked, Vector<const std::int32_t> oracle_var_ptr,
             Vector<const std::int32_t> oracle_var, Vector<const std::int32_t> oracle_shape_ptr,
             Vector<const std::int32_t> oracle_shape, Vector<const std::int32_t> oracle_score_ptr) {
            Graph graph{num_vars,         0,
                        row_ptr,          col,
                        row_kind,         pairs,
                        pair_negated,     block_ptr,
                        block_kind,       block_isolated,
                        oracle_kind,      oracle_linked,
                        oracle_var_ptr,   oracle_var,
                        oracle_shape_ptr, oracle_shape,
                        oracle_score_ptr};
            graph.check();
            new (self) Graph(graph);
          },
          "num_vars"_a, "row_ptr"_a, "col"_a, "row_kind"_a, "pairs"_a, "pair_negated"_a,
          "block_ptr"_a, "block_kind"_a, "block_isolated"_a, "oracle_kind"_a, "oracle_linked"_a,
          "oracle_var_ptr"_a, "oracle_var"_a, "oracle_shape_ptr"_a, "oracle_shape"_a,
          "oracle_score_ptr"_a);
  nb::class_<Search>(m, "LocalSearch", "A local search over units with states.")
      .def(nb::init<Vector<const std::int32_t>, Vector<const double>, Vector<const std::uint8_t>,
                    Vector<const std::int32_t>, Vector<const std::int32_t>,
                    Vector<const std::int64_t>, Vector<const double>, Vector<const std::int32_t>,
                    Vector<const std::int32_t>, Vector<const double>, Vector<const double>,
                    Vector<const std::uint8_t>>(),
           "state_ptr"_a, "score"_a, "allowed"_a, "scope_ptr"_a, "scope"_a, "table_ptr"_a,
           "table"_a, "row_ptr"_a, "row_state"_a, "coef"_a, "rhs"_a, "equal"_a)
      .def("run", &Search::run, "x"_a.noconvert(), "movable"_a, "work"_a, "seed"_a,
           "Improve the states x in place; returns whether all rows hold.")
      .def("conditional", &Search::conditional, "x"_a, "out"_a.noconvert(),
           "The score of each state given the states x of all other units.");
  bind<double>(m);
  bind<float>(m);
  m.def("best_structures", &best_structures, "kind"_a, "shape"_a, "eta_u"_a, "eta_v"_a, "param"_a,
        "The MAP oracle of a structured factor, for each row of scores.");
  m.def("set_num_threads", &factormax::set_num_threads, "threads"_a);
  m.def("get_num_threads", &factormax::get_num_threads);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&begin_ending));
}

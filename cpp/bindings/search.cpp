// MAP oracles and local search, for queries that look for structures.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <mutex>

#include "arrays.hpp"
#include "bindings.hpp"
#include "factormax/local_search.hpp"
#include "factormax/model.hpp"
#include "factormax/structured/oracle.hpp"
#include "interpreter.hpp"

namespace factormax::python {

using namespace nb::literals;

namespace {

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

// The best structure of a structured factor for each row of scores: the variables that are on, the
// features that count, and whether there is one.
std::tuple<nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>,
           nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>>,
           nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>>
best_structures(OracleKind which, Vector<const std::int32_t> shape, Matrix<const double> eta_u,
                Matrix<const double> eta_v, Vector<const double> param) {
  const std::size_t batch = eta_u.shape(0);
  const Span<const std::int32_t> sizes{shape.data(), static_cast<int>(shape.size())};
  require(
      which != OracleKind::callback && fits(which, sizes, static_cast<std::int64_t>(eta_u.shape(1)),
                                            static_cast<std::int64_t>(eta_v.shape(1))),
      "the structured factor has the wrong kind or shape");
  require(eta_v.shape(0) == batch && param.shape(0) == batch, "the batch sizes differ");
  Oracle oracle;
  Workspace counter;
  oracle.allocate(which, sizes, counter);
  Workspace workspace(counter.used());
  if (!workspace.valid()) throw std::bad_alloc();
  oracle.allocate(which, sizes, workspace);
  std::vector<std::int32_t> on(batch * oracle.slots()), features(batch * oracle.feature_slots());
  std::vector<std::uint8_t> found(batch);
  without_gil([&] {
    for (std::size_t i = 0; i < batch; ++i) {
      const double* scores = eta_u.data() + i * eta_u.shape(1);
      if (!oracle.prepare(scores, {param(i)})) continue;
      found[i] =
          oracle.map(scores, eta_v.data() + i * eta_v.shape(1), on.data() + i * oracle.slots(),
                     features.data() + i * oracle.feature_slots(), nullptr) == OracleAnswer::found;
    }
  });
  return {as_array(std::move(on)), as_array(std::move(features)), as_array(std::move(found))};
}

// A local search with its model, which is not copied: the arrays are kept alive.
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
    require(all_finite(score.data(), static_cast<std::int64_t>(states)) &&
                all_finite(table.data(), limit) &&
                all_finite(coef.data(), static_cast<std::int64_t>(coef.shape(0))) &&
                all_finite(rhs.data(), static_cast<std::int64_t>(rows)),
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
    Workspace counter;
    search_.allocate(model_, counter);
    workspace_ = std::make_unique<Workspace>(counter.used());
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
  SearchModel model_;
  std::unique_ptr<Workspace> workspace_;
  LocalSearch search_;
  std::mutex mutex_;
};

}  // namespace

void bind_search(nb::module_& m) {
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
  m.def("best_structures", &best_structures, "kind"_a, "shape"_a, "eta_u"_a, "eta_v"_a, "param"_a,
        "The MAP oracle of a structured factor, for each row of scores.");
}

}  // namespace factormax::python

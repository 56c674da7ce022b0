// `Solution` and its `Structures`, as Python sees them.
#include "solution.hpp"

#include <vector>

#include "bindings.hpp"

namespace factormax::python {

using namespace nb::literals;

namespace {

// A field of the structures: read as a view, set from an array.
template <class U>
auto list_getter(std::vector<U> FoundStructures::* field) {
  return [field](nb::handle self) {
    std::vector<U>& values = nb::cast<FoundStructures&>(self).*field;
    return NumpyVector<const U>(values.data(), {values.size()}, self);
  };
}

template <class U>
std::vector<U> copied(const Vector<const U>& array) {
  return std::vector<U>(array.data(), array.data() + array.size());
}

void bind_structures(nb::module_& m) {
  nb::class_<FoundStructures>(m, "Structures",
                              "The structures of a batch: see FoundStructures of the core.")
      .def(
          "__init__",
          [](FoundStructures* self, Vector<const std::int32_t> count, Vector<const double> prob,
             Vector<const std::int32_t> on, Vector<const std::int32_t> features,
             Vector<const double> dense, Vector<const std::int32_t> num_cuts,
             Vector<const std::uint8_t> cuts) {
            new (self)
                FoundStructures{copied(count), copied(prob),     copied(on),  copied(features),
                                copied(dense), copied(num_cuts), copied(cuts)};
          },
          nb::kw_only(), "count"_a, "prob"_a, "on"_a, "features"_a, "dense"_a, "num_cuts"_a,
          "cuts"_a)
      .def_prop_ro("count", list_getter(&FoundStructures::count))
      .def_prop_ro("prob", list_getter(&FoundStructures::prob))
      .def_prop_ro("on", list_getter(&FoundStructures::on))
      .def_prop_ro("features", list_getter(&FoundStructures::features))
      .def_prop_ro("dense", list_getter(&FoundStructures::dense))
      .def_prop_ro("num_cuts", list_getter(&FoundStructures::num_cuts))
      .def_prop_ro("cuts", list_getter(&FoundStructures::cuts));
}

// mu, mu_v and tau, in the precision of the solution.
template <class Field>
auto real_matrix(Field field) {
  return [field](nb::handle self) -> nb::object {
    Solution& solution = nb::cast<Solution&>(self);
    if (solution.is_double()) {
      return nb::cast(field(std::get<Solution::Typed<double>>(solution.numbers)).matrix(self));
    }
    return nb::cast(field(std::get<Solution::Typed<float>>(solution.numbers)).matrix(self));
  };
}

template <class U>
auto per_instance(Buffer<U> Solution::* field) {
  return [field](nb::handle self) { return (nb::cast<Solution&>(self).*field).vector(self); };
}

}  // namespace

void bind_solution(nb::module_& m) {
  bind_structures(m);
  nb::class_<Solution>(m, "Solution", "The answers of a batch; it owns them.")
      .def(nb::init<std::size_t, std::size_t, std::size_t, std::size_t, bool>(), nb::kw_only(),
           "batch"_a, "variables"_a, "scores"_a, "dual"_a, "wide"_a)
      .def(nb::init<const Inputs&>(), "inputs"_a, "With room for the answers to these inputs.")
      .def_prop_ro("mu", real_matrix([](auto& own) -> auto& { return own.mu; }),
                   nb::sig("def mu(self) -> NDArray[numpy.floating]"))
      .def_prop_ro("mu_v", real_matrix([](auto& own) -> auto& { return own.mu_v; }),
                   nb::sig("def mu_v(self) -> NDArray[numpy.floating]"))
      .def_prop_ro("tau", real_matrix([](auto& own) -> auto& { return own.tau; }),
                   nb::sig("def tau(self) -> NDArray[numpy.floating]"))
      .def_prop_ro("var_side",
                   [](nb::handle self) { return nb::cast<Solution&>(self).var_side.matrix(self); })
      .def_prop_ro("row_side",
                   [](nb::handle self) { return nb::cast<Solution&>(self).row_side.matrix(self); })
      .def_prop_ro("objective", per_instance(&Solution::objective))
      .def_prop_ro("primal_residual", per_instance(&Solution::primal_residual))
      .def_prop_ro("dual_residual", per_instance(&Solution::dual_residual))
      .def_prop_ro("upper_bound", per_instance(&Solution::upper_bound))
      .def_prop_ro("iterations", per_instance(&Solution::iterations))
      .def_prop_ro("status", per_instance(&Solution::status))
      .def_prop_ro("all_converged", &Solution::all_converged)
      .def(
          "report", [](const Solution& self) { return as_matrix(self.report()); },
          "The residuals, the iterations, the status and the oracle calls, (5, B).")
      .def(
          "sides", [](const Solution& self) { return as_matrix(self.sides()); },
          "The sides of variables and of rows, and the status, (B, n + dual + 1).")
      .def("take_sides", &Solution::take_sides, "sides"_a, "Takes what `sides` gave.")
      .def_prop_ro("oracle_calls", per_instance(&Solution::oracle_calls))
      .def_prop_ro("integral",
                   [](nb::handle self) {
                     const Buffer<std::uint8_t>& own = nb::cast<Solution&>(self).integral;
                     return NumpyVector<bool>(reinterpret_cast<bool*>(own.data.get()), {own.size()},
                                              self);
                   })
      .def_rw("structures", &Solution::structures);
}

}  // namespace factormax::python

// `Inputs`, as Python sees them.
#include "inputs.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "factormax/batch.hpp"

namespace factormax::python {

using namespace nb::literals;

void bind_inputs(nb::module_& m) {
  nb::enum_<Numbers>(m, "Numbers", "What a list of scores holds besides finite numbers.")
      .value("finite", Numbers::finite)
      .value("minus_infinity", Numbers::minus_infinity)
      .value("bad", Numbers::bad, "NaN or +inf.");
  nb::class_<Inputs>(m, "Inputs", "The numbers of a batch of instances of a model, checked.")
      .def(nb::init<std::shared_ptr<const Model>, nb::object, nb::object, std::vector<nb::object>,
                    std::optional<Matrix<const bool>>, std::optional<Matrix<const std::int8_t>>,
                    nb::object, const std::vector<int>&, std::optional<Matrix<const double>>>(),
           "model"_a, "eta_u"_a, "eta_v"_a, "params"_a, "mask"_a = nb::none(),
           "held"_a = nb::none(), "shared"_a = nb::none(), "runs"_a = std::vector<int>(),
           "heat"_a = nb::none(),
           "shared: the factor scores that all instances share, (1, S), if eta_v holds only the "
           "others.\nruns: how many scores are shared, not shared, shared, and so on.\nheat: what "
           "divides the shared scores of each instance, (B, 1); None: nothing does.")
      .def_prop_ro("batch", &Inputs::batch)
      .def_prop_ro(
          "mask", [](nb::handle self) { return nb::cast<Inputs&>(self).mask(self); },
          nb::sig("def mask(self) -> NDArray[numpy.bool_] | None"),
          "Which variables are neither masked nor of a score of -inf; None if all are.")
      .def_prop_ro(
          "oracle_params",
          [](nb::handle self) { return nb::cast<Inputs&>(self).oracle_params(self); },
          "The parameter of each structured factor, (1 | B, S); 0 where it has none.")
      .def_prop_ro(
          "needs_a_look",
          [](const Inputs& inputs) {
            return inputs.scores() == Numbers::bad || inputs.factor_scores() != Numbers::finite;
          },
          "Whether a score may have to be refused: NaN, +inf, or -inf of a factor.")
      .def_prop_ro("scores", &Inputs::scores)
      .def_prop_ro("factor_scores", &Inputs::factor_scores)
      .def_prop_ro(
          "rows",
          [](nb::handle self) {
            const Inputs& inputs = nb::cast<Inputs&>(self);
            const auto view = [&](const auto& rows, int columns) {
              using U = std::remove_pointer_t<decltype(rows.data)>;
              const std::size_t most = rows.stride > 0 ? inputs.batch() : 1;
              const std::size_t count = std::min(most, inputs.batch());
              return NumpyMatrix<U>(rows.data, {count, static_cast<std::size_t>(columns)}, self);
            };
            const auto both = [&](const auto& own) {
              return nb::make_tuple(view(own.problem.coef, own.problem.num_entries),
                                    view(own.problem.rhs, own.problem.num_rows));
            };
            return inputs.is_double() ? both(inputs.typed<double>()) : both(inputs.typed<float>());
          },
          nb::sig("def rows(self) -> tuple[NDArray[numpy.floating], NDArray[numpy.floating]]"),
          "The coefficients and the bounds of the rows, each (1 | B, ...).")
      .def(
          "workspace_bytes",
          [](const Inputs& inputs, Method method) {
            return inputs.is_double() ? workspace_bytes(inputs.typed<double>().problem, method)
                                      : workspace_bytes(inputs.typed<float>().problem, method);
          },
          "method"_a, "Bytes of working memory that one thread uses.");
}

}  // namespace factormax::python

// The enums of the core, and how to solve.
#include "settings.hpp"

#include "bindings.hpp"
#include "factormax/model.hpp"
#include "factormax/structured/oracle.hpp"

namespace factormax::python {

namespace nb = nanobind;
using namespace nb::literals;

void bind_enums(nb::module_& m) {
  nb::enum_<RowKind>(m, "RowKind", nb::is_arithmetic())
      .value("absent", RowKind::absent)
      .value("inequality", RowKind::inequality)
      .value("equality", RowKind::equality);
  nb::enum_<BlockKind>(m, "BlockKind", nb::is_arithmetic())
      .value("row", BlockKind::row, "Rows, each for itself.")
      .value("or_out", BlockKind::or_out, "The rows of OrOut, solved together.")
      .value("band", BlockKind::band, "Two bounds of one sum.");
  nb::enum_<OracleKind> oracles(m, "OracleKind", nb::is_arithmetic());
#define FACTORMAX_ORACLE(kind, Class) oracles.value(#kind, OracleKind::kind);
  FACTORMAX_ORACLES(FACTORMAX_ORACLE)
#undef FACTORMAX_ORACLE
  nb::enum_<Status>(m, "Status", nb::is_arithmetic())
      .value("converged", Status::converged)
      .value("max_iter", Status::max_iter)
      .value("infeasible", Status::infeasible)
      .value("interrupted", Status::interrupted)
      .value("stalled", Status::stalled)
      .value("not_proved", Status::not_proved);
  nb::enum_<Method>(m, "Method", nb::is_arithmetic())
      .value("compact", Method::compact)
      .value("admm", Method::admm)
      .value("proximal", Method::proximal)
      .value("ad3", Method::ad3);
  nb::enum_<ByRows>(m, "ByRows", nb::is_arithmetic())
      .value("never", ByRows::never)
      .value("dense", ByRows::dense, "Where it is faster.")
      .value("always", ByRows::always, "Where it can be done.")
      .value("listed", ByRows::listed, "The structures are asked for.");
  nb::enum_<Side>(m, "Side", nb::is_arithmetic())
      .value("lower", Side::lower)
      .value("interior", Side::interior)
      .value("upper", Side::upper)
      .value("absent", Side::absent)
      .value("tied", Side::tied);
  nb::enum_<CallbackFault>(m, "CallbackFault", nb::is_arithmetic())
      .value("none", CallbackFault::none)
      .value("raised", CallbackFault::raised)
      .value("not_binary", CallbackFault::not_binary)
      .value("forbidden", CallbackFault::forbidden)
      .value("not_finite", CallbackFault::not_finite);
}

void bind_settings(nb::module_& m) {
  nb::class_<Settings>(m, "Settings", "How to solve.")
      .def(
          "__init__",
          [](Settings* self, Method method, double tol, int max_iter, int max_inner_iter,
             double step_size, ByRows by_rows, double seconds) {
            Options options;
            options.tol = tol;
            options.max_iter = max_iter;
            options.max_inner_iter = max_inner_iter;
            options.step_size = step_size;
            options.by_rows = by_rows;
            new (self) Settings{method, options, seconds};
          },
          nb::kw_only(), "method"_a = Method::compact, "tol"_a = 1e-6, "max_iter"_a = 1000,
          "max_inner_iter"_a = 100000, "step_size"_a = 1.0, "by_rows"_a = ByRows::dense,
          "seconds"_a = std::numeric_limits<double>::infinity());
}

}  // namespace factormax::python

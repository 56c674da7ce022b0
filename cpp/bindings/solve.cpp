// Solving a batch, and its derivative.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "callbacks.hpp"
#include "factormax/batch.hpp"
#include "factormax/vector_ops.hpp"
#include "inputs.hpp"
#include "interpreter.hpp"
#include "settings.hpp"
#include "solution.hpp"

namespace factormax::python {

using namespace nb::literals;

namespace {

void raise_if_failed(const Control& control) {
  if (control.out_of_memory.load()) throw std::bad_alloc();
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
}

// Returns the structured factor whose oracle was wrong, and how.
template <class T>
std::pair<int, int> solve(const Inputs& inputs, const Settings& settings, const nb::object& warm,
                          const nb::object& oracles, Solution& out) {
  Problem<T> p = inputs.typed<T>().problem;
  const Callbacks callbacks(oracles, p.structured.count);
  callbacks.give_to(p);
  Batched<const T> start;
  Matrix<const T> multipliers;
  if (!warm.is_none()) {
    multipliers = nb::cast<Matrix<const T>>(warm, false);
    start = batched(multipliers, inputs.batch(), std::size_t(p.num_dual()), "warm");
    require(all_finite(multipliers.data(), static_cast<std::int64_t>(multipliers.size())),
            "warm must be finite");
  }
  Control control;
  control.poll = &poll_signals;
  if (settings.seconds < 1e9) {
    const std::chrono::duration<double> left(std::max(settings.seconds, 0.0));
    control.deadline =
        Control::Clock::now() + std::chrono::duration_cast<Control::Clock::duration>(left);
  }
  out.structures = {};
  const Outputs<T> outputs = out.outputs<T>();
  without_gil([&] {
    solve_batch<T>(p, static_cast<std::int64_t>(inputs.batch()), settings.method, settings.options,
                   start, outputs, out.structures, control);
  });
  callbacks.raise_if_raised();
  const std::pair<int, int> fault = callbacks.fault();
  if (fault.second == 0) raise_if_failed(control);
  return fault;
}

// The lists of structures must be as long as their counts say, and point into their factors.
template <class T>
void require_structures(const Problem<T>& p, std::size_t batch, const FoundStructures& found) {
  const auto sizes = structure_sizes(p);
  require(found.count.size() == batch * sizes.size(), "count has the wrong shape");
  std::size_t structures = 0, variables = 0, scores = 0, numbers = 0;
  bool valid = true;
  const auto inside = [](const std::vector<std::int32_t>& list, std::size_t begin,
                         std::size_t length, int end) {
    if (begin + length > list.size()) return false;
    return std::all_of(list.data() + begin, list.data() + begin + length,
                       [&](std::int32_t j) { return j >= -1 && j < end; });
  };
  for (std::size_t k = 0; valid && k < found.count.size(); ++k) {
    const std::size_t f = k % sizes.size(), here = static_cast<std::size_t>(found.count[k]);
    const int vars = p.structured.vars(static_cast<int>(f)).size;
    valid = found.count[k] >= 0 && found.count[k] <= vars + 1;
    valid = valid && inside(found.on, variables, here * sizes[f].slots, vars);
    valid = valid && inside(found.features, scores, here * sizes[f].feature_slots,
                            p.structured.scores(static_cast<int>(f)));
    structures += here;
    variables += here * sizes[f].slots;
    scores += here * sizes[f].feature_slots;
    numbers += here * sizes[f].dense;
  }
  require(valid && structures == found.prob.size() && variables == found.on.size() &&
              scores == found.features.size() && numbers == found.dense.size(),
          "the lists of structures do not fit together");
}

// Trees and matchings may be solved by rows, and sequences by flows.
template <class T>
void require_cuts(const Problem<T>& p, std::size_t batch, const FoundStructures& found) {
  const std::size_t factors = static_cast<std::size_t>(p.structured.count);
  require(found.num_cuts.size() == batch * factors, "num_cuts has the wrong shape");
  std::size_t members = 0;
  for (std::size_t k = 0; k < found.num_cuts.size(); ++k) {
    const int f = static_cast<int>(k % factors), kind = p.structured.kind[f];
    const bool is_sequence = kind == static_cast<int>(OracleKind::sequence) ||
                             kind == static_cast<int>(OracleKind::sequence_budget);
    const bool is_tree = kind == static_cast<int>(OracleKind::tree);
    const bool is_matching = kind == static_cast<int>(OracleKind::matching);
    const bool listed = found.num_cuts[k] >= 0;
    require(!listed || (found.count[k] == 0 && (is_sequence || is_tree || is_matching)),
            "num_cuts does not fit the structures");
    if (!listed) continue;
    require(is_tree || found.num_cuts[k] == 1, "a matching, or a sequence, has one list");
    members +=
        static_cast<std::size_t>(found.num_cuts[k]) * static_cast<std::size_t>(list_length(p, f));
  }
  require(members == found.cuts.size(), "cuts has the wrong shape");
}

// The gradients of factor scores: of each instance, or summed where the instances share them.
template <class T>
struct ScoreGradients {
  ScoreGradients(const Inputs& inputs, bool is_summed)
      : summed(is_summed), columns(is_summed ? inputs.runs().num_shared : 0) {
    const auto batch = static_cast<std::int64_t>(inputs.batch());
    const auto shared = static_cast<std::int64_t>(columns);
    own = {inputs.batch(), std::size_t(inputs.model().num_scores()) - columns};
    if (!is_summed) return;
    target.runs = inputs.runs().span();
    target.block = ScoreSums<T>::block_size(batch, shared);
    sums = {std::size_t(target.num_blocks(batch)), columns};
    target.sums = sums.batched();
    target.own = own.batched();
  }

  nb::object found() {
    if (!summed) return nb::cast(as_matrix(std::move(own)));
    Buffer<T> total(1, columns);
    std::fill_n(total.data.get(), columns, T(0));
    if (sums.rows > 0) std::copy_n(sums.data.get(), columns, total.data.get());
    return nb::make_tuple(as_matrix(std::move(total)), as_matrix(std::move(own)));
  }

  bool summed;
  std::size_t columns;  // scores that are shared
  Buffer<T> sums, own;
  ScoreSums<T> target;
};

// The gradients of eta_u and eta_v, and for each instance how well its system was solved.
template <class T>
nb::tuple differentiate(const Inputs& inputs, const Solution& solution, const nb::object& grad_mu,
                        const nb::object& grad_mu_v,
                        const std::optional<Vector<const double>>& grad_prob, bool summed) {
  const Problem<T>& p = inputs.typed<T>().problem;
  const std::size_t batch = inputs.batch(), n = p.num_vars, scores = p.num_scores();
  struct Incoming {
    Matrix<const T> array;
    std::vector<T> zeros;  // in place of what is not given
  };
  const auto incoming = [&](const nb::object& given, std::size_t columns, const char* name,
                            Incoming& kept) {
    if (given.is_none()) {
      kept.zeros.resize(columns, T(0));
      return Batched<const T>{kept.zeros.data(), 0};
    }
    kept.array = nb::cast<Matrix<const T>>(given, false);
    return batched(kept.array, batch, columns, name);
  };
  Incoming kept_u, kept_v;
  Buffer<T> grad_eta_u(batch, n);
  ScoreGradients<T> grad_eta_v(inputs, summed);
  Buffer<double> residual(batch, 1);
  BatchGradients<T> grads;
  grads.grad_mu = incoming(grad_mu, n, "grad_mu", kept_u);
  grads.grad_mu_v = incoming(grad_mu_v, scores, "grad_mu_v", kept_v);
  grads.var_side = {solution.var_side.data.get(), static_cast<std::int64_t>(n)};
  grads.row_side = {solution.row_side.data.get(),
                    static_cast<std::int64_t>(solution.row_side.columns)};
  grads.status = solution.status.data.get();
  grads.grad_eta_u = grad_eta_u.batched();
  if (summed) {
    grads.summed = grad_eta_v.target;
  } else {
    grads.grad_eta_v = grad_eta_v.own.batched();
  }
  grads.residual = residual.data.get();
  const FoundStructures& found = solution.structures;
  if (p.structured.count > 0 && batch > 0) {
    require_structures(p, batch, found);
    require_cuts(p, batch, found);
    require(!grad_prob || grad_prob->shape(0) == found.prob.size(), "grad_prob: the wrong shape");
    grads.take(found);
    if (grad_prob) grads.grad_prob = grad_prob->data();
  }
  Control control;
  control.poll = &poll_signals;
  if (batch > 0) {
    without_gil([&] { vjp_batch<T>(p, static_cast<std::int64_t>(batch), grads, control); });
    raise_if_failed(control);
  }
  double worst = 0;
  for (std::size_t i = 0; i < batch && !std::isnan(worst); ++i) {
    if (!(residual.data[i] <= worst)) worst = residual.data[i];
  }
  return nb::make_tuple(as_matrix(std::move(grad_eta_u)), grad_eta_v.found(),
                        as_vector(std::move(residual)), worst);
}

}  // namespace

void bind_solve(nb::module_& m) {
  m.def(
      "solve",
      [](const Inputs& inputs, const Settings& settings, const nb::object& warm,
         const nb::object& oracles, Solution& out) {
        require(inputs.scores() != Numbers::bad && inputs.factor_scores() != Numbers::bad,
                "the scores hold NaN, or an infinity where there can be none");
        out.require_fit(inputs.model(), inputs.batch(), inputs.is_double());
        if (inputs.batch() == 0) return std::pair<int, int>(-1, 0);
        return inputs.is_double() ? solve<double>(inputs, settings, warm, oracles, out)
                                  : solve<float>(inputs, settings, warm, oracles, out);
      },
      "inputs"_a, "settings"_a, "warm"_a.none(), "oracles"_a.none(), "out"_a,
      "Solves a batch of instances. `oracles`: None, or for each structured factor None, a\n"
      "function, or the address of a C function and its data. Returns the structured factor whose\n"
      "oracle was wrong, and how (`CallbackFault`).");
  m.def(
      "vjp",
      [](const Inputs& inputs, const Solution& solution, const nb::object& grad_mu,
         const nb::object& grad_mu_v, const std::optional<Vector<const double>>& grad_prob,
         bool summed) {
        solution.require_fit(inputs.model(), inputs.batch(), inputs.is_double());
        return inputs.is_double()
                   ? differentiate<double>(inputs, solution, grad_mu, grad_mu_v, grad_prob, summed)
                   : differentiate<float>(inputs, solution, grad_mu, grad_mu_v, grad_prob, summed);
      },
      "inputs"_a, "solution"_a, "grad_mu"_a.none(), "grad_mu_v"_a.none(), "grad_prob"_a.none(),
      "summed"_a = false,
      nb::sig("def vjp(inputs: Inputs, solution: Solution, grad_mu: object | None, grad_mu_v: "
              "object | None, grad_prob: object | None, summed: bool = False) -> "
              "tuple[NDArray[numpy.floating], typing.Any, NDArray[numpy.float64], float]"),
      "The gradients of eta_u and eta_v; the residual of each instance, and the worst.\n"
      "summed: instead of that of eta_v, return two: of the factor scores that the instances "
      "share,\nsummed over them, (1, S), and of the others, (B, ...).");
}

}  // namespace factormax::python

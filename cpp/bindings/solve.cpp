// What a solve is given and answers: inputs, settings, solutions with their structures.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <variant>

#include "arrays.hpp"
#include "bindings.hpp"
#include "callbacks.hpp"
#include "factormax/batch.hpp"
#include "factormax/model.hpp"
#include "interpreter.hpp"
#include "settings.hpp"

namespace factormax::python {

using namespace nb::literals;

namespace {

// ---- Inputs
// --------------------------------------------------------------------------------------

enum class Numbers { finite, minus_infinity, bad };  // bad: NaN or +inf

template <class T>
Numbers look_at(const T* values, std::size_t count, const std::uint8_t* mask) {
  if (all_finite(values, static_cast<std::int64_t>(count))) return Numbers::finite;
  Numbers found = Numbers::finite;
  for (std::size_t k = 0; k < count; ++k) {
    if (mask != nullptr && mask[k] == 0) continue;
    if (std::isnan(values[k]) || values[k] == std::numeric_limits<T>::infinity()) {
      return Numbers::bad;
    }
    if (std::isinf(values[k])) found = Numbers::minus_infinity;
  }
  return found;
}

// The numbers of a batch of instances of a model. The arrays are kept alive, and never written to;
// the rows are worked out once, for the solve and for its derivative.
class Inputs {
 public:
  template <class T>
  struct Typed {
    Problem<T> problem;
    std::vector<T> coef, rhs;
  };

  Inputs(std::shared_ptr<const Model> model, nb::object eta_u, nb::object eta_v,
         std::vector<nb::object> params, std::optional<Matrix<const bool>> mask,
         std::optional<Matrix<const std::int8_t>> held)
      : model_(held ? model->bounded() : std::move(model)),
        mask_(std::move(mask)),
        held_(std::move(held)),
        kept_(nb::make_tuple(eta_u, eta_v)) {
    Matrix<const double> wide, wide_v;
    Matrix<const float> narrow, narrow_v;
    if (nb::try_cast(eta_u, wide, false) && nb::try_cast(eta_v, wide_v, false)) {
      take(wide, wide_v, params, numbers_.emplace<Typed<double>>());
    } else if (nb::try_cast(eta_u, narrow, false) && nb::try_cast(eta_v, narrow_v, false)) {
      take(narrow, narrow_v, params, numbers_.emplace<Typed<float>>());
    } else {
      throw nb::value_error("eta_u and eta_v must be contiguous matrices of one real dtype");
    }
  }

  const Model& model() const { return *model_; }
  std::size_t batch() const { return batch_; }
  bool is_double() const { return std::holds_alternative<Typed<double>>(numbers_); }
  template <class T>
  const Typed<T>& typed() const {
    return std::get<Typed<T>>(numbers_);
  }
  Numbers scores() const { return scores_; }
  Numbers factor_scores() const { return factor_scores_; }

  // Which variables are there: neither masked nor of a score of -inf. None if all are.
  nb::object mask(nb::handle self) const {
    if (here_.empty()) return nb::none();
    return nb::cast(NumpyMatrix<const bool>(reinterpret_cast<const bool*>(here_.data()),
                                            {batch_, std::size_t(model_->num_vars())}, self));
  }

  NumpyMatrix<const double> oracle_params(nb::handle self) const {
    const std::size_t factors = static_cast<std::size_t>(model_->num_structured());
    return {
        oracle_params_.data(), {factors == 0 ? 1 : oracle_params_.size() / factors, factors}, self};
  }

 private:
  void take_params(const std::vector<nb::object>& params) {
    const auto& sizes = model_->param_sizes();
    require(params.size() == sizes.size(), "params: one for each parameter of each factor");
    params_.resize(sizes.size());
    scalars_.resize(sizes.size());
    for (std::size_t k = 0; k < sizes.size(); ++k) {
      const nb::handle given = params[k];
      if (PyFloat_Check(given.ptr())) {
        scalars_[k] = PyFloat_AsDouble(given.ptr());
        params_[k] = {&scalars_[k], 0, 0};
        continue;
      }
      Matrix<const double> array;
      require(nb::try_cast(given, array, false), "params must be contiguous matrices of float64");
      const auto rows = batched(array, batch_, static_cast<std::size_t>(sizes[k]), "params");
      params_[k] = {rows.data, array.shape(0) == 1 ? 0 : rows.stride, 1};
      per_instance_ = per_instance_ || array.shape(0) != 1;
    }
  }

  template <class T>
  void take(const Matrix<const T>& eta_u, const Matrix<const T>& eta_v,
            const std::vector<nb::object>& params, Typed<T>& typed) {
    const std::size_t n = static_cast<std::size_t>(model_->num_vars());
    batch_ = held_ ? held_->shape(0) : eta_u.shape(0);
    take_params(params);
    Problem<T>& p = typed.problem = model_->problem<T>();
    p.eta_u = batched(eta_u, batch_, n, "eta_u");
    p.eta_v = batched(eta_v, batch_, static_cast<std::size_t>(model_->num_scores()), "eta_v");
    factor_scores_ = look_at(eta_v.data(), eta_v.size(), nullptr);
    if (batch_ == 0) return;
    combine_mask(p.eta_u, eta_u);
    if (!here_.empty()) p.mask = {here_.data(), static_cast<std::int64_t>(n)};
    write_rows(typed);
    // Of structured factors.
    const std::size_t factors = static_cast<std::size_t>(model_->num_structured());
    const std::size_t lead = per_instance_ ? batch_ : 1;
    oracle_params_.resize(lead * factors);
    for (std::size_t i = 0; i < lead; ++i) {
      model_->write_oracle_params(params_, static_cast<std::int64_t>(i),
                                  oracle_params_.data() + i * factors);
    }
    p.structured.param = {oracle_params_.data(), lead > 1 ? static_cast<std::int64_t>(factors) : 0};
  }

  template <class T>
  void combine_mask(const Batched<const T>& scores, const Matrix<const T>& given) {
    const std::size_t n = static_cast<std::size_t>(model_->num_vars());
    if (!mask_) {
      scores_ = look_at(given.data(), given.size(), nullptr);
      if (scores_ != Numbers::minus_infinity) return;
    }
    Batched<const bool> masked;
    if (mask_) masked = batched(*mask_, batch_, n, "mask");
    here_.resize(batch_ * n);
    bool all = true;
    for (std::size_t i = 0; i < batch_; ++i) {
      const T* score = scores.at(static_cast<std::int64_t>(i));
      const bool* own = masked.at(static_cast<std::int64_t>(i));
      std::uint8_t* out = here_.data() + i * n;
      for (std::size_t j = 0; j < n; ++j) {
        out[j] = (own == nullptr || own[j]) && score[j] != -std::numeric_limits<T>::infinity();
        all = all && out[j] != 0;
      }
      if (look_at(score, n, out) == Numbers::bad) scores_ = Numbers::bad;
    }
    if (all) here_.clear();
  }

  template <class T>
  void write_rows(Typed<T>& typed) {
    Problem<T>& p = typed.problem;
    const bool per_instance = per_instance_ && model_->has_row_params();
    const std::int8_t* held = held_ ? held_->data() : nullptr;
    if (held_) require(held_->shape(1) == std::size_t(p.num_vars), "held has the wrong shape");
    const bool constant = !held_ && !model_->has_coef_params();
    const std::size_t coef_rows = constant ? 0 : held_ || per_instance ? batch_ : 1;
    const std::size_t rhs_rows = held_ || per_instance ? batch_ : 1;
    typed.coef.resize(coef_rows * static_cast<std::size_t>(p.num_entries));
    typed.rhs.resize(rhs_rows * static_cast<std::size_t>(p.num_rows));
    const auto held_of = [&](std::size_t i) { return held_ ? held + i * p.num_vars : nullptr; };
    for (std::size_t i = 0; i < coef_rows; ++i) {
      model_->write_coefs(params_, static_cast<std::int64_t>(i), held_of(i),
                          typed.coef.data() + i * p.num_entries);
    }
    for (std::size_t i = 0; i < rhs_rows; ++i) {
      model_->write_bounds(params_, static_cast<std::int64_t>(i), held_of(i),
                           typed.rhs.data() + i * p.num_rows);
    }
    p.constant_coefs = constant;
    p.coef = {constant ? model_->constant_coefs<T>() : typed.coef.data(),
              coef_rows > 1 ? p.num_entries : 0};
    p.rhs = {typed.rhs.data(), rhs_rows > 1 ? p.num_rows : 0};
  }

  std::shared_ptr<const Model> model_;
  std::optional<Matrix<const bool>> mask_;
  std::optional<Matrix<const std::int8_t>> held_;
  nb::object kept_;
  std::vector<double> scalars_, oracle_params_;
  std::vector<Param> params_;
  std::size_t batch_ = 0;
  bool per_instance_ = false;       // whether a parameter is
  std::vector<std::uint8_t> here_;  // (B, n), or empty if all are
  Numbers scores_ = Numbers::finite, factor_scores_ = Numbers::finite;
  std::variant<std::monostate, Typed<double>, Typed<float>> numbers_;
};

// ---- Solutions
// -----------------------------------------------------------------------------------

// The answers of a batch; it owns them.
class Solution {
 public:
  template <class T>
  struct Typed {
    Buffer<T> mu, mu_v, tau;
  };

  Solution(std::size_t batch, std::size_t vars, std::size_t scores, std::size_t dual, bool wide)
      : var_side(batch, vars),
        row_side(batch, dual),
        objective(batch, 1),
        primal_residual(batch, 1),
        dual_residual(batch, 1),
        upper_bound(batch, 1),
        iterations(batch, 1),
        status(batch, 1),
        oracle_calls(batch, 1),
        integral(batch, 1) {
    std::fill_n(upper_bound.data.get(), batch, std::numeric_limits<double>::infinity());
    std::fill_n(integral.data.get(), batch, std::uint8_t(0));
    if (wide) {
      numbers.emplace<Typed<double>>(Typed<double>{{batch, vars}, {batch, scores}, {batch, dual}});
    } else {
      numbers.emplace<Typed<float>>(Typed<float>{{batch, vars}, {batch, scores}, {batch, dual}});
    }
  }

  // One with room for the answers to these inputs.
  explicit Solution(const Inputs& inputs)
      : Solution(inputs.batch(), static_cast<std::size_t>(inputs.model().num_vars()),
                 static_cast<std::size_t>(inputs.model().num_scores()),
                 static_cast<std::size_t>(inputs.model().num_dual()), inputs.is_double()) {}

  bool is_double() const { return std::holds_alternative<Typed<double>>(numbers); }
  std::size_t batch() const { return var_side.rows; }
  bool all_converged() const {
    const std::int32_t* own = status.data.get();
    const auto converged = static_cast<std::int32_t>(Status::converged);
    return std::all_of(own, own + batch(), [&](std::int32_t code) { return code == converged; });
  }

  // How each instance ended, (5, B): the residuals, then iterations, status and oracle calls.
  Buffer<double> report() const {
    Buffer<double> found(5, batch());
    double* out = found.data.get();
    out = std::copy_n(primal_residual.data.get(), batch(), out);
    out = std::copy_n(dual_residual.data.get(), batch(), out);
    out = std::copy_n(iterations.data.get(), batch(), out);
    out = std::copy_n(status.data.get(), batch(), out);
    std::copy_n(oracle_calls.data.get(), batch(), out);
    return found;
  }

  // What the derivative needs of each instance that has no structures, side by side, (B, n + dual +
  // 1): the sides of variables and rows, and the status.
  Buffer<std::int8_t> sides() const {
    Buffer<std::int8_t> found(batch(), var_side.columns + row_side.columns + 1);
    std::int8_t* out = found.data.get();
    for (std::size_t i = 0; i < batch(); ++i) {
      out = std::copy_n(var_side.data.get() + i * var_side.columns, var_side.columns, out);
      out = std::copy_n(row_side.data.get() + i * row_side.columns, row_side.columns, out);
      *out++ = static_cast<std::int8_t>(status.data[i]);
    }
    return found;
  }
  void take_sides(const Matrix<const std::int8_t>& given) {
    const std::size_t columns = var_side.columns + row_side.columns + 1;
    require(given.shape(0) == batch() && given.shape(1) == columns, "sides has the wrong shape");
    const std::int8_t* in = given.data();
    for (std::size_t i = 0; i < batch(); ++i) {
      std::copy_n(in, var_side.columns, var_side.data.get() + i * var_side.columns);
      std::copy_n(in + var_side.columns, row_side.columns,
                  row_side.data.get() + i * row_side.columns);
      status.data[i] = in[columns - 1];
      in += columns;
    }
  }

  template <class T>
  Outputs<T> outputs() {
    Typed<T>& own = std::get<Typed<T>>(numbers);
    Outputs<T> out;
    out.mu = own.mu.batched();
    out.mu_v = own.mu_v.batched();
    out.tau = own.tau.batched();
    out.var_side = var_side.batched();
    out.row_side = row_side.batched();
    out.objective = objective.data.get();
    out.primal_residual = primal_residual.data.get();
    out.dual_residual = dual_residual.data.get();
    out.iterations = iterations.data.get();
    out.status = status.data.get();
    out.oracle_calls = oracle_calls.data.get();
    out.upper_bound = upper_bound.data.get();
    out.integral = integral.data.get();
    return out;
  }

  void require_fit(const Model& model, std::size_t size, bool wide) const {
    const std::size_t scores = std::visit(
        [](const auto& own) {
          if constexpr (std::is_same_v<std::decay_t<decltype(own)>, std::monostate>) {
            return std::size_t(0);
          } else {
            return own.mu_v.columns;
          }
        },
        numbers);
    require(batch() == size && var_side.columns == std::size_t(model.num_vars()) &&
                row_side.columns == std::size_t(model.num_dual()) &&
                scores == std::size_t(model.num_scores()) && is_double() == wide,
            "the solution does not fit the inputs");
  }

  std::variant<std::monostate, Typed<double>, Typed<float>> numbers;
  Buffer<std::int8_t> var_side, row_side;
  Buffer<double> objective, primal_residual, dual_residual, upper_bound;
  Buffer<std::int32_t> iterations, status, oracle_calls;
  Buffer<std::uint8_t> integral;
  FoundStructures structures;
};

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

// A component is solved by rows as a whole, or not at all; a sequence is solved by flows or not.
template <class T>
void require_cuts(const Problem<T>& p, std::size_t batch, const FoundStructures& found) {
  const std::size_t factors = static_cast<std::size_t>(p.structured.count);
  require(found.num_cuts.size() == batch * factors, "num_cuts has the wrong shape");
  const std::vector<int> leaders = solved_by_rows_with(p);
  std::size_t members = 0;
  for (std::size_t k = 0; k < found.num_cuts.size(); ++k) {
    const int f = static_cast<int>(k % factors), kind = p.structured.kind[f];
    const bool is_sequence = kind == static_cast<int>(OracleKind::sequence);
    const bool is_tree = kind == static_cast<int>(OracleKind::tree);
    const bool listed = found.num_cuts[k] >= 0, possible = leaders[f] >= 0;
    require((!possible || listed == (found.num_cuts[k - f + leaders[f]] >= 0)) &&
                (possible || is_sequence || !listed) && (found.count[k] == 0 || !listed),
            "num_cuts does not fit the structures");
    if (!listed) continue;
    require(is_tree || found.num_cuts[k] == 1, "a matching, or a sequence, has one list");
    members +=
        static_cast<std::size_t>(found.num_cuts[k]) * static_cast<std::size_t>(list_length(p, f));
  }
  require(members == found.cuts.size(), "cuts has the wrong shape");
}

// The gradients of eta_u and eta_v, and for each instance how well its system was solved.
template <class T>
nb::tuple differentiate(const Inputs& inputs, const Solution& solution, const nb::object& grad_mu,
                        const nb::object& grad_mu_v,
                        const std::optional<Vector<const double>>& grad_prob) {
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
  Buffer<T> grad_eta_u(batch, n), grad_eta_v(batch, scores);
  Buffer<double> residual(batch, 1);
  BatchGradients<T> grads;
  grads.grad_mu = incoming(grad_mu, n, "grad_mu", kept_u);
  grads.grad_mu_v = incoming(grad_mu_v, scores, "grad_mu_v", kept_v);
  grads.var_side = {solution.var_side.data.get(), static_cast<std::int64_t>(n)};
  grads.row_side = {solution.row_side.data.get(),
                    static_cast<std::int64_t>(solution.row_side.columns)};
  grads.status = solution.status.data.get();
  grads.grad_eta_u = grad_eta_u.batched();
  grads.grad_eta_v = grad_eta_v.batched();
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
  return nb::make_tuple(as_matrix(std::move(grad_eta_u)), as_matrix(std::move(grad_eta_v)),
                        as_vector(std::move(residual)), worst);
}

// ---- Python
// --------------------------------------------------------------------------------------

// A field of the structures: seen as a view, set from an array.
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
      .value("absent", Side::absent);
  nb::enum_<CallbackFault>(m, "CallbackFault", nb::is_arithmetic())
      .value("none", CallbackFault::none)
      .value("raised", CallbackFault::raised)
      .value("not_binary", CallbackFault::not_binary)
      .value("forbidden", CallbackFault::forbidden)
      .value("not_finite", CallbackFault::not_finite);
  nb::enum_<Numbers>(m, "Numbers", "What a list of scores holds besides finite numbers.")
      .value("finite", Numbers::finite)
      .value("minus_infinity", Numbers::minus_infinity)
      .value("bad", Numbers::bad, "NaN or +inf.");
}

void bind_inputs(nb::module_& m) {
  nb::class_<Inputs>(m, "Inputs", "The numbers of a batch of instances of a model, checked.")
      .def(nb::init<std::shared_ptr<const Model>, nb::object, nb::object, std::vector<nb::object>,
                    std::optional<Matrix<const bool>>, std::optional<Matrix<const std::int8_t>>>(),
           "model"_a, "eta_u"_a, "eta_v"_a, "params"_a, "mask"_a = nb::none(),
           "held"_a = nb::none())
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

void bind_solution(nb::module_& m) {
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

}  // namespace

void bind_solve(nb::module_& m) {
  bind_enums(m);
  bind_inputs(m);
  bind_settings(m);
  bind_structures(m);
  bind_solution(m);
  m.def(
      "solve",
      [](const Inputs& inputs, const Settings& settings, const nb::object& warm,
         const nb::object& oracles, Solution& out) {
        require(inputs.scores() != Numbers::bad && inputs.factor_scores() != Numbers::bad,
                "the scores hold NaN or +inf");
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
         const nb::object& grad_mu_v, const std::optional<Vector<const double>>& grad_prob) {
        solution.require_fit(inputs.model(), inputs.batch(), inputs.is_double());
        return inputs.is_double()
                   ? differentiate<double>(inputs, solution, grad_mu, grad_mu_v, grad_prob)
                   : differentiate<float>(inputs, solution, grad_mu, grad_mu_v, grad_prob);
      },
      "inputs"_a, "solution"_a, "grad_mu"_a.none(), "grad_mu_v"_a.none(), "grad_prob"_a.none(),
      nb::sig(
          "def vjp(inputs: Inputs, solution: Solution, grad_mu: object | None, grad_mu_v: object | "
          "None, grad_prob: object | None) -> tuple[NDArray[numpy.floating], "
          "NDArray[numpy.floating], NDArray[numpy.float64], float]"),
      "The gradients of eta_u and eta_v; the residual of each instance, and the worst.");
}

}  // namespace factormax::python

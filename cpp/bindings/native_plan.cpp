#include "native_plan.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>

#include "arrays.hpp"
#include "bindings.hpp"
#include "factormax/vector_ops.hpp"
#include "interpreter.hpp"

namespace factormax::python {

using namespace nb::literals;

NativePlan::NativePlan(std::shared_ptr<const Model> model, const Settings& settings,
                       const std::vector<nb::object>& params, bool masked,
                       const std::vector<int>& runs, bool heated)
    : settings_(settings),
      masked_(masked),
      heated_(heated),
      coef_(std::size_t(model->num_entries())),
      rhs_(std::size_t(model->num_rows())),
      narrow_coef_(coef_.size()),
      narrow_rhs_(rhs_.size()) {
  const auto& sizes = model->param_sizes();
  require(params.size() == sizes.size(), "params: one for each parameter of each factor");
  require(model->num_structured() == 0, "structured factors are not solved here");
  require(!heated || !runs.empty(), "only shared scores are divided here");
  if (!runs.empty()) runs_ = {runs, model->num_scores()};
  std::vector<Param> numbers(sizes.size());
  std::vector<double> scalars(sizes.size());
  std::vector<Matrix<const double>> kept(sizes.size());
  for (std::size_t k = 0; k < sizes.size(); ++k) {
    if (PyFloat_Check(params[k].ptr())) {
      scalars[k] = PyFloat_AsDouble(params[k].ptr());
      numbers[k] = {&scalars[k], 0, 0};
      continue;
    }
    require(nb::try_cast(params[k], kept[k], false), "params must be matrices of float64");
    numbers[k] = {batched(kept[k], 1, std::size_t(sizes[k]), "params").data, 0, 1};
  }
  model->write_coefs(numbers, 0, nullptr, coef_.data());
  model->write_bounds(numbers, 0, nullptr, rhs_.data());
  model->write_coefs(numbers, 0, nullptr, narrow_coef_.data());
  model->write_bounds(numbers, 0, nullptr, narrow_rhs_.data());
  model_ = std::move(model);
}

template <class T>
Problem<T> NativePlan::problem() const {
  Problem<T> p = model_->problem<T>();
  if constexpr (std::is_same_v<T, double>) {
    p.coef = {coef_.data(), 0};
    p.rhs = {rhs_.data(), 0};
  } else {
    p.coef = {narrow_coef_.data(), 0};
    p.rhs = {narrow_rhs_.data(), 0};
  }
  return p;
}

// The scores and the mask of a batch, if nothing is wrong with them.
template <class T>
bool NativePlan::take_scores(const FlatArray* given, Problem<T>& p, Kept& kept) const {
  const std::size_t n = p.num_vars, scores = p.num_scores();
  const auto real = nb::dtype<T>();
  if (given[0].shape.size() != 2) return false;
  const FlatArray &eta_u = given[0], &eta_v = given[1];
  const std::size_t batch = eta_u.shape[0];
  if (!eta_u.is(real, {batch, n})) return false;
  p.eta_u = {eta_u.at<const T>(), std::int64_t(n)};
  if (!runs_.runs.empty()) {
    if (!take_mixed_scores(given, p, kept)) return false;
  } else {
    const bool shared = !eta_v.is(real, {batch, scores});
    if (shared && !eta_v.is(real, {1, scores})) return false;
    p.eta_v = {eta_v.at<const T>(), shared ? 0 : std::int64_t(scores)};
    if (!all_finite(p.eta_v.data, std::int64_t(scores * (shared ? 1 : batch)))) return false;
  }
  const bool finite = all_finite(p.eta_u.data, std::int64_t(batch * n));
  if (finite && !masked_) return true;
  Batched<const bool> mask;
  if (masked_) {
    const FlatArray& own = given[2];
    const bool alone = !own.is(nb::dtype<bool>(), {batch, n});
    if (alone && !own.is(nb::dtype<bool>(), {1, n})) return false;
    mask = {own.at<const bool>(), alone ? 0 : std::int64_t(n)};
  }
  std::vector<std::uint8_t>& here = kept.here;
  here.resize(batch * n);
  for (std::size_t i = 0; i < batch; ++i) {
    const T* score = p.eta_u.at(std::int64_t(i));
    const bool* own = mask.at(std::int64_t(i));
    for (std::size_t j = 0; j < n; ++j) {
      const bool present = own == nullptr || own[j];
      if (present && (std::isnan(score[j]) || score[j] == std::numeric_limits<T>::infinity())) {
        return false;
      }
      here[i * n + j] = present && !std::isinf(score[j]);
    }
  }
  p.mask = {here.data(), std::int64_t(n)};
  return true;
}

// The same for factor scores of which the instances share some.
template <class T>
bool NativePlan::take_mixed_scores(const FlatArray* given, Problem<T>& p, Kept& kept) const {
  const auto real = nb::dtype<T>();
  const std::size_t batch = given[0].shape[0], columns = p.num_scores() - runs_.num_shared;
  const FlatArray &own = given[1], &shared = given[2u + masked_];
  if (!own.is(real, {batch, columns}) || !shared.is(real, {1, runs_.num_shared})) return false;
  p.mixed.runs = runs_.span();
  p.mixed.own = {own.at<const T>(), std::int64_t(columns)};
  p.mixed.shared = shared.at<const T>();
  if (!all_finite(p.mixed.own.data, std::int64_t(batch * columns)) ||
      !all_finite(p.mixed.shared, std::int64_t(runs_.num_shared))) {
    return false;
  }
  if (!heated_) return true;
  const FlatArray& heat = given[3u + masked_];
  if (!heat.is(real, {batch, 1})) return false;
  kept.heat.assign(heat.at<const T>(), heat.at<const T>() + batch);
  p.mixed.heat = {kept.heat.data(), 1};
  const std::vector<T> cooled =
      coldest(Span<const T>{p.mixed.shared, static_cast<int>(runs_.num_shared)},
              Span<const double>{kept.heat.data(), static_cast<int>(batch)});
  return all_finite(cooled.data(), std::int64_t(cooled.size()));
}

template <class T>
bool NativePlan::solve(const FlatCall& call, Control& control) const {
  Problem<T> p = problem<T>();
  Kept kept;
  const auto &in = call.given, &out = call.wanted;
  if (in.size() != num_given() || out.size() != 6) return false;
  if (!take_scores(in.data(), p, kept)) return false;
  const std::size_t batch = in[0].shape[0], n = p.num_vars, dual = p.num_dual();
  const auto real = nb::dtype<T>();
  if (!out[0].is(real, {batch, n}) || !out[1].is(real, {batch, std::size_t(p.num_scores())}) ||
      !out[2].is(real, {batch, 1}) || !out[3].is(real, {batch, dual}) ||
      !out[4].is(nb::dtype<std::int8_t>(), {batch, n + dual + 1}) || !out[5].is(real, {batch, 5})) {
    return false;
  }
  std::vector<double> numbers(4 * batch);
  std::vector<std::int32_t> counts(3 * batch);
  std::vector<std::uint8_t> integral(batch);
  std::vector<std::int8_t> var_side(batch * n), row_side(batch * dual);
  double *objective = numbers.data(), *primal = objective + batch, *other = primal + batch;
  std::int32_t *status = counts.data(), *passes = status + batch, *calls = passes + batch;
  Outputs<T> outputs;
  outputs.mu = {out[0].at<T>(), std::int64_t(n)};
  outputs.mu_v = {out[1].at<T>(), std::int64_t(p.num_scores())};
  outputs.tau = {out[3].at<T>(), std::int64_t(dual)};
  outputs.var_side = {var_side.data(), std::int64_t(n)};
  outputs.row_side = {row_side.data(), std::int64_t(dual)};
  outputs.objective = objective;
  outputs.primal_residual = primal;
  outputs.dual_residual = other;
  outputs.upper_bound = other + batch;
  outputs.status = status;
  outputs.iterations = passes;
  outputs.oracle_calls = calls;
  outputs.integral = integral.data();
  FoundStructures structures;
  solve_batch<T>(p, std::int64_t(batch), settings_.method, settings_.options, {}, outputs,
                 structures, control);
  if (control.out_of_memory.load()) throw std::bad_alloc();
  T *value = out[2].at<T>(), *report = out[5].at<T>();
  std::int8_t* sides = out[4].at<std::int8_t>();
  for (std::size_t i = 0; i < batch; ++i) {
    value[i] = T(objective[i]);
    sides = std::copy_n(var_side.data() + i * n, n, sides);
    sides = std::copy_n(row_side.data() + i * dual, dual, sides);
    *sides++ = static_cast<std::int8_t>(status[i]);
    for (const double number :
         {primal[i], other[i], double(passes[i]), double(status[i]), double(calls[i])}) {
      *report++ = T(number);
    }
    // An infeasible instance has its certificate there, which JAX does not use.
    const bool proved = status[i] == static_cast<std::int32_t>(Status::infeasible);
    if (proved) std::fill_n(outputs.tau.at(std::int64_t(i)), dual, T(0));
  }
  return true;
}

template <class T>
bool NativePlan::apply_jacobian(const FlatCall& call, Control& control) const {
  Problem<T> p = problem<T>();
  Kept kept;
  const auto &in = call.given, &out = call.wanted;
  if (in.size() != num_given() + 4 || out.size() != 2) return false;
  if (!take_scores(in.data() + 2, p, kept)) return false;
  const std::size_t batch = in[2].shape[0], n = p.num_vars, dual = p.num_dual();
  const std::size_t scores = p.num_scores(), directions = in[0].shape.empty() ? 0 : in[0].shape[0];
  const auto real = nb::dtype<T>();
  for (const auto* arrays : {&in, &out}) {
    if (!(*arrays)[0].is(real, {directions, batch, n}) ||
        !(*arrays)[1].is(real, {directions, batch, scores})) {
      return false;
    }
  }
  const FlatArray& given_sides = in[in.size() - 2];
  if (!given_sides.is(nb::dtype<std::int8_t>(), {batch, n + dual + 1})) return false;
  const std::int8_t* sides = given_sides.at<const std::int8_t>();
  const std::int64_t stride = std::int64_t(n + dual + 1);
  std::vector<std::int32_t> status(batch);
  for (std::size_t i = 0; i < batch; ++i) status[i] = sides[(i + 1) * (n + dual + 1) - 1];
  std::vector<double> residual(batch);
  BatchGradients<T> grads;
  grads.var_side = {sides, stride};
  grads.row_side = {sides + n, stride};
  grads.status = status.data();
  grads.residual = residual.data();
  for (std::size_t k = 0; k < directions; ++k) {
    grads.grad_mu = {in[0].at<const T>() + k * batch * n, std::int64_t(n)};
    grads.grad_mu_v = {in[1].at<const T>() + k * batch * scores, std::int64_t(scores)};
    grads.grad_eta_u = {out[0].at<T>() + k * batch * n, std::int64_t(n)};
    grads.grad_eta_v = {out[1].at<T>() + k * batch * scores, std::int64_t(scores)};
    vjp_batch<T>(p, std::int64_t(batch), grads, control);
    if (control.out_of_memory.load()) throw std::bad_alloc();
  }
  return true;
}

namespace {

bool is_wide(const FlatCall& call) {
  return !call.wanted.empty() && call.wanted[0].type == nb::dtype<double>();
}

}  // namespace

bool NativePlan::solve(const FlatCall& call, Control& control) const {
  return is_wide(call) ? solve<double>(call, control) : solve<float>(call, control);
}

bool NativePlan::apply_jacobian(const FlatCall& call, Control& control) const {
  return is_wide(call) ? apply_jacobian<double>(call, control)
                       : apply_jacobian<float>(call, control);
}

namespace {

// False if one of them has gaps, or may not be written to.
template <class Kind>
bool take_arrays(nb::list arrays, std::vector<FlatArray>& found) {
  found.reserve(arrays.size());
  for (const nb::handle given : arrays) {
    nb::ndarray<Kind, nb::c_contig, nb::device::cpu> own;
    if (!nb::try_cast(given, own, false)) return false;
    found.push_back({const_cast<void*>(static_cast<const void*>(own.data())),
                     {own.shape_ptr(), own.shape_ptr() + own.ndim()},
                     own.dtype()});
  }
  return true;
}

using Function = bool (NativePlan::*)(const FlatCall&, Control&) const;

// A function of the plan, on NumPy arrays, which the caller keeps alive.
auto called(Function function) {
  return [function](const NativePlan& plan, nb::list given, nb::list wanted) {
    FlatCall call;
    if (!take_arrays<nb::ro>(given, call.given)) return false;
    if (!take_arrays<nb::numpy>(wanted, call.wanted)) return false;
    Control control;
    control.poll = &poll_signals;
    bool done = false;
    without_gil([&] { done = (plan.*function)(call, control); });
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return done;
  };
}

}  // namespace

void bind_native_plan(nb::module_& m) {
  nb::class_<NativePlan>(m, "NativePlan",
                         "A graph of rows and pairs that is solved from flat arrays. The functions "
                         "take those of a\nprimitive of JAX and those to write into; False if "
                         "Python must answer.")
      .def(nb::init<std::shared_ptr<const Model>, const Settings&, const std::vector<nb::object>&,
                    bool, const std::vector<int>&, bool>(),
           "model"_a, "settings"_a, "params"_a, "masked"_a, "runs"_a = std::vector<int>(),
           "heated"_a = false,
           "runs: how many factor scores are shared, not shared, and so on; if there are any, the "
           "shared\nones are an array of their own, after the mask, and what divides them, if "
           "`heated`, is another.")
      .def("solve", called(static_cast<Function>(&NativePlan::solve)),
           nb::sig("def solve(self, given: list[object], wanted: list[object]) -> bool"))
      .def("apply_jacobian", called(static_cast<Function>(&NativePlan::apply_jacobian)),
           nb::sig("def apply_jacobian(self, given: list[object], wanted: list[object]) -> bool"));
}

}  // namespace factormax::python

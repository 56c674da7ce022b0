// What XLA calls, without Python in between: handlers of its typed FFI for the primitives of JAX.
//
// A call names its graph by a text, so that it can be exported. Of graphs made of rows and pairs,
// whose parameters are known, the model is kept here by that text, and they are solved at once. All
// other calls go on to Python, with arrays that look into the buffers of XLA.
//
// Compiled only where the headers of a jaxlib were found: see CMakeLists.txt.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "bindings.hpp"
#include "factormax/model.hpp"
#include "settings.hpp"

#ifdef FACTORMAX_FFI

#include <algorithm>
#include <cmath>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "factormax/vector_ops.hpp"
#include "interpreter.hpp"
#include "xla/ffi/api/ffi.h"

namespace factormax::python {

namespace xffi = xla::ffi;

namespace {

// ---- Graphs that are solved without Python
// -------------------------------------------------------

// A graph of rows and pairs, and how to solve it. The rows are worked out once.
struct NativePlan {
  std::shared_ptr<const Model> model;
  Settings settings;
  bool masked = false;  // whether the third array is a mask
  std::vector<double> coef, rhs;
  std::vector<float> narrow_coef, narrow_rhs;

  template <class T>
  Problem<T> problem() const {
    Problem<T> p = model->problem<T>();
    if constexpr (std::is_same_v<T, double>) {
      p.coef = {coef.data(), 0};
      p.rhs = {rhs.data(), 0};
    } else {
      p.coef = {narrow_coef.data(), 0};
      p.rhs = {narrow_rhs.data(), 0};
    }
    return p;
  }
};

constexpr std::size_t kMostPlans = 256;
std::shared_mutex plans_mutex;
std::unordered_map<std::string, std::shared_ptr<const NativePlan>> plans;
PyObject* python = nullptr;  // what is called for all others; lives as long as the interpreter

std::shared_ptr<const NativePlan> find_plan(const std::string& text) {
  const std::shared_lock lock(plans_mutex);
  const auto found = plans.find(text);
  return found == plans.end() ? nullptr : found->second;
}

void keep_plan(const std::string& text, std::shared_ptr<const Model> model,
               const Settings& settings, const std::vector<nb::object>& params, bool masked) {
  const auto& sizes = model->param_sizes();
  require(params.size() == sizes.size(), "params: one for each parameter of each factor");
  require(model->num_structured() == 0, "structured factors are not solved here");
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
  auto plan = std::make_shared<NativePlan>();
  plan->settings = settings;
  plan->masked = masked;
  plan->coef.resize(std::size_t(model->num_entries()));
  plan->rhs.resize(std::size_t(model->num_rows()));
  plan->narrow_coef.resize(plan->coef.size());
  plan->narrow_rhs.resize(plan->rhs.size());
  model->write_coefs(numbers, 0, nullptr, plan->coef.data());
  model->write_bounds(numbers, 0, nullptr, plan->rhs.data());
  model->write_coefs(numbers, 0, nullptr, plan->narrow_coef.data());
  model->write_bounds(numbers, 0, nullptr, plan->narrow_rhs.data());
  plan->model = std::move(model);
  const std::unique_lock lock(plans_mutex);
  if (plans.size() >= kMostPlans) plans.clear();  // those that are in use come again
  plans[text] = std::move(plan);
}

// ---- The arrays of a call
// ------------------------------------------------------------------------

struct Array {
  void* data;
  std::vector<std::size_t> shape;
  xffi::DataType type;

  bool is(std::initializer_list<std::size_t> wanted) const {
    return std::equal(shape.begin(), shape.end(), wanted.begin(), wanted.end());
  }
  template <class T>
  T* at() const {
    return static_cast<T*>(data);
  }
};

Array array_of(const xffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {buffer.untyped_data(), {dims.begin(), dims.end()}, buffer.element_type()};
}

struct Call {
  std::vector<Array> given, wanted;
  std::string text;
};

template <class T>
constexpr xffi::DataType type_of() {
  return std::is_same_v<T, double> ? xffi::DataType::F64 : xffi::DataType::F32;
}

bool poll() {
  const bool stop = poll_signals();
  if (stop && !ending.excludes_me()) {
    // Nothing can be raised from here: once more, for Python to see when the call returns.
    const GilAcquired gil;
    PyErr_Clear();
    PyErr_SetInterrupt();
  }
  return stop;
}

// The scores and the mask of a batch, if nothing is wrong with them: Python knows what to do then.
template <class T>
bool take_scores(const NativePlan& plan, const Array* given, std::size_t count, Problem<T>& p,
                 std::vector<std::uint8_t>& here) {
  const std::size_t n = p.num_vars, scores = p.num_scores();
  if (count < 2u + plan.masked) return false;
  const Array &eta_u = given[0], &eta_v = given[1];
  if (eta_u.type != type_of<T>() || eta_v.type != type_of<T>() || eta_u.shape.size() != 2) {
    return false;
  }
  const std::size_t batch = eta_u.shape[0];
  const bool shared = !eta_v.is({batch, scores});
  if (eta_u.shape[1] != n || (shared && !eta_v.is({1, scores}))) return false;
  p.eta_u = {eta_u.at<const T>(), std::int64_t(n)};
  p.eta_v = {eta_v.at<const T>(), shared ? 0 : std::int64_t(scores)};
  if (!all_finite(p.eta_v.data, std::int64_t(scores * (shared ? 1 : batch)))) return false;
  const bool finite = all_finite(p.eta_u.data, std::int64_t(batch * n));
  if (finite && !plan.masked) return true;
  Batched<const bool> mask;
  if (plan.masked) {
    const Array& own = given[2];
    if (own.type != xffi::DataType::PRED || !(own.is({batch, n}) || own.is({1, n}))) return false;
    mask = {own.at<const bool>(), own.is({batch, n}) ? std::int64_t(n) : 0};
  }
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

// What a primitive of this name returns, if it can be had without Python.
template <class T>
bool solve_natively(const NativePlan& plan, const Call& call) {
  Problem<T> p = plan.problem<T>();
  std::vector<std::uint8_t> here;
  if (call.wanted.size() != 6 ||
      !take_scores(plan, call.given.data(), call.given.size(), p, here)) {
    return false;
  }
  const std::size_t batch = call.given[0].shape[0], n = p.num_vars, dual = p.num_dual();
  const auto& out = call.wanted;
  if (!out[0].is({batch, n}) || !out[1].is({batch, std::size_t(p.num_scores())}) ||
      !out[2].is({batch, 1}) || !out[3].is({batch, dual}) || !out[4].is({batch, n + dual + 1}) ||
      !out[5].is({batch, 5})) {
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
  Control control;
  control.poll = &poll;
  FoundStructures structures;
  solve_batch<T>(p, std::int64_t(batch), plan.settings.method, plan.settings.options, {}, outputs,
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
    // An infeasible instance has its certificate there, of which JAX makes no use.
    const bool proved = status[i] == static_cast<std::int32_t>(Status::infeasible);
    if (proved) std::fill_n(outputs.tau.at(std::int64_t(i)), dual, T(0));
  }
  return true;
}

template <class T>
bool differentiate_natively(const NativePlan& plan, const Call& call) {
  Problem<T> p = plan.problem<T>();
  std::vector<std::uint8_t> here;
  const auto &in = call.given, &out = call.wanted;
  if (in.size() != 6u + plan.masked || out.size() != 2 ||
      !take_scores(plan, in.data() + 2, in.size() - 4, p, here)) {
    return false;
  }
  const std::size_t batch = in[2].shape[0], n = p.num_vars, dual = p.num_dual();
  const std::size_t scores = p.num_scores(), directions = in[0].shape.empty() ? 0 : in[0].shape[0];
  const Array& sides = in[in.size() - 2];
  for (const auto* arrays : {&in, &out}) {
    if (!(*arrays)[0].is({directions, batch, n}) || !(*arrays)[1].is({directions, batch, scores}) ||
        (*arrays)[0].type != type_of<T>() || (*arrays)[1].type != type_of<T>()) {
      return false;
    }
  }
  if (!sides.is({batch, n + dual + 1}) || sides.type != xffi::DataType::S8) return false;
  std::vector<std::int32_t> status(batch);
  for (std::size_t i = 0; i < batch; ++i) {
    status[i] = sides.at<const std::int8_t>()[(i + 1) * (n + dual + 1) - 1];
  }
  std::vector<double> residual(batch);
  BatchGradients<T> grads;
  grads.var_side = {sides.at<const std::int8_t>(), std::int64_t(n + dual + 1)};
  grads.row_side = {sides.at<const std::int8_t>() + n, std::int64_t(n + dual + 1)};
  grads.status = status.data();
  grads.residual = residual.data();
  Control control;
  control.poll = &poll;
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

// ---- All others
// ----------------------------------------------------------------------------------

nb::dlpack::dtype dtype_of(xffi::DataType type) {
  switch (type) {
    case xffi::DataType::F64:
      return nb::dtype<double>();
    case xffi::DataType::F32:
      return nb::dtype<float>();
    case xffi::DataType::S8:
      return nb::dtype<std::int8_t>();
    case xffi::DataType::S32:
      return nb::dtype<std::int32_t>();
    case xffi::DataType::S64:
      return nb::dtype<std::int64_t>();
    case xffi::DataType::PRED:
      return nb::dtype<bool>();
    default:
      throw std::invalid_argument("factormax: an array of a dtype that it does not take");
  }
}

nb::list seen_by_python(const std::vector<Array>& arrays) {
  static double nothing = 0;  // where an array without numbers lies
  nb::list found;
  for (const Array& a : arrays) {
    const nb::ndarray<nb::numpy> view(a.data == nullptr ? &nothing : a.data, a.shape.size(),
                                      a.shape.data(), nb::handle(), nullptr, dtype_of(a.type));
    found.append(nb::cast(view, nb::rv_policy::reference));
  }
  return found;
}

xffi::Error call_python(const char* name, const Call& call) {
  const GilAcquired gil;
  try {
    const nb::handle function(python);
    function(name, call.text, seen_by_python(call.given), seen_by_python(call.wanted));
  } catch (const std::exception& error) {
    return xffi::Error(xffi::ErrorCode::kInternal, error.what());
  }
  return xffi::Error::Success();
}

using Natively = bool (*)(const NativePlan&, const Call&);

xffi::Error run(const char* name, Natively wide, Natively narrow, xffi::RemainingArgs args,
                xffi::RemainingRets rets, std::string_view text) {
  try {
    Call call{{}, {}, std::string(text)};
    for (std::size_t k = 0; k < args.size(); ++k) {
      auto buffer = args.get<xffi::AnyBuffer>(k);
      if (!buffer.has_value()) return buffer.error();
      call.given.push_back(array_of(*buffer));
    }
    for (std::size_t k = 0; k < rets.size(); ++k) {
      auto buffer = rets.get<xffi::AnyBuffer>(k);
      if (!buffer.has_value()) return buffer.error();
      call.wanted.push_back(array_of(**buffer));
    }
    const auto plan = wide == nullptr ? nullptr : find_plan(call.text);
    if (plan != nullptr && !call.wanted.empty()) {
      const bool is_wide = call.wanted[0].type == xffi::DataType::F64;
      if ((is_wide ? wide : narrow)(*plan, call)) return xffi::Error::Success();
    }
    return call_python(name, call);
  } catch (const std::exception& error) {
    return xffi::Error(xffi::ErrorCode::kInternal, error.what());
  }
}

template <class Function>
nb::capsule capsule_of(Function* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// A handler that runs a function of this name.
#define FACTORMAX_HANDLER(name, wide, narrow)                                          \
  XLA_FFI_DEFINE_HANDLER(                                                              \
      name,                                                                            \
      +[](xffi::RemainingArgs args, xffi::RemainingRets rets, std::string_view text) { \
        return run(#name, wide, narrow, args, rets, text);                             \
      },                                                                               \
      xffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<std::string_view>("plan"))

nb::dict handlers() {
  FACTORMAX_HANDLER(solve, solve_natively<double>, solve_natively<float>);
  FACTORMAX_HANDLER(apply_jacobian, differentiate_natively<double>, differentiate_natively<float>);
  FACTORMAX_HANDLER(pull_back, nullptr, nullptr);
  FACTORMAX_HANDLER(features, nullptr, nullptr);
  nb::dict found;
  found["solve"] = capsule_of(solve);
  found["apply_jacobian"] = capsule_of(apply_jacobian);
  found["pull_back"] = capsule_of(pull_back);
  found["features"] = capsule_of(features);
  return found;
}

void set_python(nb::object function) {
  Py_XDECREF(python);
  python = function.release().ptr();
}

}  // namespace
}  // namespace factormax::python

#else

#define FACTORMAX_FFI ""

namespace factormax::python {
namespace {

nb::dict handlers() { return nb::dict(); }
void set_python(const nb::object&) {}
void keep_plan(const std::string&, std::shared_ptr<const Model>, const Settings&,
               const std::vector<nb::object>&, bool) {}

}  // namespace
}  // namespace factormax::python

#endif

namespace factormax::python {

void bind_ffi(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "ffi_version", [] { return std::string(FACTORMAX_FFI); },
      "The jaxlib whose headers the handlers were compiled with; empty: there are none.");
  m.def("ffi_handlers", &handlers, nb::sig("def ffi_handlers() -> dict[str, object]"),
        "What XLA calls for each primitive, as capsules.");
  m.def("ffi_set_python", &set_python, "function"_a,
        "What is called for graphs that are not kept: with the name of the primitive, the text, "
        "the arrays\nand those to write into.");
  m.def("ffi_keep", &keep_plan, "text"_a, "model"_a, "settings"_a, "params"_a, "masked"_a,
        "Solves the graph that has this text without Python from now on.");
}

}  // namespace factormax::python

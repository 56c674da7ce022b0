// What XLA calls, without Python in between: handlers of its typed FFI for the primitives of JAX.
//
// A call names its graph by a text, so that it can be exported. Plans of graphs made of rows and
// pairs are kept here by that text, and solved at once. All other calls go on to Python, with
// arrays that look into the buffers of XLA.
//
// Compiled only where the headers of a jaxlib were found: see CMakeLists.txt.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"
#include "native_plan.hpp"

#ifdef FACTORMAX_FFI

#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "interpreter.hpp"
#include "xla/ffi/api/ffi.h"

namespace factormax::python {

namespace nb = nanobind;
namespace xffi = xla::ffi;

namespace {

// ---- Graphs that are solved without Python

constexpr std::size_t kMostPlans = 256;
std::shared_mutex plans_mutex;
std::unordered_map<std::string, std::shared_ptr<const NativePlan>> plans;
PyObject* python = nullptr;  // called for all others; lives as long as the interpreter

std::shared_ptr<const NativePlan> find_plan(const std::string& text) {
  const std::shared_lock lock(plans_mutex);
  const auto found = plans.find(text);
  return found == plans.end() ? nullptr : found->second;
}

void keep_plan(const std::string& text, const NativePlan& plan) {
  const std::unique_lock lock(plans_mutex);
  if (plans.size() >= kMostPlans) plans.clear();  // those in use come back
  plans[text] = std::make_shared<const NativePlan>(plan);
}

bool poll() {
  const bool stop = poll_signals();
  if (stop && !ending.excludes_me()) {
    // Nothing can be raised from here: interrupts again, for Python to see when the call returns.
    const GilAcquired gil;
    PyErr_Clear();
    PyErr_SetInterrupt();
  }
  return stop;
}

// ---- All others

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

FlatArray array_of(const xffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {buffer.untyped_data(), {dims.begin(), dims.end()}, dtype_of(buffer.element_type())};
}

nb::list seen_by_python(const std::vector<FlatArray>& arrays) {
  static double nothing = 0;  // the address of an array without numbers
  nb::list found;
  for (const FlatArray& a : arrays) {
    const nb::ndarray<nb::numpy> view(a.data == nullptr ? &nothing : a.data, a.shape.size(),
                                      a.shape.data(), nb::handle(), nullptr, a.type);
    found.append(nb::cast(view, nb::rv_policy::reference));
  }
  return found;
}

xffi::Error call_python(const char* name, const std::string& text, const FlatCall& call) {
  const GilAcquired gil;
  try {
    const nb::handle function(python);
    function(name, text, seen_by_python(call.given), seen_by_python(call.wanted));
  } catch (const std::exception& error) {
    return xffi::Error(xffi::ErrorCode::kInternal, error.what());
  }
  return xffi::Error::Success();
}

using Natively = bool (NativePlan::*)(const FlatCall&, Control&) const;

xffi::Error run(const char* name, Natively natively, xffi::RemainingArgs args,
                xffi::RemainingRets rets, std::string_view view) {
  try {
    const std::string text(view);
    FlatCall call;
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
    const auto plan = natively == nullptr ? nullptr : find_plan(text);
    Control control;
    control.poll = &poll;
    if (plan != nullptr && (plan.get()->*natively)(call, control)) return xffi::Error::Success();
    return call_python(name, text, call);
  } catch (const std::exception& error) {
    return xffi::Error(xffi::ErrorCode::kInternal, error.what());
  }
}

template <class Function>
nb::capsule capsule_of(Function* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// A handler that runs the function of this name.
#define FACTORMAX_HANDLER(name, natively)                                              \
  XLA_FFI_DEFINE_HANDLER(                                                              \
      name,                                                                            \
      +[](xffi::RemainingArgs args, xffi::RemainingRets rets, std::string_view text) { \
        return run(#name, natively, args, rets, text);                                 \
      },                                                                               \
      xffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<std::string_view>("plan"))

nb::dict handlers() {
  FACTORMAX_HANDLER(solve, &NativePlan::solve);
  FACTORMAX_HANDLER(apply_jacobian, &NativePlan::apply_jacobian);
  FACTORMAX_HANDLER(pull_back, nullptr);
  FACTORMAX_HANDLER(features, nullptr);
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

namespace nb = nanobind;

namespace {

nb::dict handlers() { return nb::dict(); }
void set_python(const nb::object&) {}
void keep_plan(const std::string&, const NativePlan&) {}

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
  m.def("ffi_keep", &keep_plan, "text"_a, "plan"_a,
        "Solves the graph that has this text without Python from now on.");
}

}  // namespace factormax::python

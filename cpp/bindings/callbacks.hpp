// Oracles of the user's own: Python functions, or C functions by their address.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "factormax/problem.hpp"
#include "factormax/structured/oracle.hpp"
#include "interpreter.hpp"

namespace factormax::python {

// What Python functions raise, kept until the solve has ended. All of this needs the GIL.
struct PythonOracle {
  nb::object function;
  nb::object* raised = nullptr;  // shared by all: the first exception
};

// What was raised, with its traceback. Before Python 3.12 that may still be a class and its
// argument, which older nanobind passes on separately.
inline nb::object exception_of(nb::python_error& error) {
#if PY_VERSION_HEX < 0x030C0000
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  error.restore();
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return nb::steal(value);
#else
  return nb::borrow(error.value());
#endif
}

// function(instance, eta_u, eta_v) -> (m, n), arrays of float64, or None if there is no structure.
inline int call_python(const double* eta_u, std::int64_t d, const double* eta_v, std::int64_t s,
                       double* m, double* n, void* context, std::int64_t instance) {
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
    *oracle->raised = exception_of(error);
  } catch (const std::exception& error) {
    nb::object type = nb::borrow(PyExc_ValueError);
    *oracle->raised = type(error.what());
  }
  return -1;
}

// One entry per structured factor: None, a Python function, or (address, data) of a C function.
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
      CallbackFunction& function = functions_[f];
      function.fault = &faults_[f];
      if (entry.is_none()) continue;
      if (nb::isinstance<nb::tuple>(entry)) {
        const auto pair = nb::cast<nb::tuple>(entry);
        function.call = reinterpret_cast<CallbackFunction::Call>(nb::cast<std::uintptr_t>(pair[0]));
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
      if (p.structured.kind[f] != static_cast<int>(OracleKind::callback)) continue;
      require(!functions_.empty() && functions_[f].call != nullptr,
              "a structured factor of the user's own has no callback");
    }
    p.structured.callback = functions_.empty() ? nullptr : functions_.data();
  }

  // The first factor whose answer was no structure, and what was wrong with it.
  std::pair<int, int> fault() const {
    for (std::size_t f = 0; f < faults_.size(); ++f) {
      if (faults_[f].load() != static_cast<int>(CallbackFault::none)) {
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
  std::vector<CallbackFunction> functions_;
  std::vector<PythonOracle> python_;
  std::vector<std::atomic<int>> faults_;
  nb::object raised_;
};

}  // namespace factormax::python

// The extension module. The bindings are the only part of the C++ that knows Python: they check
// what they are given, so that no call can read or write out of bounds, and release the GIL.
#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "factormax/parallel.hpp"
#include "interpreter.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace factormax::python;

NB_MODULE(_core, m) {
  m.doc() = "The native core of factormax.";
  nb::set_leak_warnings(false);  // models that are remembered live as long as the interpreter
  for (const auto bind : {bind_enums, bind_inputs, bind_settings, bind_solution, bind_solve,
                          bind_model, bind_search, bind_native_plan, bind_ffi}) {
    bind(m);
  }
  m.def("set_num_threads", &factormax::set_num_threads, "threads"_a);
  m.def("get_num_threads", &factormax::get_num_threads);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&begin_ending));
}

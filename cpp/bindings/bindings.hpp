// What each file of the bindings adds to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace factormax::python {

void bind_model(nanobind::module_& m);
void bind_enums(nanobind::module_& m);
void bind_inputs(nanobind::module_& m);
void bind_settings(nanobind::module_& m);
void bind_solution(nanobind::module_& m);
void bind_solve(nanobind::module_& m);
void bind_search(nanobind::module_& m);
void bind_native_plan(nanobind::module_& m);
void bind_ffi(nanobind::module_& m);

}  // namespace factormax::python

// The hook that a framework calls for each parameter of each backward.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

/// Adds the class GradientHook to the module.
void bind_gradient_hook(nanobind::module_& m);

}  // namespace paceline

// Whether our hooks are still the last ones of their parameters.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

/// Adds the class HookOrder to the module.
void bind_hook_order(nanobind::module_& m);

}  // namespace paceline

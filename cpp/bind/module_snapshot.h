// What a module holds, to be compared with what it holds later.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

/// Adds the class ModuleSnapshot to the module.
void bind_module_snapshot(nanobind::module_& m);

}  // namespace paceline

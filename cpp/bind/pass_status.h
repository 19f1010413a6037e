// Adds the class PassStatus to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

void bind_pass_status(nanobind::module_& m);

}  // namespace paceline

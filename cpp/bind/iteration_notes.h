// What this rank does between two passes, as the note that it tells the others.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

/// Adds the class IterationNotes, and pack_note(), to the module.
void bind_iteration_notes(nanobind::module_& m);

}  // namespace paceline

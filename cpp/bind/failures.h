// Failures of the core as Python exceptions. Python writes the messages
// (collectives/failures.py); this file only collects the facts.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "collectives/host_group.h"

namespace paceline {

/// Passes the facts to the factory and sets the result as Python's exception,
/// unless one is set already.
void set_error(const Failure& failure, HostGroup* group);
/// Does the same, and throws it.
[[noreturn]] void raise_failure(const Failure& failure, HostGroup* group);

/// The message for other ranks about the exception that a signal handler has
/// raised.
std::string describe_interruption();

nanobind::dict describe_failure(const Failure& failure, HostGroup* group);
nanobind::list describe_ranks(const HostGroup& group);

}  // namespace paceline

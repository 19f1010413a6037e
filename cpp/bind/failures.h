// Failures of the core as Python exceptions. The words are written in Python
// (collectives/failures.py); here only the facts are collected.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "collectives/host_group.h"

namespace paceline {

/// Sets what the factory makes of the facts as Python's exception, unless one
/// is set already.
void set_error(const Failure& failure, HostGroup* group);
/// Raises the same.
[[noreturn]] void raise_failure(const Failure& failure, HostGroup* group);

/// What other ranks are told of the exception that a signal handler has raised.
std::string describe_interruption();

nanobind::dict describe_failure(const Failure& failure, HostGroup* group);
nanobind::list describe_ranks(const HostGroup& group);

}  // namespace paceline

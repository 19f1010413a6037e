// What a thread does around sleeping, and how long it is willing to wait.
#pragma once

#include "core/failure.h"

namespace paceline {

/// How long the calls of one user of a group wait.
struct Patience {
  double timeout_s;
  double warn_after_s;
};

/// The core knows nothing of Python's lock and signals; the binding does.
struct Hooks {
  virtual ~Hooks() = default;
  /// About to sleep.
  virtual void before_block() {}
  /// A signal arrived (`by_signal`), or may have: true gives the call up.
  virtual bool interrupted(bool /*by_signal*/) { return false; }
  /// Waited for the warning time.
  virtual void slow(const Failure& /*so_far*/) {}
  /// How long to wait. Null: as the group does.
  const Patience* patience = nullptr;
};

/// The hooks of the call that this thread is in; null: it is in none.
inline thread_local Hooks* current_hooks = nullptr;

}  // namespace paceline

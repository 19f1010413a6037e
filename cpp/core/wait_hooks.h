// What a thread does before and while it sleeps, and how long it waits.
#pragma once

#include "core/failure.h"

namespace paceline {

/// How long the calls of one user of a group wait.
struct Patience {
  double timeout_s;
  double warn_after_s;
};

/// Python's lock and signals, which only the binding knows.
struct WaitHooks {
  virtual ~WaitHooks() = default;
  /// About to sleep.
  virtual void before_block() {}
  /// A signal arrived (`by_signal`), or may have arrived. True ends the call.
  virtual bool interrupted(bool /*by_signal*/) { return false; }
  /// The call has waited for the warning time.
  virtual void slow(const Failure& /*so_far*/) {}
  /// How long to wait; null: as long as the group does.
  const Patience* patience = nullptr;
};

/// The hooks of the call that this thread is in; null: it is in no call.
inline thread_local WaitHooks* current_hooks = nullptr;

}  // namespace paceline

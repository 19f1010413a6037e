// Python's lock and signals around one call into the core.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>

#include "bind/failures.h"
#include "collectives/host_group.h"

namespace paceline {

/// Calls that have given Python's lock away and not taken it back yet. At the
/// end of the interpreter their threads would be ended inside of C++, which
/// ends the process; so the interpreter waits for them.
inline std::atomic<int> calls_without_lock{0};

/// Gives Python's lock away when the call sleeps (or at once), and takes it
/// back at the call's end or when Python must be asked something.
class CallHooks final : public Hooks {
 public:
  CallHooks(HostGroup* group, const nanobind::object& slow, bool unlock_now)
      : group_(group), slow_(slow) {
    current_hooks = this;
    if (unlock_now) before_block();
  }
  ~CallHooks() override {
    current_hooks = outer_;
    lock();
  }
  CallHooks(const CallHooks&) = delete;
  CallHooks& operator=(const CallHooks&) = delete;

  void before_block() override {
    if (saved_ != nullptr) return;
    calls_without_lock.fetch_add(1);
    saved_ = PyEval_SaveThread();
  }
  void lock() {
    if (saved_ == nullptr) return;
    PyEval_RestoreThread(saved_);
    saved_ = nullptr;
    calls_without_lock.fetch_sub(1);
  }
  bool interrupted() override {
    lock();
    const bool raised = PyErr_CheckSignals() != 0;
    // The exception stays set; raise_failure() hands it on.
    if (!raised) before_block();
    return raised;
  }
  void slow(const Failure& so_far) override {
    if (slow_.is_none() || group_ == nullptr) return;
    lock();
    try {
      slow_(describe_failure(so_far, group_));
    } catch (nanobind::python_error& error) {
      error.discard_as_unraisable("paceline: reporting a slow call");
    }
    before_block();
  }

 private:
  Hooks* const outer_ = current_hooks;
  HostGroup* group_;
  const nanobind::object& slow_;
  PyThreadState* saved_ = nullptr;
};

}  // namespace paceline

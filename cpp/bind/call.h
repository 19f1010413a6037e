// Python's lock and signals around one call into the core.
#pragma once

#include <nanobind/nanobind.h>

#include "bind/failures.h"
#include "collectives/host_group.h"

namespace paceline {

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
    if (saved_ == nullptr) saved_ = PyEval_SaveThread();
  }
  void lock() {
    if (saved_ != nullptr) PyEval_RestoreThread(saved_);
    saved_ = nullptr;
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

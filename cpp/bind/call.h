// Releases Python's lock and runs its signal handlers around one call into the
// core.
//
// Signal handlers run inside of waits, so that Ctrl-C and a handler that exits
// need not wait for a late rank. A handler that itself makes a collective
// cannot do so inside another one, which is half done; it would have to be made
// after that one. So in a collective, handlers other than that of SIGINT first
// wait a short time for its end. (In torch they always do.)
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>

#include "bind/failures.h"
#include "collectives/host_group.h"
#include "core/clock.h"

namespace paceline {

/// The calls that have released Python's lock and not taken it back yet. When
/// the interpreter finalizes, it would end their threads inside C++, which
/// aborts the process; so the interpreter waits for them.
inline std::atomic<int> calls_without_lock{0};

/// How long a signal handler waits for the end of the collective that its
/// signal interrupted. In a healthy job a collective takes less; launchers give
/// a process that they terminate 10 s or more.
inline constexpr int64_t kHandlerPatienceNs = 2'000'000'000;

/// Releases Python's lock when the call sleeps (or at once), and takes it back
/// at the call's end or when it needs Python.
class CallHooks final : public WaitHooks {
 public:
  CallHooks(HostGroup* group, const nanobind::object& slow,
            const Patience* whose, bool unlock_now)
      : group_(group), slow_(slow) {
    patience = whose;
    slot_ = this;
    if (unlock_now) before_block();
  }
  ~CallHooks() override {
    slot_ = outer_;
    lock();
  }
  CallHooks(const CallHooks&) = delete;
  CallHooks& operator=(const CallHooks&) = delete;

  /// From now on this call is a collective: see the top of this file.
  void defer_handlers() { defers_handlers_ = true; }
  void before_block() override {
    if (saved_ != nullptr) return;
    if (blocked_ns_ == 0) blocked_ns_ = now_ns();
    calls_without_lock.fetch_add(1);
    saved_ = PyEval_SaveThread();
  }
  void lock() {
    if (saved_ == nullptr) return;
    PyEval_RestoreThread(saved_);
    saved_ = nullptr;
    calls_without_lock.fetch_sub(1);
  }
  bool interrupted(bool by_signal) override {
    lock();
    const bool raised =
        may_run_handlers(by_signal) && PyErr_CheckSignals() != 0;
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
  bool may_run_handlers(bool by_signal) {
    if (!defers_handlers_) return true;
    // Clears the interrupt, so set it again.
    if (PyOS_InterruptOccurred() != 0) {
      PyErr_SetInterrupt();
      return true;
    }
    const int64_t now = now_ns();
    if (by_signal && signal_ns_ == 0) signal_ns_ = now;
    // A signal that this call did not see came before the sleep, or to another
    // thread.
    const int64_t since_ns = signal_ns_ != 0 ? signal_ns_ : blocked_ns_;
    if (now < since_ns + kHandlerPatienceNs) return false;
    signal_ns_ = 0;
    return true;
  }

  /// Looked up once, because thread-local access is slow.
  WaitHooks*& slot_ = current_hooks;
  WaitHooks* const outer_ = slot_;
  HostGroup* group_;
  const nanobind::object& slow_;
  PyThreadState* saved_ = nullptr;
  bool defers_handlers_ = false;
  int64_t blocked_ns_ = 0;  ///< when this call first released the lock
  int64_t signal_ns_ = 0;   ///< first signal since handlers last ran; 0: none
};

/// Makes a long call that waits for no other rank, without Python's lock.
template <class Call>
void without_lock(Call&& call) {
  const nanobind::object no_callback = nanobind::none();
  CallHooks hooks(nullptr, no_callback, nullptr, /*unlock_now=*/true);
  call();
}

}  // namespace paceline

// Threads of foreign libraries at the end of the process, which must not abort
// it. They sleep until it has ended, whatever status that is with.
//
// One kind throws what nobody catches: Gloo's thread, for one, when it answers
// a rank whose process has ended. This process is then about to end, too,
// because of the lost rank or because all are ready. The thread sleeps with its
// locks, for which destructors of static objects may wait: so the process ends
// without them.
//
// The second kind comes back from a library when the interpreter ends. Before Python
// 3.14 a daemon thread that asks for the interpreter's lock then is ended by
// pthread_exit, which unwinds its stack. Where a function on it must not throw,
// as pybind11's destructor that takes the lock, unwinding calls std::terminate,
// and with it the whole process is aborted. Python 3.14 lets such a thread
// sleep; remove this part when that is the oldest version that is supported.
//
// The third kind goes on after the interpreter has ended, while static objects
// are destroyed. With Paddle, rank 0 serves a store in such a thread. If
// another rank ends in that moment, the thread writes a line to Paddle's log,
// which is a static object, too. Its lock is destroyed by then, and so it calls
// abort() without a word.
#include <Python.h>
#include <nanobind/nanobind.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "bind/bindings.h"

namespace paceline {
namespace {

std::terminate_handler previous = nullptr;
std::atomic<bool> is_end_expected{false};
// Whoever sets one of these looks at the other one afterwards.
std::atomic<bool> sleeps_with_locks{false};
std::atomic<int> status_of_exit{-1};  ///< -1: the process goes on

bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

// Needs no lock: both read one atomic word.
bool is_interpreter_ending() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() || !Py_IsInitialized();
#else
  return _Py_IsFinalizing() || !Py_IsInitialized();
#endif
}

bool is_process_ending() {
  return is_end_expected.load(std::memory_order_relaxed) ||
         is_interpreter_ending();
}

[[noreturn]] void sleep_or_terminate() {
  while (is_process_ending() && !is_main_thread()) {
    if (std::current_exception() != nullptr) {
      sleeps_with_locks = true;
      if (status_of_exit >= 0) _exit(status_of_exit);
    }
    pause();
  }
  if (previous != nullptr) previous();
  std::abort();
}

// For the signal that abort() raises first. Where another process has sent it,
// it ends this one as always.
void sleep_or_abort(int number, siginfo_t* info, void*) {
  while (info->si_code == SI_TKILL && !is_main_thread()) pause();
  signal(number, SIG_DFL);
  raise(number);
}

void end_without_destructors(int status, void*) {
  status_of_exit = status & 0xff;
  if (!sleeps_with_locks) return;
  static_cast<void>(std::fflush(nullptr));
  _exit(status);
}

// Called last by the interpreter: the process has nothing more to do than to
// destroy static objects, and no thread a reason to abort it.
void hold_threads_that_abort() {
  // Registered last, it is called first.
  static_cast<void>(on_exit(end_without_destructors, nullptr));
  struct sigaction action = {};
  action.sa_sigaction = sleep_or_abort;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGABRT, &action, nullptr);
}

void hold_late_threads() {
  static bool is_done = false;  // callers hold the interpreter's lock
  if (is_done) return;
  is_done = true;
  previous = std::set_terminate(sleep_or_terminate);
  // It fails where the interpreter has no place left, which changes nothing.
  static_cast<void>(Py_AtExit(hold_threads_that_abort));
}

}  // namespace

void bind_late_threads(nanobind::module_& m) {
  m.def("hold_late_threads", hold_late_threads,
        "From now on no thread of a foreign library aborts the process at its "
        "end.");
  m.def(
      "expect_end", [] { is_end_expected = true; },
      "From now on the process counts as one that ends, though the "
      "interpreter's end has not begun.");
}

}  // namespace paceline

// Threads of foreign libraries at the end of the process, which must not abort
// it. They sleep until it has ended, whatever status that is with.
//
// One kind comes back from a library when the interpreter ends. Before Python
// 3.14 a daemon thread that asks for the interpreter's lock then is ended by
// pthread_exit, which unwinds its stack. Where a function on it must not throw,
// as pybind11's destructor that takes the lock, unwinding calls std::terminate,
// and with it the whole process is aborted. Python 3.14 lets such a thread
// sleep; remove this part when that is the oldest version that is supported.
//
// The other kind goes on after the interpreter has ended, while static objects
// are destroyed. With Paddle, rank 0 serves a store in such a thread. If
// another rank ends in that moment, the thread writes a line to Paddle's log,
// which is a static object, too. Its lock is destroyed by then, and so it calls
// abort() without a word.
#include <Python.h>
#include <nanobind/nanobind.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>

#include "bind/bindings.h"

namespace paceline {
namespace {

std::terminate_handler previous = nullptr;

bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

// Needs no lock: both read one atomic word.
bool is_interpreter_ending() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() || !Py_IsInitialized();
#else
  return _Py_IsFinalizing() || !Py_IsInitialized();
#endif
}

[[noreturn]] void sleep_or_terminate() {
  while (is_interpreter_ending() && !is_main_thread()) pause();
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

// Called last by the interpreter: the process has nothing more to do than to
// destroy static objects, and no thread a reason to abort it.
void hold_threads_that_abort() {
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
}

}  // namespace paceline

// Threads of foreign libraries at the end of the process, which must not abort
// it. They sleep until it has ended, whatever status that is with.
//
// Those that come back when the interpreter ends. Before Python 3.14 a daemon thread that asks for the interpreter's lock then
// is ended by pthread_exit, which unwinds its stack. Where a function on it
// must not throw, as pybind11's destructor that takes the lock, unwinding calls
// std::terminate, and with it the whole process is aborted, whatever status it
// was about to end with. As Python 3.14 lets them, they sleep there instead;
// remove that part when it is the oldest that is supported.
//
// Those that go on while static objects are destroyed, behind the interpreter's
// end. Rank 0 of Paddle's serves a store in such a thread. If another rank ends
// in that moment, the thread writes a log, and Paddle's log is a static object:
// it finds its lock destroyed, and calls abort() without a word.
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

// What abort() raises first. Sent by another process it does as it always did.
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
  if (std::get_terminate() == sleep_or_terminate) return;
  previous = std::set_terminate(sleep_or_terminate);
  // If the interpreter has no place left, it is as without us.
  static_cast<void>(Py_AtExit(hold_threads_that_abort));
}

}  // namespace

void bind_late_threads(nanobind::module_& m) {
  m.def("hold_late_threads", hold_late_threads,
        "From now on no thread of a foreign library aborts the process at its "
        "end.");
}

}  // namespace paceline

// Keeps threads of other libraries from aborting the process at its end. They
// sleep until it has ended, with whatever status.
//
// One kind returns from a library while the interpreter finalizes. Before
// Python 3.14, a daemon thread that then asks for the interpreter's lock is
// ended by pthread_exit, which unwinds its stack. If a function on the stack
// must not throw, such as pybind11's destructor that takes the lock, unwinding
// calls std::terminate, which aborts the process. Python 3.14 lets such a
// thread sleep; remove this part when that is the oldest supported version.
//
// The other kind keeps running after the interpreter has ended, while static
// objects are destroyed. With Paddle, rank 0 serves a store in such a thread.
// If another rank ends at that moment, the thread writes a line to Paddle's
// log, which is a static object, too. The log's lock is destroyed by then, so
// the thread calls abort() without a message.
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

// Needs no lock: both calls read one atomic word.
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

// Handles the signal that abort() raises first. If another process sent the
// signal, it ends this process as always.
void sleep_or_abort(int number, siginfo_t* info, void*) {
  while (info->si_code == SI_TKILL && !is_main_thread()) pause();
  signal(number, SIG_DFL);
  raise(number);
}

// The interpreter calls this last: the process has nothing left to do but
// destroy static objects, and no thread has a reason to abort it.
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
  // Fails if the interpreter has no slot left; that does no harm.
  static_cast<void>(Py_AtExit(hold_threads_that_abort));
}

}  // namespace

void bind_threads_at_exit(nanobind::module_& m) {
  m.def("hold_late_threads", hold_late_threads,
        "From now on, no thread of another library aborts the process at its "
        "end.");
}

}  // namespace paceline

// Threads that come back from a foreign library when the interpreter ends.
//
// Before Python 3.14 a daemon thread that asks for the interpreter's lock then
// is ended by pthread_exit, which unwinds its stack. Where a function on it
// must not throw, as pybind11's destructor that takes the lock, unwinding calls
// std::terminate, and with it the whole process is aborted, whatever status it
// was about to end with. So such a thread sleeps there instead, as Python 3.14
// lets it, until the process has ended.
//
// Remove this when Python 3.14 is the oldest that is supported.
#include <Python.h>
#include <nanobind/nanobind.h>
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

}  // namespace

void bind_late_threads(nanobind::module_& m) {
  m.def(
      "hold_late_threads",
      [] {
        if (std::get_terminate() != sleep_or_terminate)
          previous = std::set_terminate(sleep_or_terminate);
      },
      "From now on a thread that a foreign library lets go at the end of the "
      "interpreter does not abort the process.");
}

}  // namespace paceline

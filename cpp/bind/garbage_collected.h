// Slots for Python's garbage collector, for classes that hold Python objects.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

/// A type slot for T, which has `int traverse(visitproc, void*)`.
template <class T>
int traverse_slot(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nanobind::inst_ready(self)) return 0;
  return nanobind::inst_ptr<T>(self)->traverse(visit, arg);
}

/// A type slot for T, which has `void clear()`.
template <class T>
int clear_slot(PyObject* self) {
  nanobind::inst_ptr<T>(self)->clear();
  return 0;
}

}  // namespace paceline

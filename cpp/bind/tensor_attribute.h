// An attribute of tensors, read without Python's attribute lookup.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

namespace nb = nanobind;

/// The class of a tensor is searched once for the attribute's C function. An
/// attribute without one is looked up each time.
class TensorAttribute {
 public:
  explicit TensorAttribute(const char* name)
      : name_(nb::steal(PyUnicode_InternFromString(name))) {}

  /// Returns a new reference, or null with an exception set.
  PyObject* get(PyObject* tensor) {
    const PyGetSetDef* const found = find(tensor);
    return found != nullptr && found->get != nullptr
               ? found->get(tensor, found->closure)
               : PyObject_GetAttr(tensor, name_.ptr());
  }
  /// False: an exception is set.
  bool set(PyObject* tensor, PyObject* value) {
    const PyGetSetDef* const found = find(tensor);
    return 0 == (found != nullptr && found->set != nullptr
                     ? found->set(tensor, value, found->closure)
                     : PyObject_SetAttr(tensor, name_.ptr(), value));
  }

 private:
  const PyGetSetDef* find(PyObject* tensor) {
    if (!Py_IS_TYPE(tensor, reinterpret_cast<PyTypeObject*>(type_.ptr()))) {
      type_ = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
      descriptor_ = nb::steal(PyObject_GetAttr(type_.ptr(), name_.ptr()));
      // An attribute of the instances.
      if (!descriptor_.is_valid()) PyErr_Clear();
      const bool is_in_c = descriptor_.is_valid() &&
                           Py_IS_TYPE(descriptor_.ptr(), &PyGetSetDescr_Type);
      found_ = is_in_c
                   ? reinterpret_cast<PyGetSetDescrObject*>(descriptor_.ptr())
                         ->d_getset
                   : nullptr;
    }
    return found_;
  }

  nb::object name_;
  nb::object type_ = nb::none();  ///< class of the last tensor
  nb::object descriptor_;         ///< keeps `found_` alive
  const PyGetSetDef* found_ = nullptr;
};

}  // namespace paceline

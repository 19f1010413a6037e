#include "bind/handed_gradients.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>

#include "bind/bindings.h"
#include "bind/garbage_collected.h"

namespace paceline {
namespace {

// Type slots, because Python's hooks use them as often as the core's.

HandedGradients& of(PyObject* self) {
  return *nb::inst_ptr<HandedGradients>(self);
}

/// SIZE_MAX: it is not an index of a parameter, and an exception is set.
size_t parameter_of(PyObject* key) {
  const size_t parameter = PyLong_AsSize_t(key);
  return PyErr_Occurred() == nullptr ? parameter : SIZE_MAX;
}

Py_ssize_t length_slot(PyObject* self) {
  return static_cast<Py_ssize_t>(of(self).order().size());
}

int contains_slot(PyObject* self, PyObject* key) {
  const size_t parameter = parameter_of(key);
  if (parameter == SIZE_MAX) return -1;
  return of(self).find(parameter) != nullptr ? 1 : 0;
}

PyObject* get_slot(PyObject* self, PyObject* key) {
  const size_t parameter = parameter_of(key);
  if (parameter == SIZE_MAX) return nullptr;
  PyObject* gradient = of(self).find(parameter);
  if (gradient == nullptr) {
    PyErr_SetObject(PyExc_KeyError, key);
    return nullptr;
  }
  return Py_NewRef(gradient);
}

int set_slot(PyObject* self, PyObject* key, PyObject* gradient) {
  if (gradient == nullptr) {
    PyErr_SetString(PyExc_TypeError, "a gradient that was handed over stays");
    return -1;
  }
  const size_t parameter = parameter_of(key);
  if (parameter == SIZE_MAX) return -1;
  try {
    of(self).put(parameter, nb::borrow(gradient));
  } catch (const std::exception&) {  // out of memory, or an absurd index
    PyErr_NoMemory();
    return -1;
  }
  return 0;
}

PyObject* iterate_slot(PyObject* self) {
  const std::vector<size_t>& order = of(self).order();
  const nb::object list =
      nb::steal(PyList_New(static_cast<Py_ssize_t>(order.size())));
  if (!list.is_valid()) return nullptr;
  for (size_t i = 0; i < order.size(); ++i) {
    PyObject* parameter = PyLong_FromSize_t(order[i]);
    if (parameter == nullptr) return nullptr;
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), parameter);
  }
  return PyObject_GetIter(list.ptr());
}

PyType_Slot slots[] = {
    {Py_mp_length, reinterpret_cast<void*>(length_slot)},
    {Py_sq_contains, reinterpret_cast<void*>(contains_slot)},
    {Py_mp_subscript, reinterpret_cast<void*>(get_slot)},
    {Py_mp_ass_subscript, reinterpret_cast<void*>(set_slot)},
    {Py_tp_iter, reinterpret_cast<void*>(iterate_slot)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_slot<HandedGradients>)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_slot<HandedGradients>)},
    {0, nullptr}};

}  // namespace

void HandedGradients::watch(nb::list parameters, const std::string& gradient,
                            const std::string& version, nb::object uses,
                            const std::vector<size_t>& in_own_memory) {
  parameters_ = std::move(parameters);
  if (!gradient.empty()) gradient_.emplace(gradient.c_str());
  if (!version.empty()) version_.emplace(version.c_str());
  uses_object_ = std::move(uses);
  uses_ =
      uses_object_.is_none() ? nullptr : nb::cast<StorageUses*>(uses_object_);
  gradient_uses_ = dynamic_cast<SharedPointerUses*>(uses_);
  in_own_memory_.assign(parameters_.size(), false);
  before_.assign(parameters_.size(), 0);
  if (uses_ == nullptr) return;
  for (const size_t parameter : in_own_memory)
    in_own_memory_.at(parameter) = true;
}

void HandedGradients::begin() {
  for (size_t i = 0; i < in_own_memory_.size(); ++i) {
    if (in_own_memory_[i]) before_[i] = storage_of_gradient(i);
  }
}

uintptr_t HandedGradients::storage_of_gradient(size_t parameter) {
  if (gradient_uses_ != nullptr)
    return gradient_uses_->of_gradient(
        nb::handle(parameters_[parameter]).ptr());
  const nb::object gradient = gradient_of(parameter);
  if (!gradient.is_valid() || gradient.is_none()) return 0;
  return uses_->of(gradient.ptr()).storage;
}

HandedGradients::Found HandedGradients::look() {
  Found found;
  used_.clear();
  for (const size_t parameter : order_) {
    if (gradient_uses_ != nullptr) {
      note_uses(parameter, gradients_[parameter].ptr());
      continue;
    }
    const nb::object now = gradient_of(parameter);
    if (!now.is_valid()) continue;
    if (!now.is(gradients_[parameter]) ||
        version_of(now.ptr()) != versions_[parameter]) {
      found.changed.push_back(parameter);
    } else {
      note_uses(parameter, now.ptr());
    }
  }
  found.shared = take_shared();
  return found;
}

std::vector<size_t> HandedGradients::shared_among(
    const std::vector<size_t>& parameters) {
  used_.clear();
  for (const size_t parameter : parameters) {
    const nb::object gradient = gradient_of(parameter);
    if (gradient.is_valid()) note_uses(parameter, gradient.ptr());
  }
  return take_shared();
}

std::vector<size_t> HandedGradients::take_shared() {
  std::vector<size_t> shared;
  for (const Used& each : used_) {
    if (each.use.count <= 1 || each.use.storage == before_[each.parameter])
      continue;
    const auto are_here = static_cast<size_t>(
        std::count_if(used_.begin(), used_.end(), [&](const Used& other) {
          return other.use.storage == each.use.storage;
        }));
    if (are_here < each.use.count) shared.push_back(each.parameter);
  }
  used_.clear();
  return shared;
}

nb::object HandedGradients::gradient_of(size_t parameter) {
  if (!gradient_.has_value() || parameter >= parameters_.size()) return {};
  const nb::handle held = parameters_[parameter];
  if (held.is_none()) return {};
  nb::object gradient = nb::steal(gradient_->get(held.ptr()));
  if (!gradient.is_valid()) throw nb::python_error();
  return gradient;
}

long long HandedGradients::version_of(PyObject* gradient) {
  if (gradient == Py_None) return 0;
  const nb::object version = nb::steal(version_->get(gradient));
  const long long number =
      version.is_valid() ? PyLong_AsLongLong(version.ptr()) : -1;
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return 0;
  }
  return number;
}

void bind_handed_gradients(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<HandedGradients>(m, "HandedGradients", nb::type_slots(slots))
      .def(nb::init<>())
      .def("discard", &HandedGradients::discard, "param"_a)
      .def("clear", &HandedGradients::clear)
      .def("watch", &HandedGradients::watch, "parameters"_a, "gradient"_a,
           "version"_a, "uses"_a = nb::none(),
           "in_own_memory"_a = std::vector<size_t>())
      .def("begin", &HandedGradients::begin)
      .def("look",
           [](HandedGradients& handed) {
             HandedGradients::Found found = handed.look();
             return std::pair(std::move(found.changed),
                              std::move(found.shared));
           })
      .def("shared_among", &HandedGradients::shared_among, "parameters"_a);
}

}  // namespace paceline

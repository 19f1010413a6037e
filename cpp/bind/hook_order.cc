#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/failures.h"
#include "bind/garbage_collected.h"
#include "bind/tensor_attribute.h"

namespace paceline {
namespace {

/// Finds parameters, each with one hook of ours, to which another hook was
/// added later, in the dictionary that holds a parameter's hooks. Called in
/// each step.
class HookOrder {
 public:
  HookOrder(nb::list parameters, nb::list hooks, const std::string& attribute)
      : parameters_(std::move(parameters)),
        hooks_(std::move(hooks)),
        attribute_(attribute.c_str()) {
    if (parameters_.size() != hooks_.size())
      misuse("each parameter has one hook");
  }

  /// The indices of the parameters whose last hook is not ours.
  std::vector<size_t> not_last() {
    std::vector<size_t> found;
    // Cleared by the garbage collector.
    if (!parameters_.is_valid()) return found;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const nb::object dict =
          nb::steal(attribute_.get(nb::handle(parameters_[i]).ptr()));
      if (!dict.is_valid()) throw nb::python_error();
      if (last_of(dict.ptr()) != nb::handle(hooks_[i]).ptr())
        found.push_back(i);
    }
    return found;
  }

  int traverse(visitproc visit, void* arg) {
    for (nb::list* list : lists()) Py_VISIT(list->ptr());
    return 0;
  }
  void clear() {
    for (nb::list* list : lists()) list->reset();
  }

 private:
  std::array<nb::list*, 2> lists() { return {&parameters_, &hooks_}; }

  /// Returns a borrowed reference. The order is that in which the framework
  /// calls hooks: that of a plain dict, even where the dictionary is an
  /// OrderedDict.
  static PyObject* last_of(PyObject* dict) {
    PyObject* last = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t at = 0;
    if (!PyDict_Check(dict)) return nullptr;  // None: all were removed
    while (PyDict_Next(dict, &at, nullptr, &value) != 0) last = value;
    return last;
  }

  nb::list parameters_;
  nb::list hooks_;
  TensorAttribute attribute_;
};

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_slot<HookOrder>)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_slot<HookOrder>)},
    {0, nullptr}};

}  // namespace

void bind_hook_order(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<HookOrder>(m, "HookOrder", nb::type_slots(slots))
      .def(nb::init<nb::list, nb::list, const std::string&>(), "parameters"_a,
           "hooks"_a, "attribute"_a)
      .def("not_last", &HookOrder::not_last);
}

}  // namespace paceline

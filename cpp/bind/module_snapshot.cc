#include <nanobind/stl/string.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/garbage_collected.h"
#include "bind/tensor_attribute.h"

namespace paceline {
namespace {

/// A snapshot of the dictionaries in which a module and its children keep their
/// members, and of the parameters that had a flag set, for example
/// requires_grad. Every forward asks whether that has changed.
///
/// The members are kept alive: otherwise a new layer may get the address of one
/// that was dropped, and be taken for it.
class ModuleSnapshot {
 public:
  ModuleSnapshot(nb::list dicts, const std::string& flag, nb::list with_flag,
                 nb::list without_flag)
      : dicts_(std::move(dicts)),
        flag_(flag.c_str()),
        with_flag_(std::move(with_flag)),
        without_flag_(std::move(without_flag)) {
    walk([this](size_t, PyObject* held) {
      held_.push_back(nb::borrow(held));
      return true;
    });
  }

  bool is_unchanged() {
    if (!dicts_.is_valid()) return true;  // cleared by the garbage collector
    size_t count = 0;
    const bool are_same = walk([this, &count](size_t i, PyObject* held) {
      ++count;
      return i < held_.size() && held_[i].ptr() == held;
    });
    return are_same && count == held_.size() && all_have(with_flag_, Py_True) &&
           all_have(without_flag_, Py_False);
  }

  int traverse(visitproc visit, void* arg) {
    for (nb::list* list : lists()) Py_VISIT(list->ptr());
    for (const nb::object& held : held_) Py_VISIT(held.ptr());
    return 0;
  }
  void clear() {
    for (nb::list* list : lists()) list->reset();
    // Destroying them may run Python code, which finds an empty snapshot.
    std::vector<nb::object> held;
    held.swap(held_);
  }

 private:
  std::array<nb::list*, 3> lists() {
    return {&dicts_, &with_flag_, &without_flag_};
  }

  /// Calls `visit` with each member and its number, until it returns false.
  template <class Visit>
  bool walk(Visit visit) const {
    size_t i = 0;
    for (const nb::handle dict : dicts_) {
      Py_ssize_t at = 0;
      PyObject* value = nullptr;
      while (PyDict_Next(dict.ptr(), &at, nullptr, &value) != 0)
        if (!visit(i++, value)) return false;
    }
    return true;
  }

  bool all_have(const nb::list& tensors, PyObject* value) {
    for (const nb::handle tensor : tensors) {
      const nb::object flag = nb::steal(flag_.get(tensor.ptr()));
      if (!flag.is_valid()) throw nb::python_error();
      if (!flag.is(value)) return false;
    }
    return true;
  }

  nb::list dicts_;
  TensorAttribute flag_;
  nb::list with_flag_;
  nb::list without_flag_;
  std::vector<nb::object> held_;  ///< the members of the dictionaries
};

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_slot<ModuleSnapshot>)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_slot<ModuleSnapshot>)},
    {0, nullptr}};

}  // namespace

void bind_module_snapshot(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<ModuleSnapshot>(m, "ModuleSnapshot", nb::type_slots(slots))
      .def(nb::init<nb::list, const std::string&, nb::list, nb::list>(),
           "dicts"_a, "flag"_a, "with_flag"_a, "without_flag"_a)
      .def("is_unchanged", &ModuleSnapshot::is_unchanged);
}

}  // namespace paceline

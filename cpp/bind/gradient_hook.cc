#include "bind/gradient_hook.h"

#include <nanobind/stl/string.h>

#include <array>
#include <cstring>
#include <exception>
#include <vector>

#include "bind/dlpack.h"
#include "bind/py_reducer.h"

namespace paceline {
namespace {

/// The usual case of a hook written in Python: it looks at the gradient through
/// DLPack and hands it over. Whatever is not usual is left to the Python hook.
class GradientHook {
 public:
  GradientHook(nb::object in_python, nb::object state, size_t parameter,
               nb::object reducer, nb::object place, bool gradient_in_arena,
               const std::string& transformed)
      : in_python_(std::move(in_python)),
        state_(std::move(state)),
        handed_(state_.attr("handed")),
        reducer_(std::move(reducer)),
        core_(nb::cast<PyReducer*>(reducer_)),
        parameter_(parameter),
        index_(nb::int_(parameter)),
        place_(std::move(place)),
        type_(nb::borrow<nb::object>(place_.type())),
        gradient_in_arena_(gradient_in_arena),
        grad_name_(nb::steal(PyUnicode_InternFromString("grad"))),
        is_syncing_name_(nb::steal(PyUnicode_InternFromString("is_syncing"))),
        is_armed_name_(nb::steal(PyUnicode_InternFromString("is_armed"))),
        transformed_name_(
            nb::steal(PyUnicode_InternFromString(transformed.c_str()))) {
    const nb::object capsule = place_.attr("__dlpack_c_exchange_api__");
    api_ = static_cast<dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
    while (api_ != nullptr && api_->major_version > dlpack::kMajorVersion)
      api_ = api_->prev_api;
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    if (api_ == nullptr || api_->borrow == nullptr)
      misuse("the framework has no DLPack exchange API of version 1");
    dlpack::Tensor tensor;
    if (api_->borrow(place_.ptr(), &tensor) != 0) throw nb::python_error();
    dtype_ = tensor.dtype;
    place_begin_ = tensor.begin();
    shape_.assign(tensor.shape, tensor.shape + tensor.ndim);
    strides_.assign(tensor.strides, tensor.strides + tensor.ndim);
    nbytes_ = static_cast<size_t>(dtype_.bits) * dtype_.lanes / 8;
    for (const int64_t size : shape_) nbytes_ *= static_cast<size_t>(size);
  }

  /// A new reference, or null with an exception set.
  PyObject* call(PyObject* parameter) {
    if (!state_.is_valid()) Py_RETURN_NONE;  // the garbage collector was here
    if (!is_under_way()) return call_python(parameter);
    // The Python hook says what it means that there is one already.
    const int known = PyDict_Contains(handed_.ptr(), index_.ptr());
    if (known != 0) return known < 0 ? nullptr : call_python(parameter);
    const nb::object gradient =
        nb::steal(PyObject_GetAttr(parameter, grad_name_.ptr()));
    if (!gradient.is_valid()) return nullptr;
    const nb::object& kept = gradient_in_arena_ ? place_ : gradient;
    void* pointer = nullptr;
    if (!gradient_in_arena_ || !gradient.is(place_)) {
      dlpack::Tensor tensor;
      if (!borrow_usual(gradient, tensor)) return call_python(parameter);
      if (!gradient_in_arena_) {
        pointer = tensor.begin();
      } else {
        // The framework copies with all its threads, and without Python's lock.
        if (nbytes_ > kUnlockBytes) return call_python(parameter);
        std::memcpy(place_begin_, tensor.begin(), nbytes_);
        if (PyObject_SetAttr(parameter, grad_name_.ptr(), place_.ptr()) != 0)
          return nullptr;
      }
    }
    if (PyDict_SetItem(handed_.ptr(), index_.ptr(), kept.ptr()) != 0)
      return nullptr;
    core_->mark_ready(parameter_, reinterpret_cast<Pointer>(pointer));
    Py_RETURN_NONE;
  }

  int traverse(visitproc visit, void* arg) {
    for (nb::object* held : held_objects()) Py_VISIT(held->ptr());
    return 0;
  }
  void clear() {
    for (nb::object* held : held_objects()) held->reset();
  }

 private:
  // The reducer holds nothing that leads back here.
  std::array<nb::object*, 4> held_objects() {
    return {&in_python_, &state_, &handed_, &place_};
  }

  /// Whether this backward is averaged, and not about to begin.
  bool is_under_way() const {
    for (const nb::object* name : {&is_syncing_name_, &is_armed_name_}) {
      const nb::object value =
          nb::steal(PyObject_GetAttr(state_.ptr(), name->ptr()));
      if (value.ptr() != Py_True) {
        PyErr_Clear();
        return false;
      }
    }
    return true;
  }

  /// Looks at a gradient; false: it is not one that can be taken as it is.
  bool borrow_usual(const nb::object& gradient, dlpack::Tensor& tensor) const {
    if (Py_TYPE(gradient.ptr()) !=
        reinterpret_cast<PyTypeObject*>(type_.ptr()))  // None, say
      return false;
    if (api_->borrow(gradient.ptr(), &tensor) != 0) {  // sparse, say
      PyErr_Clear();
      return false;
    }
    if (tensor.device.type != dlpack::kCpu || tensor.dtype != dtype_ ||
        static_cast<size_t>(tensor.ndim) != shape_.size())
      return false;
    for (size_t i = 0; i < shape_.size(); ++i) {
      if (tensor.shape[i] != shape_[i]) return false;
      if (shape_[i] != 1 && tensor.strides[i] != strides_[i]) return false;
    }
    return !is_transformed(gradient);
  }

  /// Whether the memory holds other values than the gradient's, which DLPack
  /// does not tell: torch negates lazily.
  bool is_transformed(const nb::object& gradient) const {
    if (PyUnicode_GET_LENGTH(transformed_name_.ptr()) == 0) return false;
    const nb::object told = nb::steal(
        PyObject_CallMethodNoArgs(gradient.ptr(), transformed_name_.ptr()));
    PyErr_Clear();
    return told.ptr() != Py_False;
  }

  PyObject* call_python(PyObject* parameter) const {
    return PyObject_CallOneArg(in_python_.ptr(), parameter);
  }

  nb::object in_python_;
  nb::object state_;
  nb::object handed_;
  nb::object reducer_;
  PyReducer* core_;
  size_t parameter_;
  nb::object index_;
  nb::object place_;
  nb::object type_;
  bool gradient_in_arena_;
  nb::object grad_name_;
  nb::object is_syncing_name_;
  nb::object is_armed_name_;
  nb::object transformed_name_;
  dlpack::ExchangeApi* api_ = nullptr;
  dlpack::DType dtype_{};
  void* place_begin_ = nullptr;
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;
  size_t nbytes_ = 0;
};

/// Called as a slot of the type, without nanobind's search for an overload.
PyObject* call_slot(PyObject* self, PyObject* args, PyObject* keywords) {
  if (PyTuple_GET_SIZE(args) != 1 || keywords != nullptr) {
    PyErr_SetString(PyExc_TypeError, "a hook gets one parameter");
    return nullptr;
  }
  try {
    return nb::inst_ptr<GradientHook>(self)->call(PyTuple_GET_ITEM(args, 0));
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

int traverse_slot(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  return nb::inst_ptr<GradientHook>(self)->traverse(visit, arg);
}

int clear_slot(PyObject* self) {
  nb::inst_ptr<GradientHook>(self)->clear();
  return 0;
}

PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(call_slot)},
                       {Py_tp_traverse, reinterpret_cast<void*>(traverse_slot)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear_slot)},
                       {0, nullptr}};

}  // namespace

void bind_gradient_hook(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<GradientHook>(m, "GradientHook", nb::type_slots(slots))
      .def(nb::init<nb::object, nb::object, size_t, nb::object, nb::object,
                    bool, const std::string&>(),
           "in_python"_a, "state"_a, "param"_a, "reducer"_a, "place"_a,
           "gradient_in_arena"_a, "transformed"_a = "");
}

}  // namespace paceline

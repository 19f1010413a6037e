#include <nanobind/stl/string.h>
#include <structmember.h>

#include <array>
#include <cstring>
#include <exception>
#include <vector>

#include "bind/bindings.h"
#include "bind/dlpack.h"
#include "bind/garbage_collected.h"
#include "bind/gradient_taker.h"
#include "bind/handed_gradients.h"
#include "bind/py_backward_marks.h"
#include "bind/py_reducer.h"
#include "bind/tensor_attribute.h"

namespace paceline {
namespace {

/// An attribute in a class's __slots__, read without Python's attribute lookup.
class Slot {
 public:
  Slot(nb::handle object, const char* name) {
    const nb::object descriptor = object.type().attr(name);
    if (!Py_IS_TYPE(descriptor.ptr(), &PyMemberDescr_Type))
      misuse(std::string(name) + " is not in the __slots__ of the state");
    offset_ = reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())
                  ->d_member->offset;
  }
  bool is_true(nb::handle object) const { return value(object) == Py_True; }
  /// For an attribute that holds the number of a phase.
  BackwardPhase phase(nb::handle object) const {
    PyObject* number = value(object);
    return number == nullptr
               ? BackwardPhase::kIdle
               : static_cast<BackwardPhase>(PyLong_AsLong(number));
  }

 private:
  PyObject* value(nb::handle object) const {
    PyObject* value;
    std::memcpy(&value, reinterpret_cast<char*>(object.ptr()) + offset_,
                sizeof(value));
    return value;
  }

  Py_ssize_t offset_;
};

/// The common case of a hook written in Python: it reads the gradient through
/// DLPack and hands it over. In any other case it calls the Python hook.
///
/// It runs some hundred times in each backward, between kernels that leave
/// little of it in the caches, so it touches as little memory as possible.
class GradientHook {
 public:
  GradientHook(nb::object in_python, nb::object state, size_t parameter,
               nb::object taker, nb::object place, nb::object dtype,
               bool gradient_in_buffer, const std::string& transformed,
               nb::object stand_in, nb::object waiting, nb::object note_stream)
      : state_(std::move(state)),
        is_syncing_(state_, "is_syncing"),
        phase_(state_, "phase"),
        parameter_(parameter),
        dtype_object_(std::move(dtype)),
        handed_object_(state_.attr("handed")),
        handed_(nb::cast<HandedGradients*>(handed_object_)),
        taker_object_(std::move(taker)),
        taker_(gradient_taker(taker_object_)),
        place_(std::move(place)),
        type_(nb::borrow<nb::object>(place_.type())),
        left_(stand_in.is_none() ? place_ : std::move(stand_in)),
        staged_(state_.attr("staged")),
        waiting_(std::move(waiting)),
        note_stream_(std::move(note_stream)),
        index_(nb::int_(parameter)),
        is_copied_(!waiting_.is_none()),
        is_noted_(!note_stream_.is_none()),
        gradient_in_buffer_(gradient_in_buffer),
        in_python_(std::move(in_python)),
        transformed_name_(
            nb::steal(PyUnicode_InternFromString(transformed.c_str()))) {
    borrow_ = dlpack::find_borrow(place_);
    dlpack::Tensor tensor;
    if (borrow_(place_.ptr(), &tensor) != 0) throw nb::python_error();
    dtype_ = tensor.dtype;
    device_ = tensor.device;
    if (device_.type != dlpack::kCpu && !is_copied_)
      misuse("gradients on a device are copied by their framework");
    place_begin_ = tensor.begin();
    nbytes_ = static_cast<size_t>(dtype_.bits) * dtype_.lanes / 8;
    bool has_many_elements = false;
    for (int32_t i = 0; i < tensor.ndim; ++i) {
      axes_.push_back({tensor.shape[i], tensor.strides[i]});
      nbytes_ *= static_cast<size_t>(tensor.shape[i]);
      has_many_elements = has_many_elements || tensor.shape[i] > 1;
    }
    if (transformed.empty()) {
      asks_ = Asks::kNever;
    } else {
      asks_ = has_many_elements ? Asks::kOnce : Asks::kAlways;
    }
  }

  /// Returns a new reference, or null with an exception set.
  PyObject* call(PyObject* parameter) {
    if (!state_.is_valid()) Py_RETURN_NONE;  // cleared by the garbage collector
    const bool is_usual =
        is_syncing_.is_true(state_) &&
        phase_.phase(state_) >= BackwardPhase::kRunning &&
        handed_->find(parameter_) == nullptr &&  // else it arrived twice
        taker_->is_open();
    if (!is_usual) return call_python(parameter);
    // The parameter may have kept a gradient of its earlier dtype.
    const nb::object dtype = nb::steal(dtype_of_.get(parameter));
    if (!dtype.is_valid()) return nullptr;
    if (!dtype.is(dtype_object_)) return call_python(parameter);
    nb::object gradient = nb::steal(grad_.get(parameter));
    if (!gradient.is_valid()) return nullptr;
    void* pointer = nullptr;
    if (gradient_in_buffer_ && !is_place_in_buffer())
      return call_python(parameter);
    if (!gradient_in_buffer_ || !gradient.is(place_)) {
      dlpack::Tensor tensor;
      if (!borrow_usual(gradient, tensor)) return call_python(parameter);
      if (!gradient_in_buffer_) {
        pointer = tensor.begin();
      } else if (nbytes_ > kUnlockBytes) {
        // The framework copies it at once: with all its threads and without
        // Python's lock, and on a device so that the memory can be reused.
        return call_python(parameter);
      } else if (is_copied_) {
        if (!leave_waiting(gradient)) return nullptr;
        if (!grad_.set(parameter, left_.ptr())) return nullptr;
      } else {
        std::memcpy(place_begin_, tensor.begin(), nbytes_);
        if (!grad_.set(parameter, left_.ptr())) return nullptr;
      }
    }
    if (is_copied_ && !gradient_in_buffer_)
      return leave_to_copy(gradient, pointer);
    if (!note_stream()) return nullptr;
    handed_->put(parameter_, gradient_in_buffer_ ? left_ : std::move(gradient));
    taker_->mark_ready(parameter_, reinterpret_cast<Pointer>(pointer));
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
  struct Axis {
    int64_t size;
    int64_t stride;
  };
  /// How often a gradient is asked whether its memory holds other values than
  /// its own, which DLPack does not show: torch negates lazily. torch produces
  /// such tensors as imaginary parts, whose elements are not contiguous unless
  /// there is only one. So asking once is enough, in case the model does it by
  /// hand.
  enum class Asks : uint8_t { kNever, kOnce, kAlways };

  // The gradient taker holds nothing that refers back to this object.
  std::array<nb::object*, 9> held_objects() {
    return {&in_python_, &state_,  &dtype_object_, &handed_object_, &place_,
            &left_,      &staged_, &waiting_,      &note_stream_};
  }

  /// Leaves the gradient to the framework, which copies it to its place once
  /// its bucket is complete. False: an exception is set.
  bool leave_waiting(const nb::object& gradient) {
    return PyDict_SetItem(waiting_.ptr(), index_.ptr(), gradient.ptr()) == 0;
  }
  bool note_stream() {
    return !is_noted_ ||
           nb::steal(PyObject_CallNoArgs(note_stream_.ptr())).is_valid();
  }
  /// Leaves it to the framework to copy the gradient to its place, perhaps at
  /// once, and the mean back.
  PyObject* leave_to_copy(const nb::object& gradient, void* pointer) {
    if (!leave_waiting(gradient)) return nullptr;
    handed_->put(parameter_, gradient);
    if (PyList_Append(staged_.ptr(), index_.ptr()) != 0) return nullptr;
    if (!note_stream()) return nullptr;
    taker_->mark_copied(parameter_, reinterpret_cast<Pointer>(pointer), nbytes_,
                        false);
    Py_RETURN_NONE;
  }

  /// Converting a model moves its gradients, and with them `place_`, which is
  /// the same tensor.
  bool is_place_in_buffer() const {
    dlpack::Tensor tensor;
    if (borrow_(place_.ptr(), &tensor) == 0)
      return tensor.begin() == place_begin_;
    PyErr_Clear();
    return false;
  }

  /// Reads a gradient; false: it cannot be taken as it is.
  bool borrow_usual(const nb::object& gradient, dlpack::Tensor& tensor) {
    if (!Py_IS_TYPE(gradient.ptr(),
                    reinterpret_cast<PyTypeObject*>(type_.ptr())))
      return false;                               // None, for example
    if (borrow_(gradient.ptr(), &tensor) != 0) {  // sparse, for example
      PyErr_Clear();
      return false;
    }
    if (tensor.device != device_ || tensor.dtype != dtype_ ||
        static_cast<size_t>(tensor.ndim) != axes_.size() ||
        (tensor.begin() == nullptr && nbytes_ > 0))  // torch's zero tensors
      return false;
    for (size_t i = 0; i < axes_.size(); ++i) {
      if (tensor.shape[i] != axes_[i].size) return false;
      if (axes_[i].size != 1 && tensor.strides[i] != axes_[i].stride)
        return false;
    }
    return asks_ == Asks::kNever || !is_transformed(gradient);
  }

  bool is_transformed(const nb::object& gradient) {
    const nb::object answer = nb::steal(
        PyObject_CallMethodNoArgs(gradient.ptr(), transformed_name_.ptr()));
    if (!answer.is_valid()) PyErr_Clear();
    const bool is = answer.ptr() != Py_False;
    if (!is && asks_ == Asks::kOnce) asks_ = Asks::kNever;
    return is;
  }

  PyObject* call_python(PyObject* parameter) const {
    return PyObject_CallOneArg(in_python_.ptr(), parameter);
  }

  // First the members that each call reads.
  nb::object state_;
  Slot is_syncing_;
  Slot phase_;
  size_t parameter_;
  nb::object dtype_object_;  ///< of the parameter when it was wrapped
  TensorAttribute dtype_of_{"dtype"};
  nb::object handed_object_;
  HandedGradients* handed_;
  nb::object taker_object_;
  GradientTaker* taker_;
  TensorAttribute grad_{"grad"};
  nb::object place_;
  nb::object type_;
  /// The tensor that replaces the parameter's gradient once that is in the
  /// gradient buffer: `place_`, or a stand-in which shows that this rank gets
  /// only a shard of the mean.
  nb::object left_;
  nb::object staged_;
  /// The gradients that the framework is to copy to their places, by parameter;
  /// None: this hook copies them.
  nb::object waiting_;
  /// Called when a gradient arrives, to note the stream that produced it; or
  /// None.
  nb::object note_stream_;
  nb::object index_;
  bool is_copied_;
  bool is_noted_;
  dlpack::Borrow borrow_ = nullptr;
  dlpack::Device device_{};
  std::vector<Axis> axes_;
  dlpack::DType dtype_{};
  bool gradient_in_buffer_;
  Asks asks_ = Asks::kAlways;
  size_t nbytes_ = 0;
  void* place_begin_ = nullptr;
  nb::object in_python_;
  nb::object transformed_name_;
};

/// Called through a type slot, without nanobind's overload resolution.
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

PyType_Slot slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(call_slot)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_slot<GradientHook>)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_slot<GradientHook>)},
    {0, nullptr}};

}  // namespace

GradientTaker* gradient_taker(nb::handle object) {
  if (nb::isinstance<PyBackwardMarks>(object))
    return nb::cast<PyBackwardMarks*>(object);
  return nb::cast<PyReducer*>(object);
}

void bind_gradient_hook(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<GradientHook>(m, "GradientHook", nb::type_slots(slots))
      .def(nb::init<nb::object, nb::object, size_t, nb::object, nb::object,
                    nb::object, bool, const std::string&, nb::object,
                    nb::object, nb::object>(),
           "in_python"_a, "state"_a, "param"_a, "taker"_a, "place"_a, "dtype"_a,
           "gradient_in_buffer"_a, "transformed"_a = "",
           "stand_in"_a = nb::none(), "waiting"_a = nb::none(),
           "note_stream"_a = nb::none());
}

}  // namespace paceline

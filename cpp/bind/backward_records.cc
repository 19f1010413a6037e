#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "bind/bindings.h"
#include "bind/garbage_collected.h"
#include "bind/tensor_attribute.h"
#include "core/clock.h"
#include "core/recorder.h"

namespace nb = nanobind;

namespace paceline {
namespace {

/// Records the backwards of one model, and keeps their sums.
///
/// Wrappers call it in each step, between two large computations that leave
/// little of Python in the processor's caches. So each event of a backward
/// takes only one call.
class BackwardRecords {
 public:
  /// `samples_in(inputs, kwargs)` is called if the first input is not a tensor.
  explicit BackwardRecords(nb::object samples_in)
      : samples_in_(std::move(samples_in)) {}

  /// `inputs` and `kwargs` are those of the model; their samples count if it is
  /// training.
  void begin_forward(int64_t backward, bool is_syncing, bool is_training,
                     nb::handle inputs, nb::handle kwargs) {
    const int64_t found = is_training ? samples_of(inputs, kwargs) : 0;
    samples += found;
    const int64_t now =
        note(Event::kForwardBegan, backward, found << 1 | is_syncing);
    if (over_ns_ != 0) between_ns += now - over_ns_;
    over_ns_ = 0;
  }
  void end_forward(int64_t backward) {
    note(Event::kForwardEnded, backward, 0);
  }
  void begin_backward(int64_t backward) {
    note(Event::kBackwardBegan, backward, 0);
  }
  /// Returns when that was.
  int64_t end_backward(int64_t backward, bool has_raised) {
    over_ns_ = note(Event::kAveragingEnded, backward, has_raised);
    return over_ns_;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(samples_in_.ptr());
    return 0;
  }
  void clear() { const nb::object samples_in = std::move(samples_in_); }

  int64_t samples = 0;
  int64_t between_ns = 0;

 private:
  static int64_t note(Event event, int64_t first, int64_t second) {
    const int64_t now = now_ns();
    if (Recorder* recorder = Recorder::current(); recorder != nullptr)
      recorder->record_at(now, event, first, second);
    return now;
  }

  int64_t samples_of(nb::handle inputs, nb::handle kwargs) {
    if (PyTuple_GET_SIZE(inputs.ptr()) > 0) {
      const nb::object shape =
          nb::steal(shape_.get(PyTuple_GET_ITEM(inputs.ptr(), 0)));
      if (!shape.is_valid()) PyErr_Clear();
      if (const nb::handle size = first_of(shape);
          size.is_valid() && PyLong_CheckExact(size.ptr()))
        return nb::cast<int64_t>(size);
    }
    if (!samples_in_.is_valid()) return 0;  // cleared by the garbage collector
    return nb::cast<int64_t>(samples_in_(inputs, kwargs));
  }

  /// The first item; invalid if `row` is not a list or tuple, or is empty.
  static nb::handle first_of(nb::handle row) {
    if (!row.is_valid()) return {};
    if (PyTuple_Check(row.ptr()) && PyTuple_GET_SIZE(row.ptr()) > 0)
      return PyTuple_GET_ITEM(row.ptr(), 0);
    if (PyList_Check(row.ptr()) && PyList_GET_SIZE(row.ptr()) > 0)
      return PyList_GET_ITEM(row.ptr(), 0);
    return {};
  }

  nb::object samples_in_;
  TensorAttribute shape_{"shape"};
  int64_t over_ns_ =
      0;  ///< when the last backward ended; 0: a forward has begun
};

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_slot<BackwardRecords>)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_slot<BackwardRecords>)},
    {0, nullptr}};

}  // namespace

void bind_backward_records(nb::module_& m) {
  // Without argument names, which make calls slower.
  nb::class_<BackwardRecords>(m, "BackwardRecords", nb::type_slots(slots))
      .def(nb::init<nb::object>())
      .def_ro("samples", &BackwardRecords::samples,
              "The number of samples in forwards.")
      .def_ro("between_ns", &BackwardRecords::between_ns,
              "Time from the ends of backwards to the next forwards.")
      .def("begin_forward",
           [](BackwardRecords& self, int64_t backward, bool is_syncing,
              bool is_training, const nb::tuple& inputs,
              const nb::dict& kwargs) {
             self.begin_forward(backward, is_syncing, is_training, inputs,
                                kwargs);
           })
      .def("end_forward", &BackwardRecords::end_forward)
      .def("begin_backward", &BackwardRecords::begin_backward)
      .def("end_backward", &BackwardRecords::end_backward);
}

}  // namespace paceline

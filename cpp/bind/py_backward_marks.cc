#include "bind/py_backward_marks.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bind/bindings.h"
#include "bind/py_host_group.h"

namespace paceline {
namespace {

std::vector<BackwardMarks::Place> as_places(const MarkedPlaces& places) {
  std::vector<BackwardMarks::Place> found;
  for (const auto& [offset, bytes, buckets] : places)
    found.push_back({offset, bytes, buckets});
  return found;
}

}  // namespace

PyBackwardMarks::PyBackwardMarks(Pointer gradient_buffer,
                                 const MarkedPlaces& places,
                                 nb::object on_complete)
    : marks_(static_cast<std::byte*>(as_pointer(gradient_buffer)),
             as_places(places)),
      on_complete_(std::move(on_complete)) {}

void PyBackwardMarks::mark_ready(size_t parameter, Pointer gradient) {
  if (gradient != 0) {
    std::optional<nb::gil_scoped_release> unlocked;
    if (marks_.bytes_of(parameter) > kUnlockBytes) unlocked.emplace();
    marks_.copy_in(parameter, as_pointer(gradient));
  }
  if (marks_.mark(parameter, as_pointer(gradient)) || asks_again_) call_back();
}

void PyBackwardMarks::mark_copied(size_t parameter, Pointer gradient,
                                  size_t bytes, bool is_shared) {
  memory_at(gradient, bytes, "mark_copied");
  const bool is_any_complete =
      marks_.mark_copied(parameter, as_pointer(gradient), bytes, is_shared);
  if (is_any_complete || asks_again_) call_back();
}

void PyBackwardMarks::call_back() {
  asks_again_ = nb::cast<bool>(on_complete_());
}

std::vector<size_t> PyBackwardMarks::end_backward(bool keeps_means) {
  asks_again_ = false;
  return marks_.end_backward(keeps_means);
}

void bind_backward_marks(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<PyBackwardMarks>(m, "BackwardMarks")
      .def(nb::init<Pointer, const MarkedPlaces&, nb::object>(),
           "gradient_buffer"_a, "places"_a, "on_complete"_a)
      .def("mark_ready", &PyBackwardMarks::mark_ready, "param"_a,
           "grad_pointer"_a)
      .def("mark_copied", &PyBackwardMarks::mark_copied, "param"_a,
           "grad_pointer"_a, "nbytes"_a, "is_shared"_a = false)
      .def(
          "add_foreign",
          [](PyBackwardMarks& p, Pointer begin, size_t nbytes) {
            p.marks().add_foreign(as_pointer(begin), nbytes);
          },
          "pointer"_a, "nbytes"_a)
      .def(
          "leave_out",
          [](PyBackwardMarks& p, size_t index) { p.marks().leave_out(index); },
          "param"_a)
      .def("unmarked", [](PyBackwardMarks& p) { return p.marks().unmarked(); })
      .def(
          "is_complete",
          [](PyBackwardMarks& p, size_t bucket) {
            return p.marks().is_complete(bucket);
          },
          "bucket"_a)
      .def("take_complete",
           [](PyBackwardMarks& p) { return p.marks().take_complete(); })
      .def("end_backward", &PyBackwardMarks::end_backward, "keeps_means"_a)
      .def("copy_back", [](PyBackwardMarks& p) { p.marks().copy_back(); })
      .def("close", &PyBackwardMarks::close);
}

}  // namespace paceline

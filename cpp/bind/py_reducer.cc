#include "bind/py_reducer.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/pointer.h"

namespace paceline {

using namespace nb::literals;

void bind_reducer(nb::module_& m) {
  nb::class_<PyReducer>(m, "Reducer")
      .def(nb::init<nb::object, size_t, const std::vector<size_t>&,
                    const std::vector<size_t>&, const std::vector<int>&,
                    const std::vector<std::pair<size_t, size_t>>&, bool,
                    const std::vector<std::tuple<size_t, size_t, int>>&>(),
           "group"_a, "buffer_bytes"_a, "offsets"_a, "counts"_a, "dtypes"_a,
           "buckets"_a, "assigns_chunks"_a = false,
           "owned"_a = std::vector<std::tuple<size_t, size_t, int>>())
      .def_prop_ro(
          "buffer_pointer",
          [](PyReducer& r) {
            return reinterpret_cast<Pointer>(r.reducer().gradient_buffer());
          })
      .def_prop_ro("waited_s",
                   [](PyReducer& r) {
                     return static_cast<double>(r.reducer().waited_ns()) * 1e-9;
                   })
      .def_prop_ro("waited_for_ns",
                   [](PyReducer& r) { return r.reducer().waited_for_ns(); })
      .def_prop_ro("worked_ns",
                   [](PyReducer& r) { return r.reducer().worked_ns(); })
      .def_prop_ro("arrivals",
                   [](PyReducer& r) {
                     const Reducer::Arrivals& all = r.reducer().arrivals();
                     return std::tuple(all.backwards, all.worked_ns,
                                       all.times_last, all.held_up_ns);
                   })
      .def("note_first_bucket",
           [](PyReducer& r) { r.reducer().note_first_bucket(); })
      .def_prop_ro("first_bucket_ns",
                   [](PyReducer& r) { return r.reducer().first_bucket_ns(); })
      .def_prop_ro("backwards",
                   [](PyReducer& r) { return r.reducer().backwards(); })
      .def_prop_ro("completed",
                   [](PyReducer& r) { return r.reducer().completed(); })
      .def_prop_ro("outcome",
                   [](PyReducer& r) { return r.reducer().outcome(); })
      .def_prop_ro("in_backward",
                   [](PyReducer& r) { return r.reducer().in_backward(); })
      .def_prop_ro("num_chunks",
                   [](PyReducer& r) { return r.reducer().num_chunks(); })
      .def(
          "set_weight",
          [](PyReducer& r, double weight) { r.reducer().set_weight(weight); },
          "weight"_a)
      .def(
          "set_note",
          [](PyReducer& r, uint32_t note, int64_t recorded_backward) {
            r.reducer().set_note(note, recorded_backward);
          },
          "note"_a, "recorded_backward"_a = -1)
      .def("mark_ready", &PyReducer::mark_ready, "param"_a, "grad_pointer"_a)
      .def("mark_copied", &PyReducer::mark_copied, "param"_a, "grad_pointer"_a,
           "nbytes"_a, "is_shared"_a = false)
      .def(
          "add_foreign",
          [](PyReducer& r, Pointer begin, size_t nbytes) {
            r.reducer().add_foreign(as_pointer(begin), nbytes);
          },
          "pointer"_a, "nbytes"_a)
      .def("finish", &PyReducer::finish, "status"_a, "allow_unused"_a,
           "allow_globally_unused"_a = false)
      .def(
          "unused",
          [](PyReducer& r, int rank) { return r.reducer().unused(rank); },
          "rank"_a)
      .def("globally_unused",
           [](PyReducer& r) { return r.reducer().globally_unused(); })
      .def("overlapping",
           [](PyReducer& r) { return r.reducer().overlapping(); })
      .def("statuses", [](PyReducer& r) { return r.reducer().statuses(); })
      .def("waiting_ranks",
           [](PyReducer& r) { return r.reducer().waiting_ranks(); })
      .def("notes_by_rank",
           [](PyReducer& r) { return r.reducer().notes_by_rank(); })
      .def("nonfinite", [](PyReducer& r) { return r.reducer().nonfinite(); })
      .def("overflowed", [](PyReducer& r) { return r.reducer().overflowed(); })
      .def("squared_norm",
           [](PyReducer& r) { return r.reducer().squared_norm(); })
      .def(
          "give_up",
          [](PyReducer& r, nb::handle error) {
            r.give_up(nb::repr(error).c_str());
          },
          "error"_a)
      .def("close", &PyReducer::close);
}

}  // namespace paceline

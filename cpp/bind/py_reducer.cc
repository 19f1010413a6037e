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
      .def_prop_ro(
          "times",
          [](PyReducer& r) -> BackwardTimes& { return r.reducer().times(); },
          nb::rv_policy::reference_internal)
      .def_prop_ro("last", &PyReducer::last)
      .def_prop_ro("in_backward",
                   [](PyReducer& r) { return r.reducer().in_backward(); })
      .def_prop_ro("num_chunks",
                   [](PyReducer& r) { return r.reducer().num_chunks(); })
      .def(
          "set_weight",
          [](PyReducer& r, double weight, bool is_in_gradients) {
            r.reducer().set_weight(weight, is_in_gradients);
          },
          "weight"_a, "is_in_gradients"_a = false)
      .def(
          "set_note",
          [](PyReducer& r, uint32_t note, int64_t recorded_backward) {
            r.reducer().set_note(note, recorded_backward);
          },
          "note"_a, "recorded_backward"_a = -1)
      .def("mark_ready", &PyReducer::mark_ready, "param"_a, "grad_pointer"_a)
      .def("mark_copied", &PyReducer::mark_copied, "param"_a, "grad_pointer"_a,
           "nbytes"_a, "is_shared"_a = false)
      .def("mark_unused", &PyReducer::mark_unused, "param"_a)
      .def(
          "add_foreign",
          [](PyReducer& r, Pointer begin, size_t nbytes) {
            r.reducer().add_foreign(as_pointer(begin), nbytes);
          },
          "pointer"_a, "nbytes"_a)
      .def("finish", &PyReducer::finish, "status"_a, "allow_unused"_a,
           "allow_globally_unused"_a = false)
      .def("waiting_ranks",
           [](PyReducer& r) { return r.reducer().waiting_ranks(); })
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

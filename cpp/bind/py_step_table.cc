// The Python class for the step table of steps on shared memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/call.h"
#include "bind/failures.h"
#include "bind/pointer.h"
#include "core/step_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

/// Converts an injected fault of a test into an exception of errors.py.
template <class Body>
auto guarded(Body body) {
  try {
    return body();
  } catch (const Failure& failure) {
    raise_failure(failure, nullptr);
  }
}

using Copies = std::vector<std::tuple<Pointer, Pointer, size_t>>;

}  // namespace

void bind_step_table(nb::module_& m) {
  nb::class_<StepTable>(m, "StepTable")
      .def(
          "__init__",
          [](StepTable* self, Pointer at, int world, int rank) {
            new (self) StepTable(as_pointer(at), world, rank);
          },
          "at"_a, "world"_a, "rank"_a)
      .def_static("nbytes", &StepTable::bytes, "world"_a)
      .def_prop_ro("step", &StepTable::step)
      .def_prop_ro("is_whole", &StepTable::is_whole)
      .def(
          "decide",
          [](StepTable& step_table, bool wants) {
            return guarded([&] { return step_table.decide(wants); });
          },
          "wants"_a)
      .def(
          "finish",
          [](StepTable& step_table, int of) {
            guarded([&] { step_table.finish(of); });
          },
          "of"_a)
      .def("is_finished", &StepTable::is_finished, "of"_a)
      .def(
          "open_block",
          [](StepTable& step_table, int of, uint32_t block,
             const Copies& copies) {
            std::vector<StepTable::Copy> each;
            each.reserve(copies.size());
            for (const auto& [from, to, bytes] : copies)
              each.push_back({memory_at(from, bytes, "open_block"),
                              memory_at(to, bytes, "open_block"), bytes});
            guarded([&] { step_table.open_block(of, block, each); });
          },
          "of"_a, "block"_a, "copies"_a)
      .def(
          "close_block",
          [](StepTable& step_table, int of, uint32_t block) {
            guarded([&] { step_table.close_block(of, block); });
          },
          "of"_a, "block"_a)
      .def(
          "progress",
          [](const StepTable& step_table, int of) {
            const StepTable::Progress progress = step_table.progress(of);
            return std::pair(progress.block, progress.is_open);
          },
          "of"_a)
      .def("give_up", &StepTable::give_up)
      .def("has_given_up", &StepTable::has_given_up, "of"_a)
      .def("claim", &StepTable::claim, "of"_a, "instead_of"_a = nb::none());
}

}  // namespace paceline

// How far each rank is with a step on shared memory, as Python sees it.
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
#include "core/step_ledger.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

/// A fault that a test has asked for becomes an exception of errors.py.
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

void bind_step_ledger(nb::module_& m) {
  nb::class_<StepLedger>(m, "StepLedger")
      .def(
          "__init__",
          [](StepLedger* self, Pointer at, int world, int rank) {
            new (self) StepLedger(as_pointer(at), world, rank);
          },
          "at"_a, "world"_a, "rank"_a)
      .def_static("nbytes", &StepLedger::bytes, "world"_a)
      .def_prop_ro("step", &StepLedger::step)
      .def_prop_ro("is_whole", &StepLedger::is_whole)
      .def(
          "decide",
          [](StepLedger& ledger, bool wants) {
            return guarded([&] { return ledger.decide(wants); });
          },
          "wants"_a)
      .def(
          "finish",
          [](StepLedger& ledger, int of) {
            guarded([&] { ledger.finish(of); });
          },
          "of"_a)
      .def("is_finished", &StepLedger::is_finished, "of"_a)
      .def(
          "open_block",
          [](StepLedger& ledger, int of, uint32_t block, const Copies& copies) {
            std::vector<StepLedger::Copy> each;
            each.reserve(copies.size());
            for (const auto& [from, to, bytes] : copies)
              each.push_back({memory_at(from, bytes, "open_block"),
                              memory_at(to, bytes, "open_block"), bytes});
            guarded([&] { ledger.open_block(of, block, each); });
          },
          "of"_a, "block"_a, "copies"_a)
      .def(
          "close_block",
          [](StepLedger& ledger, int of, uint32_t block) {
            guarded([&] { ledger.close_block(of, block); });
          },
          "of"_a, "block"_a)
      .def(
          "progress",
          [](const StepLedger& ledger, int of) {
            const StepLedger::Progress progress = ledger.progress(of);
            return std::pair(progress.block, progress.is_open);
          },
          "of"_a)
      .def("give_up", &StepLedger::give_up)
      .def("has_given_up", &StepLedger::has_given_up, "of"_a)
      .def("claim", &StepLedger::claim, "of"_a, "instead_of"_a = nb::none());
}

}  // namespace paceline

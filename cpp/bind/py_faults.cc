// Fault injection for tests.
#include <nanobind/nanobind.h>

#include "bind/bindings.h"
#include "bind/pointer.h"
#include "core/faults.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {

void bind_faults(nb::module_& m) {
  m.def("fault_points", [] {
    nb::list names;
    for (uint32_t p = 0; p < static_cast<uint32_t>(Point::kNumPoints); ++p)
      names.append(point_name(static_cast<Point>(p)));
    return names;
  });
  m.def(
      "arm_fault",
      [](int point, int action, uint32_t nth, int peer, int peer_point) {
        arm_fault(static_cast<Point>(point), static_cast<FaultAction>(action),
                  nth, {peer, static_cast<Point>(peer_point)});
      },
      "point"_a, "action"_a, "nth"_a, "peer"_a = -1, "peer_point"_a = 0,
      "Does one of FAULT_ACTIONS at this thread's nth passage of the point, "
      "but not before the rank `peer` has passed `peer_point` once more.");
  m.def(
      "count_passages",
      [](Pointer table, int world, int rank) {
        count_passages(reinterpret_cast<Atomic<uint32_t>*>(table), world, rank);
      },
      "table"_a, "world"_a, "rank"_a,
      "Counts this process's passages of each point in memory that the ranks "
      "share: world times len(fault_points()) words of 4 bytes, zeroed.");
  m.def("disarm_fault", &disarm_fault);
}

}  // namespace paceline

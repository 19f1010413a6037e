// BackwardReports as Python calls it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "core/failure.h"
#include "reducer/backward_reports.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

nb::bytes pack(const BackwardReports& reports, const BackwardStatus& status,
               double weight, uint32_t note, uint32_t unused,
               bool refuses_unused, uint32_t nonfinite, uint32_t overflowed,
               uint32_t identity) {
  RankReport own;
  own.weight = weight;
  own.word = status.pack();
  own.note = note;
  own.unused = unused;
  own.refuses_unused = refuses_unused ? 1 : 0;
  own.nonfinite = nonfinite;
  own.overflowed = overflowed;
  own.identity = identity;
  reports.finish(own);
  return nb::bytes(&own, sizeof(own));
}

void read(BackwardReports& reports, const nb::list& rows) {
  std::vector<RankReport> found;
  found.reserve(rows.size());
  for (const nb::handle row : rows) {
    if (!PyBytes_Check(row.ptr()) ||
        static_cast<size_t>(PyBytes_GET_SIZE(row.ptr())) < sizeof(RankReport))
      misuse("BackwardReports.read: a row is no report");
    std::memcpy(&found.emplace_back(), PyBytes_AS_STRING(row.ptr()),
                sizeof(RankReport));
  }
  reports.read(std::move(found));
}

/// One entry for each rank; none before the first backward.
template <class Read>
auto by_rank(Read read) {
  return [read](const BackwardReports& reports) {
    std::vector<decltype(read(RankReport{}))> found;
    for (const RankReport& each : reports.all()) found.push_back(read(each));
    return found;
  };
}

}  // namespace

void bind_backward_reports(nb::module_& m) {
  nb::class_<BackwardReports> reports(m, "BackwardReports");
  reports.attr("NBYTES") = sizeof(RankReport);
  reports.def(nb::init<size_t>(), "world_size"_a)
      .def("end_backward", &BackwardReports::end_backward, "now_ns"_a)
      .def("pack", &pack, "status"_a, "weight"_a, "note"_a = 0, "unused"_a = 0,
           "refuses_unused"_a = false, "nonfinite"_a = 0, "overflowed"_a = 0,
           "identity"_a = 0)
      .def("read", &read, "rows"_a)
      .def("end_averaging", &BackwardReports::end_averaging, "now_ns"_a,
           "waited_ns"_a)
      .def("unknown_peers", &BackwardReports::unknown_peers, "identity"_a)
      .def_prop_ro("counts_any", &BackwardReports::counts_any)
      .def_prop_ro("counts_nonfinite", &BackwardReports::counts_nonfinite)
      .def_prop_ro("refuses_unused", &BackwardReports::refuses_unused)
      .def_prop_ro("outcome", &BackwardReports::outcome)
      .def_prop_ro("largest_weight", &BackwardReports::largest_weight)
      .def("take_new_weights", &BackwardReports::take_new_weights)
      .def_prop_ro("weights",
                   by_rank([](const RankReport& each) { return each.weight; }))
      .def_prop_ro("statuses", by_rank([](const RankReport& each) {
                     return BackwardStatus::unpack(each.word);
                   }))
      .def_prop_ro("notes",
                   by_rank([](const RankReport& each) { return each.note; }))
      .def_prop_ro("unused",
                   by_rank([](const RankReport& each) { return each.unused; }))
      .def_prop_ro("waited_for_ns", &BackwardReports::waited_for_ns)
      .def_prop_ro("worked_ns", &BackwardReports::worked_ns)
      .def_prop_ro("arrivals", [](const BackwardReports& self) {
        const ReportedArrivals& sums = self.arrivals();
        return std::make_tuple(sums.backwards, sums.worked_ns, sums.times_last,
                               sums.held_up_ns);
      });
}

}  // namespace paceline

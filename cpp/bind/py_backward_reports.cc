// The Python class for BackwardReports.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "core/failure.h"
#include "reducer/backward_reports.h"
#include "reducer/reducer.h"

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

/// `nonfinite` to `first_bucket_ns`: as in BackwardResult.
BackwardResult conclude(const BackwardReports& reports,
                        std::vector<std::vector<size_t>> unused,
                        std::vector<std::pair<int, size_t>> nonfinite,
                        std::vector<size_t> overflowed,
                        std::vector<size_t> overlapping,
                        int64_t first_bucket_ns, size_t parameters,
                        bool allow_globally_unused) {
  BackwardResult result = reports.result(std::move(unused), parameters);
  if (!nonfinite.empty()) result.outcome |= kBackwardNonFinite;
  if (!overflowed.empty()) result.outcome |= kBackwardOverflow;
  result.nonfinite = std::move(nonfinite);
  result.overflowed = std::move(overflowed);
  result.overlapping = std::move(overlapping);
  result.first_bucket_ns = first_bucket_ns;
  result.is_void = reports.refuses_unused();
  if (result.is_void && allow_globally_unused && result.is_unused_alike()) {
    result.outcome ^= kBackwardUnused | kBackwardGloballyUnused;
    result.is_void = false;
  }
  if ((result.outcome & kBackwardForwardsDiffer) != 0) result.is_void = true;
  return result;
}

/// One entry per rank; empty before the first backward.
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
  const auto of_ranks = [](auto read) {
    return [read](const BackwardResult& self) {
      std::vector<decltype(read(self.ranks.front()))> found;
      for (const auto& each : self.ranks) found.push_back(read(each));
      return found;
    };
  };
  nb::class_<BackwardTimes>(m, "BackwardTimes")
      .def(nb::init<size_t>(), "world_size"_a)
      .def("add", &BackwardTimes::add, "earlier"_a)
      .def_rw("waited_ns", &BackwardTimes::waited_ns)
      .def_rw("waited_for_ns", &BackwardTimes::waited_for_ns)
      .def_rw("backwards", &BackwardTimes::backwards)
      .def_rw("worked_ns", &BackwardTimes::worked_ns)
      .def_rw("times_last", &BackwardTimes::times_last)
      .def_rw("held_up_ns", &BackwardTimes::held_up_ns)
      .def_rw("recent_ns", &BackwardTimes::recent_ns);
  nb::class_<BackwardResult>(m, "BackwardResult")
      .def_ro("outcome", &BackwardResult::outcome)
      .def_ro("is_void", &BackwardResult::is_void)
      .def_prop_ro("statuses", of_ranks([](const BackwardResult::Rank& each) {
                     return each.status();
                   }))
      .def_prop_ro("notes", of_ranks([](const BackwardResult::Rank& each) {
                     return each.note;
                   }))
      .def_prop_ro("unused",
                   [](const BackwardResult& self) {
                     auto rows = self.unused;
                     rows.resize(self.ranks.size());
                     return rows;
                   })
      .def_ro("globally_unused", &BackwardResult::globally_unused)
      .def_ro("nonfinite", &BackwardResult::nonfinite)
      .def_ro("overflowed", &BackwardResult::overflowed)
      .def_ro("overlapping", &BackwardResult::overlapping)
      .def_ro("first_bucket_ns", &BackwardResult::first_bucket_ns);
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
      .def_prop_ro("unused",
                   by_rank([](const RankReport& each) { return each.unused; }))
      .def_prop_ro("times", &BackwardReports::times,
                   nb::rv_policy::reference_internal)
      .def("result", &BackwardReports::result, "unused"_a, "parameters"_a)
      .def("conclude", &conclude, "unused"_a, "nonfinite"_a, "overflowed"_a,
           "overlapping"_a, "first_bucket_ns"_a, "parameters"_a,
           "allow_globally_unused"_a);
}

}  // namespace paceline

#include "bind/py_host_sums.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <string.h>

#include <string>

#include "bind/bindings.h"
#include "bind/pointer.h"

namespace paceline {
namespace {

using namespace nb::literals;

std::vector<const void*> as_pointers(const std::vector<Pointer>& arrays) {
  std::vector<const void*> found;
  for (const Pointer each : arrays) found.push_back(as_pointer(each));
  return found;
}

}  // namespace

PyHostSums::PyHostSums(
    nb::object group, size_t buffer_bytes,
    const std::vector<std::tuple<size_t, size_t, int>>& buckets,
    size_t num_slots, size_t slot_bytes)
    : owner_(std::move(group)), group_(nb::cast<PyHostGroup*>(owner_)) {
  group_->collective(kUnlockBytes, -1, [&](HostGroup& core, double) {
    std::vector<SummedBucket> spans;
    for (const auto& [begin, end, dtype] : buckets)
      spans.push_back({begin, end, checked_dtype(dtype)});
    sums_ = std::make_unique<HostSums>(core.heap, buffer_bytes,
                                       std::move(spans), num_slots, slot_bytes);
  });
}

nb::bytes PyHostSums::read_slot(size_t index) {
  const HostSums& from = sums();
  return nb::bytes(reinterpret_cast<const char*>(from.slot(index)),
                   from.slot_bytes());
}

nb::list PyHostSums::read_slots() {
  nb::list found;
  for (size_t i = 0; i < sums().num_slots(); ++i) found.append(read_slot(i));
  return found;
}

void PyHostSums::write_slot(size_t index, nb::bytes payload) {
  work(0, [&](HostSums& to) {
    if (payload.size() != to.slot_bytes()) {
      misuse("a slot has " + std::to_string(to.slot_bytes()) + " bytes, not " +
             std::to_string(payload.size()));
    }
    memcpy(to.slot(index), payload.c_str(), payload.size());
  });
}

void bind_host_sums(nb::module_& m) {
  nb::class_<PyHostSums>(m, "HostSums")
      .def(nb::init<nb::object, size_t,
                    const std::vector<std::tuple<size_t, size_t, int>>&, size_t,
                    size_t>(),
           "group"_a, "buffer_bytes"_a, "buckets"_a, "num_slots"_a,
           "slot_bytes"_a)
      .def_prop_ro(
          "buffer_pointer",
          [](PyHostSums& s) {
            return reinterpret_cast<Pointer>(s.sums().gradient_buffer());
          })
      .def_prop_ro("waited_s",
                   [](PyHostSums& s) {
                     return static_cast<double>(s.sums().waited_ns()) * 1e-9;
                   })
      .def(
          "begin_backward",
          [](PyHostSums& s, double weight, bool is_in_gradients) {
            s.work(0, [&](HostSums& sums) {
              sums.begin_backward(weight, is_in_gradients);
            });
          },
          "weight"_a, "is_in_gradients"_a = false)
      .def(
          "post",
          [](PyHostSums& s, size_t bucket) {
            s.work(0, [&](HostSums& sums) { sums.post(bucket); });
          },
          "bucket"_a)
      .def(
          "is_complete",
          [](PyHostSums& s, size_t bucket) {
            return s.sums().is_complete(bucket);
          },
          "bucket"_a)
      .def(
          "wait_complete",
          [](PyHostSums& s, size_t bucket) {
            s.wait([&](HostSums& sums) { sums.wait_complete(bucket); });
          },
          "bucket"_a)
      .def(
          "total_weight",
          [](PyHostSums& s, std::pair<int, int> ranks) {
            return s.sums().total_weight({ranks.first, ranks.second});
          },
          "ranks"_a)
      .def(
          "sum",
          [](PyHostSums& s, size_t bucket, size_t first, size_t count,
             std::pair<int, int> ranks, Pointer out) {
            memory_at(out, s.bytes(bucket, count), "sum");
            ReduceStats seen;
            s.work(s.bytes(bucket, count), [&](HostSums& sums) {
              sums.sum(bucket, first, count, {ranks.first, ranks.second},
                       as_pointer(out), &seen);
            });
            return (seen.nonfinite_ranks[0] | seen.nonfinite_ranks[1]) == 0;
          },
          "bucket"_a, "first"_a, "count"_a, "ranks"_a, "out"_a)
      .def(
          "find_nonfinite",
          [](PyHostSums& s, size_t bucket, size_t first, size_t count) {
            uint64_t ranks[2];
            s.sums().find_nonfinite(bucket, first, count, ranks);
            std::vector<int> found;
            for (int r = 0; r < kMaxRanks; ++r) {
              if ((ranks[r / 64] >> (r % 64) & 1) != 0) found.push_back(r);
            }
            return found;
          },
          "bucket"_a, "first"_a, "count"_a)
      .def(
          "add_sums",
          [](PyHostSums& s, size_t bucket, const std::vector<Pointer>& sums,
             size_t count, Pointer out) {
            check_memory(sums, s.bytes(bucket, count), "add_sums");
            memory_at(out, s.bytes(bucket, count), "add_sums");
            s.work(s.bytes(bucket, count), [&](HostSums& core) {
              core.add_sums(bucket, as_pointers(sums), count, as_pointer(out));
            });
          },
          "bucket"_a, "sums"_a, "count"_a, "out"_a)
      .def(
          "publish",
          [](PyHostSums& s, size_t bucket, size_t first, size_t count,
             const std::vector<Pointer>& sums, double total_weight) {
            check_memory(sums, s.bytes(bucket, count), "publish");
            bool is_finite = true;
            s.work(s.bytes(bucket, count), [&](HostSums& core) {
              is_finite = core.publish(bucket, first, count, as_pointers(sums),
                                       total_weight);
            });
            return is_finite;
          },
          "bucket"_a, "first"_a, "count"_a, "sums"_a, "total_weight"_a)
      .def(
          "average",
          [](PyHostSums& s, size_t bucket, size_t first, size_t count,
             const std::vector<Pointer>& values,
             const std::vector<double>& weights, double total_weight,
             bool stops_at_nonfinite) {
            check_memory(values, s.bytes(bucket, count), "average");
            HostSums::Averaged found{};
            s.work(s.bytes(bucket, count), [&](HostSums& core) {
              found = core.average(bucket, first, count, as_pointers(values),
                                   weights, total_weight, stops_at_nonfinite);
            });
            return std::pair(found.count, found.is_finite);
          },
          "bucket"_a, "first"_a, "count"_a, "values"_a, "weights"_a,
          "total_weight"_a, "stops_at_nonfinite"_a)
      .def(
          "is_nonfinite",
          [](PyHostSums& s, size_t bucket, size_t first, size_t count) {
            return s.sums().is_nonfinite(bucket, first, count);
          },
          "bucket"_a, "first"_a, "count"_a)
      .def("count_share",
           [](PyHostSums& s) {
             s.work(0, [](HostSums& sums) { sums.count_share(); });
           })
      .def(
          "wait_published",
          [](PyHostSums& s, double timeout_s) {
            s.wait([&](HostSums& sums) { sums.wait_published(timeout_s); });
          },
          "timeout_s"_a = -1.0)
      .def("note_overflow", [](PyHostSums& s) { s.sums().note_overflow(); })
      .def_prop_ro("has_overflow",
                   [](PyHostSums& s) { return s.sums().has_overflow(); })
      .def("write_slot", &PyHostSums::write_slot, "index"_a, "payload"_a)
      .def("read_slot", &PyHostSums::read_slot, "index"_a)
      .def("read_slots", &PyHostSums::read_slots)
      .def("waiting_ranks",
           [](PyHostSums& s) { return s.sums().waiting_ranks(); })
      .def("keep_buffer", [](PyHostSums& s) { s.sums().keep_buffer(); })
      .def("close", [](PyHostSums& s) { s.sums().close(); });
}

}  // namespace paceline

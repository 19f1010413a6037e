// paceline._core: the core as Python sees it. The only folder that includes
// Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include "bind/failures.h"
#include "bind/gradient_hook.h"
#include "bind/handed_gradients.h"
#include "bind/hook_order.h"
#include "bind/iteration_notes.h"
#include "bind/module_snapshot.h"
#include "bind/pass_status.h"
#include "bind/py_compression.h"
#include "bind/py_hash.h"
#include "bind/py_host_group.h"
#include "bind/py_permutation.h"
#include "bind/py_reducer.h"
#include "core/control.h"
#include "core/faults.h"
#include "core/futex.h"
#include "core/life.h"
#include "kernels/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

void bind_kernels(nb::module_& m) {
  m.def(
      "set_isa", [](int isa) { return set_isa(static_cast<Isa>(isa)); },
      "isa"_a);
  m.def("best_isa", [] { return static_cast<int>(best_isa()); });
  m.def(
      "reduce_arrays",
      [](int dtype, int op, const std::vector<Pointer>& inputs,
         const std::vector<Pointer>& outputs, size_t count,
         const std::optional<std::vector<double>>& weights) {
        std::vector<void*> in;
        std::vector<void*> out;
        for (const Pointer p : inputs) in.push_back(as_pointer(p));
        for (const Pointer p : outputs) out.push_back(as_pointer(p));
        ReduceStats stats;
        reduce(static_cast<DType>(dtype), static_cast<ReduceOp>(op), in.data(),
               static_cast<int>(in.size()), out.data(),
               static_cast<int>(out.size()), count,
               weights ? weights->data() : nullptr, &stats);
        return nb::make_tuple(stats.squared_norm, stats.nonfinite_ranks[0],
                              stats.nonfinite_ranks[1]);
      },
      "dtype"_a, "op"_a, "inputs"_a, "outputs"_a, "count"_a,
      "weights"_a = nb::none(), "Runs one kernel on raw pointers; for tests.");
}

void bind_faults(nb::module_& m) {
  m.def("fault_points", [] {
    nb::list names;
    for (uint32_t p = 0; p < static_cast<uint32_t>(Point::kNumPoints); ++p)
      names.append(point_name(static_cast<Point>(p)));
    return names;
  });
  m.def(
      "arm_fault",
      [](int point, int action, uint32_t nth, int partner, int partner_point) {
        arm_fault(static_cast<Point>(point), static_cast<FaultAction>(action),
                  nth, {partner, static_cast<Point>(partner_point)});
      },
      "point"_a, "action"_a, "nth"_a, "partner"_a = -1, "partner_point"_a = 0,
      "At this thread's nth passage of the point: 0 kill, 1 stop, 2 segfault, "
      "3 raise, 4 go on; but not before the rank `partner` has passed its "
      "point once more.");
  m.def(
      "count_passages",
      [](Pointer board, int world, int rank) {
        count_passages(reinterpret_cast<Atomic<uint32_t>*>(board), world, rank);
      },
      "board"_a, "world"_a, "rank"_a,
      "Counts this process's passages of each point in memory that the ranks "
      "share: world times len(fault_points()) words of 4 bytes, zeroed.");
  m.def("disarm_fault", &disarm_fault);
}

void bind_group(nb::module_& m) {
  m.def(
      "create_region",
      [](int world, nb::bytes nonce) {
        if (world < 1 || world > kMaxWorld || nonce.size() != 16)
          misuse("create_region: world or nonce is wrong");
        uint64_t words[2];
        memcpy(words, nonce.c_str(), sizeof(words));
        return create_region(world, words);
      },
      "world"_a, "nonce"_a,
      "Returns the descriptor of a sealed memfd that holds a region for "
      "`world` ranks.");

  m.def(
      "region_nonce",
      [](int fd) {
        uint64_t nonce[2] = {};
        if (pread(fd, nonce, sizeof(nonce), offsetof(Header, nonce)) !=
            sizeof(nonce)) {
          raise_failure({.reason = Reason::kNoMemory,
                         .message = "the shared region can't be read"},
                        nullptr);
        }
        return nb::bytes(reinterpret_cast<const char*>(nonce), sizeof(nonce));
      },
      "fd"_a, "The 16 bytes that the maker of the region wrote into it.");

  constexpr double kDefault = -1.0;
  nb::class_<PyHostGroup>(m, "HostGroup", nb::is_weak_referenceable())
      .def(nb::init<int, int, nb::bytes, const std::string&, double, double,
                    double, nb::object>(),
           "fd"_a, "rank"_a, "nonce"_a, "name"_a, "timeout_s"_a,
           "warn_after_s"_a, "spin_us"_a = -1.0, "slow"_a = nb::none())
      .def("join", &PyHostGroup::join)
      .def_prop_ro("rank", [](PyHostGroup& g) { return g.group().rank(); })
      .def_prop_ro("world_size",
                   [](PyHostGroup& g) { return g.group().world(); })
      .def_prop_ro("name",
                   [](PyHostGroup& g) { return g.group().options().name; })
      .def_prop_ro("timeout_s", &PyHostGroup::timeout_s)
      .def_prop_ro("warn_after_s",
                   [](PyHostGroup& g) { return g.patience().warn_after_s; })
      .def(
          "with_patience",
          [](PyHostGroup& g, double timeout_s, double warn_after_s) {
            return PyHostGroup(g, Patience{timeout_s, warn_after_s});
          },
          "timeout_s"_a, "warn_after_s"_a, nb::keep_alive<0, 1>(),
          "The same group, for somebody whose calls wait for another time.")
      .def_prop_ro("is_closed",
                   [](PyHostGroup& g) { return g.group().is_closed(); })
      .def("all_reduce", &PyHostGroup::all_reduce, "pointer"_a, "count"_a,
           "dtype"_a, "op"_a, "weight"_a = 1.0, "timeout_s"_a = kDefault)
      .def("all_reduce_array", &PyHostGroup::all_reduce_array, "array"_a,
           "op"_a, "weight"_a, "timeout_s"_a)
      .def("reduce", &PyHostGroup::reduce, "pointer"_a, "count"_a, "dtype"_a,
           "op"_a, "root"_a, "timeout_s"_a = kDefault)
      .def("reduce_scatter", &PyHostGroup::reduce_scatter, "in_pointer"_a,
           "out_pointer"_a, "count"_a, "dtype"_a, "op"_a,
           "timeout_s"_a = kDefault)
      .def("broadcast", &PyHostGroup::broadcast, "pointer"_a, "nbytes"_a,
           "root"_a, "timeout_s"_a = kDefault)
      .def("broadcast_all", &PyHostGroup::broadcast_all, "pieces"_a, "sizes"_a,
           "root"_a, "timeout_s"_a = kDefault)
      .def("all_gather", &PyHostGroup::all_gather, "in_pointer"_a,
           "out_pointer"_a, "nbytes"_a, "timeout_s"_a = kDefault)
      .def("gather", &PyHostGroup::gather, "in_pointer"_a, "out_pointer"_a,
           "nbytes"_a, "root"_a, "timeout_s"_a = kDefault)
      .def("scatter", &PyHostGroup::scatter, "in_pointer"_a, "out_pointer"_a,
           "nbytes"_a, "root"_a, "timeout_s"_a = kDefault)
      .def("all_to_all", &PyHostGroup::all_to_all, "in_pointer"_a, "in_bytes"_a,
           "out_pointer"_a, "out_bytes"_a, "timeout_s"_a = kDefault)
      .def("barrier", &PyHostGroup::barrier, "timeout_s"_a = kDefault)
      .def("send", &PyHostGroup::send, "pointer"_a, "nbytes"_a, "dst"_a,
           "tag"_a = 0, "timeout_s"_a = kDefault)
      .def("recv", &PyHostGroup::recv, "pointer"_a, "nbytes"_a, "src"_a,
           "tag"_a = 0, "timeout_s"_a = kDefault)
      .def("start_send", &PyHostGroup::start_send, "pointer"_a, "nbytes"_a,
           "dst"_a, "tag"_a = 0)
      .def("start_receive", &PyHostGroup::start_receive, "pointer"_a,
           "nbytes"_a, "src"_a, "tag"_a = 0)
      .def("test", &PyHostGroup::test, "transfer"_a)
      .def(
          "forget",
          [](PyHostGroup& g, TransferId id) { return g.group().forget(id); },
          "transfer"_a)
      .def("check_usable",
           [](PyHostGroup& g) {
             g.call(0, [](HostGroup& group) { group.check_usable(); });
           })
      .def("wait", &PyHostGroup::wait, "transfer"_a, "timeout_s"_a = kDefault)
      .def("source_of_waiting", &PyHostGroup::source_of_waiting, "tag"_a = 0)
      .def("wait_for_source", &PyHostGroup::wait_for_source, "tag"_a = 0,
           "timeout_s"_a = kDefault)
      .def("allocate", &PyHostGroup::allocate, "nbytes"_a,
           "timeout_s"_a = kDefault)
      .def(
          "free", [](PyHostGroup& g, size_t offset) { g.group().free(offset); },
          "offset"_a)
      .def("pointer", &PyHostGroup::pointer, "offset"_a, "rank"_a)
      .def(
          "abort",
          [](PyHostGroup& g, const std::string& message) {
            g.group().abort(message.c_str());
          },
          "message"_a)
      .def(
          "set_activity",
          [](PyHostGroup& g, const std::string& text) {
            g.group().set_activity(text.c_str());
          },
          "text"_a)
      .def("close",
           [](PyHostGroup& g) {
             nb::gil_scoped_release unlocked;
             g.group().close();
           })
      .def("records", [](PyHostGroup& g) {
        g.check_not_forked();
        return describe_ranks(g.group());
      });
}

void bind_reducer(nb::module_& m) {
  nb::class_<PyReducer>(m, "Reducer")
      .def(nb::init<nb::object, size_t, const std::vector<size_t>&,
                    const std::vector<size_t>&, const std::vector<int>&,
                    const std::vector<std::pair<size_t, size_t>>&, bool>(),
           "group"_a, "arena_bytes"_a, "offsets"_a, "counts"_a, "dtypes"_a,
           "buckets"_a, "assigns_chunks"_a = false)
      .def_prop_ro("arena_pointer",
                   [](PyReducer& r) {
                     return reinterpret_cast<Pointer>(r.reducer().arena());
                   })
      .def_prop_ro("waited_s",
                   [](PyReducer& r) {
                     return static_cast<double>(r.reducer().waited_ns()) * 1e-9;
                   })
      .def("note_first_bucket",
           [](PyReducer& r) { r.reducer().note_first_bucket(); })
      .def_prop_ro("first_bucket_ns",
                   [](PyReducer& r) { return r.reducer().first_bucket_ns(); })
      .def_prop_ro("passes", [](PyReducer& r) { return r.reducer().passes(); })
      .def_prop_ro("in_pass",
                   [](PyReducer& r) { return r.reducer().in_pass(); })
      .def_prop_ro("num_chunks",
                   [](PyReducer& r) { return r.reducer().num_chunks(); })
      .def(
          "set_weight",
          [](PyReducer& r, double weight) { r.reducer().set_weight(weight); },
          "weight"_a)
      .def(
          "set_note",
          [](PyReducer& r, uint32_t note) { r.reducer().set_note(note); },
          "note"_a)
      .def("mark_ready", &PyReducer::mark_ready, "param"_a, "grad_pointer"_a)
      .def("mark_copied", &PyReducer::mark_copied, "param"_a, "grad_pointer"_a,
           "nbytes"_a)
      .def("finish", &PyReducer::finish, "status"_a, "allow_unused"_a,
           "allow_nobodys"_a = false)
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
      .def("close", &PyReducer::close);
}

void bind_permutation(nb::module_& m) {
  nb::class_<PyPermutation>(m, "Permutation")
      .def(nb::init<uint64_t, uint64_t>(), "length"_a, "key"_a)
      .def_prop_ro("length", &PyPermutation::length)
      .def("fill", &PyPermutation::fill, "out"_a, "start"_a, "stride"_a = 1,
           "out[i] = the index at place start + i * stride.")
      .def("map", &PyPermutation::map, "places"_a,
           "Replaces each place by its index.");
}

void bind_compression(nb::module_& m) {
  m.def("encoded_bytes", &py_encoded_bytes, "encoding"_a, "count"_a);
  m.def("encode", &py_encode, "encoding"_a, "values"_a, "error"_a, "factor"_a,
        "count"_a, "codes"_a, "An `error` of 0 is none.");
  m.def("decode_mean", &py_decode_mean, "encoding"_a, "codes"_a, "weights"_a,
        "count"_a, "mean"_a);
}

}  // namespace
}  // namespace paceline

NB_MODULE(_core, m) {
  if (PyArray_ImportNumPyAPI() != 0) throw nb::python_error();
  // torch keeps process groups, and so their cores, beyond the end of the
  // interpreter. That is no mistake of ours, and no news for users.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void*) {
        try {
          std::rethrow_exception(thrown);
        } catch (const paceline::Failure& failure) {  // outside of any call
          paceline::set_error(failure, nullptr);
        }
      });
  m.attr("ABI_VERSION") = paceline::kAbiVersion;
  m.attr("MAX_RANKS") = paceline::kMaxWorld;
  m.def("set_failure_factory", &paceline::set_failure_factory, "factory"_a,
        "factory(facts: dict) -> the exception to raise.");
  m.def("calls_under_way", [] { return paceline::calls_without_lock.load(); });
  m.def("has_futex_waitv", &paceline::has_futex_waitv);
  m.def("disable_futex_waitv", &paceline::disable_futex_waitv, "disabled"_a);
  m.def("has_robust_list", &paceline::has_robust_list);
  m.def("disable_robust_list", &paceline::disable_robust_list, "disabled"_a);
  paceline::bind_kernels(m);
  paceline::bind_faults(m);
  paceline::bind_group(m);
  paceline::bind_pass_status(m);
  paceline::bind_reducer(m);
  paceline::bind_handed_gradients(m);
  paceline::bind_hook_order(m);
  paceline::bind_iteration_notes(m);
  paceline::bind_gradient_hook(m);
  paceline::bind_module_snapshot(m);
  paceline::bind_permutation(m);
  paceline::bind_compression(m);
  paceline::bind_hash(m);
}

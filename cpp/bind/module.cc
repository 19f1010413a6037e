// paceline._core: the core as Python sees it. The only file that includes
// Python.
//
// Pointers cross as integers. A call holds Python's lock until it sleeps or has
// much to copy, because giving the lock away and taking it back costs more than
// a small collective.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <type_traits>

#include "bind/buffer.h"
#include "bind/call.h"
#include "bind/failures.h"
#include "collectives/host_group.h"
#include "core/control.h"
#include "core/faults.h"
#include "core/futex.h"
#include "kernels/kernels.h"
#include "reducer/reducer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

using Pointer = uintptr_t;

void* as_pointer(Pointer pointer) { return reinterpret_cast<void*>(pointer); }

// Payloads from which copying takes longer than handing Python's lock to
// another thread and back.
constexpr size_t kUnlockBytes = 64 * 1024;
/// How long to wait for another thread's collective before a look at signals.
constexpr std::chrono::milliseconds kLockSlice{100};

DType checked_dtype(int dtype) {
  if (dtype < 0 || dtype > static_cast<int>(DType::kBool))
    misuse("unknown dtype number " + std::to_string(dtype));
  return static_cast<DType>(dtype);
}

ReduceOp checked_op(int op, DType dtype) {
  if (op < 0 || op > static_cast<int>(ReduceOp::kProduct))
    misuse("unknown op number " + std::to_string(op));
  if (!is_supported(dtype, static_cast<ReduceOp>(op)))
    misuse("mean needs a floating type");
  return static_cast<ReduceOp>(op);
}

void check_root(const HostGroup& group, int root) {
  if (root < 0 || root >= group.world()) {
    misuse("root " + std::to_string(root) + " is not a rank of a group of " +
           std::to_string(group.world()));
  }
}

template <class Body>
using Result = std::invoke_result_t<Body, HostGroup&>;

/// A HostGroup, and how to build its errors.
class PyHostGroup {
 public:
  PyHostGroup(int fd, int rank, nb::bytes nonce, const std::string& name,
              double timeout_s, double warn_after_s, double spin_us,
              nb::object slow) {
    if (nonce.size() != 16) misuse("the nonce must have 16 bytes");
    uint64_t words[2];
    memcpy(words, nonce.c_str(), sizeof(words));
    slow_ = std::move(slow);
    {
      CallHooks hooks(nullptr, slow_, true);
      group_ = std::make_unique<HostGroup>(
          fd, rank, words,
          GroupOptions{name, timeout_s, warn_after_s, spin_us});
    }
    call(kUnlockBytes, [](HostGroup& group) { group.join(); });
  }

  /// Turns failures of `body` into Python exceptions.
  template <class Body>
  Result<Body> guard(CallHooks& hooks, Body body) {
    try {
      return body(*group_);
    } catch (const Failure& failure) {
      // Whoever waits for this rank in the same call would wait in vain.
      if (failure.reason == Reason::kInterrupted)
        group_->abort("interrupted by a signal (KeyboardInterrupt?)");
      hooks.lock();
      raise_failure(failure, group_.get());
    }
  }

  /// Runs `body`, which will copy about `bytes`.
  template <class Body>
  Result<Body> call(size_t bytes, Body body) {
    check_not_forked();
    CallHooks hooks(group_.get(), slow_, bytes >= kUnlockBytes);
    return guard(hooks, body);
  }

  /// The same for a collective: those of one process take turns.
  template <class Body>
  Result<Body> collective(size_t bytes, Body body) {
    check_not_forked();
    CallHooks hooks(group_.get(), slow_, bytes >= kUnlockBytes);
    std::unique_lock turn(group_->call_mutex(), std::try_to_lock);
    if (!turn.owns_lock()) hooks.before_block();
    while (!turn.owns_lock() && !turn.try_lock_for(kLockSlice)) {
      if (hooks.interrupted()) throw nb::python_error();
    }
    return guard(hooks, body);
  }

  HostGroup& group() { return *group_; }
  /// Before anything else is touched: a forked child maps no region, and a lock
  /// may have been held by a thread that it does not have.
  void check_not_forked() {
    if (group_->is_forked())
      raise_failure({.reason = Reason::kForked}, group_.get());
  }

  void all_reduce(Pointer data, size_t count, int dtype, int op, double weight,
                  double timeout_s) {
    collective(count, [&](HostGroup& group) {
      const DType type = checked_dtype(dtype);
      group.all_reduce(as_pointer(data), count, type, checked_op(op, type),
                       weight, timeout_s);
    });
  }
  /// The same on a numpy array; false: it is not one that can be taken as it
  /// is.
  bool all_reduce_array(nb::handle array, int op, double weight,
                        double timeout_s) {
    const ArrayBuffer buffer(array.ptr());
    if (!buffer.dtype() ||
        !is_supported(*buffer.dtype(), static_cast<ReduceOp>(op)))
      return false;
    collective(buffer.count(), [&](HostGroup& group) {
      group.all_reduce(buffer.data(), buffer.count(), *buffer.dtype(),
                       static_cast<ReduceOp>(op), weight, timeout_s);
    });
    return true;
  }
  void reduce(Pointer data, size_t count, int dtype, int op, int root,
              double timeout_s) {
    collective(count, [&](HostGroup& group) {
      check_root(group, root);
      const DType type = checked_dtype(dtype);
      group.reduce(as_pointer(data), count, type, checked_op(op, type), root,
                   timeout_s);
    });
  }
  void reduce_scatter(Pointer in, Pointer out, size_t count, int dtype, int op,
                      double timeout_s) {
    collective(count, [&](HostGroup& group) {
      const DType type = checked_dtype(dtype);
      group.reduce_scatter(as_pointer(in), as_pointer(out), count, type,
                           checked_op(op, type), timeout_s);
    });
  }
  void broadcast(Pointer data, size_t bytes, int root, double timeout_s) {
    collective(bytes, [&](HostGroup& group) {
      check_root(group, root);
      group.broadcast(as_pointer(data), bytes, root, timeout_s);
    });
  }
  void all_gather(Pointer in, Pointer out, size_t bytes, double timeout_s) {
    collective(bytes, [&](HostGroup& group) {
      group.all_gather(as_pointer(in), as_pointer(out), bytes, timeout_s);
    });
  }
  void gather(Pointer in, Pointer out, size_t bytes, int root,
              double timeout_s) {
    collective(bytes, [&](HostGroup& group) {
      check_root(group, root);
      group.gather(as_pointer(in), as_pointer(out), bytes, root, timeout_s);
    });
  }
  void scatter(Pointer in, Pointer out, size_t bytes, int root,
               double timeout_s) {
    collective(bytes, [&](HostGroup& group) {
      check_root(group, root);
      group.scatter(as_pointer(in), as_pointer(out), bytes, root, timeout_s);
    });
  }
  void all_to_all(Pointer in, const std::vector<uint64_t>& in_bytes,
                  Pointer out, const std::vector<uint64_t>& out_bytes,
                  double timeout_s) {
    collective(kUnlockBytes, [&](HostGroup& group) {
      group.all_to_all(as_pointer(in), in_bytes, as_pointer(out), out_bytes,
                       timeout_s);
    });
  }
  void barrier(double timeout_s) {
    collective(0, [&](HostGroup& group) { group.barrier(timeout_s); });
  }
  TransferId start_send(Pointer data, size_t bytes, int destination,
                        uint64_t tag) {
    return call(bytes, [&](HostGroup& group) {
      return group.start_send(as_pointer(data), bytes, destination, tag);
    });
  }
  TransferId start_receive(Pointer data, size_t bytes, int source,
                           uint64_t tag) {
    return call(bytes, [&](HostGroup& group) {
      return group.start_receive(as_pointer(data), bytes, source, tag);
    });
  }
  bool test(TransferId id) {
    return call(kUnlockBytes, [&](HostGroup& group) { return group.test(id); });
  }
  void wait(TransferId id, double timeout_s) {
    call(kUnlockBytes, [&](HostGroup& group) { group.wait(id, timeout_s); });
  }
  void send(Pointer data, size_t bytes, int destination, uint64_t tag,
            double timeout_s) {
    wait(start_send(data, bytes, destination, tag), timeout_s);
  }
  void recv(Pointer data, size_t bytes, int source, uint64_t tag,
            double timeout_s) {
    wait(start_receive(data, bytes, source, tag), timeout_s);
  }
  size_t allocate(size_t bytes, double timeout_s) {
    return collective(kUnlockBytes, [&](HostGroup& group) {
      return group.allocate(bytes, timeout_s);
    });
  }
  Pointer pointer(size_t offset, int rank) {
    check_root(*group_, rank);
    return reinterpret_cast<Pointer>(group_->slab(rank) + offset);
  }

 private:
  std::unique_ptr<HostGroup> group_;
  nb::object slow_;
};

/// A Reducer, with the group kept alive behind it.
class PyReducer {
 public:
  PyReducer(nb::object group, size_t arena_bytes,
            const std::vector<size_t>& offsets,
            const std::vector<size_t>& counts, const std::vector<int>& dtypes,
            const std::vector<std::pair<size_t, size_t>>& buckets)
      : owner_(std::move(group)), group_(nb::cast<PyHostGroup*>(owner_)) {
    group_->collective(kUnlockBytes, [&](HostGroup& core) {
      if (offsets.size() != counts.size() || offsets.size() != dtypes.size()) {
        misuse("offsets, counts and dtypes must have one entry per parameter");
      }
      std::vector<ParameterSpan> parameters;
      for (size_t i = 0; i < offsets.size(); ++i) {
        parameters.push_back({offsets[i], counts[i], checked_dtype(dtypes[i])});
      }
      std::vector<BucketSpan> spans;
      for (const auto& [begin, end] : buckets) spans.push_back({begin, end});
      reducer_ = std::make_unique<Reducer>(
          core, arena_bytes, std::move(parameters), std::move(spans));
    });
  }

  void mark_ready(size_t parameter, Pointer gradient) {
    group_->call(0, [&](HostGroup&) {
      reducer_->mark_ready(parameter, as_pointer(gradient));
    });
  }
  uint32_t finish(uint32_t forwards, bool allow_unused) {
    return group_->call(kUnlockBytes, [&](HostGroup&) {
      return reducer_->finish(forwards, allow_unused);
    });
  }
  Reducer& reducer() {
    group_->check_not_forked();
    return *reducer_;
  }

 private:
  nb::object owner_;
  PyHostGroup* group_;
  std::unique_ptr<Reducer> reducer_;
};

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
      [](int point, int action, uint32_t nth) {
        arm_fault(static_cast<Point>(point), static_cast<FaultAction>(action),
                  nth);
      },
      "point"_a, "action"_a, "nth"_a,
      "At this thread's nth passage of the point: 0 kill, 1 stop, 2 segfault, "
      "3 raise.");
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
      .def_prop_ro("rank", [](PyHostGroup& g) { return g.group().rank(); })
      .def_prop_ro("world_size",
                   [](PyHostGroup& g) { return g.group().world(); })
      .def_prop_ro("name",
                   [](PyHostGroup& g) { return g.group().options().name; })
      .def_prop_ro("timeout_s",
                   [](PyHostGroup& g) { return g.group().options().timeout_s; })
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
                    const std::vector<std::pair<size_t, size_t>>&>(),
           "group"_a, "arena_bytes"_a, "offsets"_a, "counts"_a, "dtypes"_a,
           "buckets"_a)
      .def_prop_ro("arena_pointer",
                   [](PyReducer& r) {
                     return reinterpret_cast<Pointer>(r.reducer().arena());
                   })
      .def_prop_ro("waited_s",
                   [](PyReducer& r) {
                     return static_cast<double>(r.reducer().waited_ns()) * 1e-9;
                   })
      .def_prop_ro("passes", [](PyReducer& r) { return r.reducer().passes(); })
      .def_prop_ro("in_pass",
                   [](PyReducer& r) { return r.reducer().in_pass(); })
      .def_prop_ro("num_chunks",
                   [](PyReducer& r) { return r.reducer().num_chunks(); })
      .def(
          "set_weight",
          [](PyReducer& r, double weight) { r.reducer().set_weight(weight); },
          "weight"_a)
      .def("mark_ready", &PyReducer::mark_ready, "param"_a, "grad_pointer"_a)
      .def("finish", &PyReducer::finish, "forwards"_a, "allow_unused"_a)
      .def(
          "unused",
          [](PyReducer& r, int rank) { return r.reducer().unused(rank); },
          "rank"_a)
      .def("globally_unused",
           [](PyReducer& r) { return r.reducer().globally_unused(); })
      .def("forwards_by_rank",
           [](PyReducer& r) { return r.reducer().forwards_by_rank(); })
      .def("nonfinite", [](PyReducer& r) { return r.reducer().nonfinite(); })
      .def("squared_norm",
           [](PyReducer& r) { return r.reducer().squared_norm(); })
      .def("close", [](PyReducer& r) { r.reducer().close(); });
}

}  // namespace
}  // namespace paceline

NB_MODULE(_core, m) {
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
  m.def("has_futex_waitv", &paceline::has_futex_waitv);
  m.def("disable_futex_waitv", &paceline::disable_futex_waitv, "disabled"_a);
  paceline::bind_kernels(m);
  paceline::bind_faults(m);
  paceline::bind_group(m);
  paceline::bind_reducer(m);
}

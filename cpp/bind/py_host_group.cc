#include "bind/py_host_group.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bind/array_buffer.h"
#include "bind/bindings.h"
#include "collectives/all_gather.h"
#include "collectives/all_reduce.h"
#include "collectives/all_to_all.h"
#include "collectives/barrier.h"
#include "collectives/broadcast.h"
#include "collectives/reduce_scatter.h"
#include "core/clock.h"

namespace paceline {
namespace {

using namespace nb::literals;

/// How long to wait for another thread's collective before checking for
/// signals.
constexpr std::chrono::nanoseconds kLockSlice{100'000'000};

ReduceOp checked_op(int op, DType dtype) {
  if (op < 0 || op > static_cast<int>(ReduceOp::kProduct))
    misuse("unknown op number " + std::to_string(op));
  if (!is_supported(dtype, static_cast<ReduceOp>(op)))
    misuse("mean needs a floating type");
  return static_cast<ReduceOp>(op);
}

/// The bytes that a call moves; 0 for an unknown dtype, which the call itself
/// refuses.
size_t bytes_of(size_t count, int dtype) {
  return is_dtype(dtype) ? count * dtype_bytes(static_cast<DType>(dtype)) : 0;
}

void check_root(const HostGroup& group, int root) {
  if (root < 0 || root >= group.world()) {
    misuse("root " + std::to_string(root) + " is not a rank of a group of " +
           std::to_string(group.world()));
  }
}

/// Whether copying it costs less than a collective of its own.
bool is_small(size_t bytes) { return bytes <= 64 * 1024; }

}  // namespace

void PyHostGroup::all_reduce(Pointer data, size_t count, int dtype, int op,
                             double weight, double timeout_s) {
  void* const values = memory_at(data, bytes_of(count, dtype), "all_reduce");
  collective(bytes_of(count, dtype), timeout_s,
             [&](HostGroup& group, double left_s) {
               const DType type = checked_dtype(dtype);
               paceline::all_reduce(group.calls, values, count, type,
                                    checked_op(op, type), weight, left_s);
             });
}

bool PyHostGroup::all_reduce_array(nb::handle array, nb::handle ordinal,
                                   double weight, double timeout_s) {
  const std::optional<ArrayBuffer> buffer = array_buffer(array.ptr());
  const long op = PyLong_AsLong(ordinal.ptr());
  if (op == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (!buffer || !is_supported(buffer->dtype, static_cast<ReduceOp>(op)))
    return false;
  const size_t bytes = buffer->count * dtype_bytes(buffer->dtype);
  collective(bytes, timeout_s, [&](HostGroup& group, double left_s) {
    paceline::all_reduce(group.calls, buffer->data, buffer->count,
                         buffer->dtype, static_cast<ReduceOp>(op), weight,
                         left_s);
  });
  return true;
}

void PyHostGroup::reduce(Pointer data, size_t count, int dtype, int op,
                         int root, double timeout_s) {
  void* const values = memory_at(data, bytes_of(count, dtype), "reduce");
  collective(bytes_of(count, dtype), timeout_s,
             [&](HostGroup& group, double left_s) {
               check_root(group, root);
               const DType type = checked_dtype(dtype);
               paceline::reduce(group.calls, values, count, type,
                                checked_op(op, type), root, left_s);
             });
}

void PyHostGroup::reduce_scatter(Pointer in, Pointer out, size_t count,
                                 int dtype, int op, double timeout_s) {
  memory_at(in, bytes_of(count, dtype), "reduce_scatter");
  memory_at(out, bytes_of(count, dtype), "reduce_scatter");
  collective(
      bytes_of(count, dtype), timeout_s, [&](HostGroup& group, double left_s) {
        const DType type = checked_dtype(dtype);
        paceline::reduce_scatter(group.calls, as_pointer(in), as_pointer(out),
                                 count, type, checked_op(op, type), left_s);
      });
}

void PyHostGroup::broadcast(Pointer data, size_t bytes, int root,
                            double timeout_s) {
  memory_at(data, bytes, "broadcast");
  collective(bytes, timeout_s, [&](HostGroup& group, double left_s) {
    check_root(group, root);
    paceline::broadcast(group.calls, as_pointer(data), bytes, root, left_s);
  });
}

void PyHostGroup::broadcast_all(const std::vector<Pointer>& pieces,
                                const std::vector<size_t>& sizes, int root,
                                double timeout_s) {
  if (pieces.size() != sizes.size())
    misuse("broadcast_all: pieces and sizes must have the same length");
  check_memory(pieces, sizes, "broadcast_all");
  size_t packed_bytes = 0;
  for (const size_t size : sizes) packed_bytes += is_small(size) ? size : 0;
  std::vector<std::byte> packed(packed_bytes);
  collective(packed_bytes, timeout_s, [&](HostGroup& group, double left_s) {
    check_root(group, root);
    const auto copy_small = [&](bool pack) {
      std::byte* at = packed.data();
      for (size_t i = 0; i < pieces.size(); ++i) {
        if (!is_small(sizes[i])) continue;
        void* const piece = as_pointer(pieces[i]);
        memcpy(pack ? at : piece, pack ? piece : at, sizes[i]);
        at += sizes[i];
      }
    };
    const bool is_root = group.rank() == root;
    if (is_root) copy_small(true);
    if (packed_bytes > 0)
      paceline::broadcast(group.calls, packed.data(), packed_bytes, root,
                          left_s);
    if (!is_root) copy_small(false);
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (!is_small(sizes[i]))
        paceline::broadcast(group.calls, as_pointer(pieces[i]), sizes[i], root,
                            left_s);
    }
  });
}

void PyHostGroup::all_gather(Pointer in, Pointer out, size_t bytes,
                             double timeout_s) {
  memory_at(in, bytes, "all_gather");
  memory_at(out, bytes, "all_gather");
  collective(bytes, timeout_s, [&](HostGroup& group, double left_s) {
    paceline::all_gather(group.calls, as_pointer(in), as_pointer(out), bytes,
                         left_s);
  });
}

void PyHostGroup::all_gather_pieces(const std::vector<Pointer>& pieces,
                                    const std::vector<size_t>& sizes,
                                    const std::vector<size_t>& counts,
                                    double timeout_s) {
  if (pieces.size() != sizes.size())
    misuse("all_gather_pieces: pieces and sizes must have the same length");
  check_memory(pieces, sizes, "all_gather_pieces");
  if (counts.size() != static_cast<size_t>(group_->world()) ||
      std::accumulate(counts.begin(), counts.end(), size_t{0}) != pieces.size())
    misuse(
        "all_gather_pieces: counts must have a number of pieces for each "
        "rank, of all pieces together");
  std::vector<std::vector<std::span<std::byte>>> blocks(counts.size());
  size_t next = 0, bytes = 0;
  for (size_t r = 0; r < counts.size(); ++r) {
    for (const size_t end = next + counts[r]; next < end; ++next) {
      blocks[r].emplace_back(static_cast<std::byte*>(as_pointer(pieces[next])),
                             sizes[next]);
      bytes += sizes[next];
    }
  }
  collective(bytes, timeout_s, [&](HostGroup& group, double left_s) {
    paceline::all_gather_pieces(group.calls, blocks, left_s);
  });
}

void PyHostGroup::gather(Pointer in, Pointer out, size_t bytes, int root,
                         double timeout_s) {
  memory_at(in, bytes, "gather");
  if (group_->rank() == root) memory_at(out, bytes, "gather");
  collective(bytes, timeout_s, [&](HostGroup& group, double left_s) {
    check_root(group, root);
    paceline::gather(group.calls, as_pointer(in), as_pointer(out), bytes, root,
                     left_s);
  });
}

void PyHostGroup::scatter(Pointer in, Pointer out, size_t bytes, int root,
                          double timeout_s) {
  if (group_->rank() == root) memory_at(in, bytes, "scatter");
  memory_at(out, bytes, "scatter");
  collective(bytes, timeout_s, [&](HostGroup& group, double left_s) {
    check_root(group, root);
    paceline::scatter(group.calls, as_pointer(in), as_pointer(out), bytes, root,
                      left_s);
  });
}

void PyHostGroup::all_to_all(Pointer in, const std::vector<uint64_t>& in_bytes,
                             Pointer out,
                             const std::vector<uint64_t>& out_bytes,
                             double timeout_s) {
  const auto total = [](const std::vector<uint64_t>& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), uint64_t{0});
  };
  memory_at(in, total(in_bytes), "all_to_all");
  memory_at(out, total(out_bytes), "all_to_all");
  collective(kUnlockBytes, timeout_s, [&](HostGroup& group, double left_s) {
    paceline::all_to_all(group.calls, as_pointer(in), in_bytes, as_pointer(out),
                         out_bytes, left_s);
  });
}

void PyHostGroup::barrier(double timeout_s) {
  collective(0, timeout_s, [&](HostGroup& group, double left_s) {
    paceline::barrier(group.calls, left_s);
  });
}

TransferId PyHostGroup::start_send(Pointer data, size_t bytes, int destination,
                                   uint64_t tag) {
  memory_at(data, bytes, "send");
  return call(bytes, [&](HostGroup& group) {
    return group.point_to_point.start_send(as_pointer(data), bytes, destination,
                                           tag);
  });
}

TransferId PyHostGroup::start_receive(Pointer data, size_t bytes, int source,
                                      uint64_t tag) {
  memory_at(data, bytes, "recv");
  return call(bytes, [&](HostGroup& group) {
    return group.point_to_point.start_receive(as_pointer(data), bytes, source,
                                              tag);
  });
}

bool PyHostGroup::test(TransferId id) {
  return call(kUnlockBytes,
              [&](HostGroup& group) { return group.point_to_point.test(id); });
}

void PyHostGroup::wait(TransferId id, double timeout_s) {
  call(kUnlockBytes,
       [&](HostGroup& group) { group.point_to_point.wait(id, timeout_s); });
}

int PyHostGroup::source_of_waiting(uint64_t tag) {
  return call(0, [&](HostGroup& group) {
    return group.point_to_point.source_of_waiting(tag);
  });
}

int PyHostGroup::wait_for_source(uint64_t tag, double timeout_s) {
  return call(0, [&](HostGroup& group) {
    return group.point_to_point.wait_for_source(tag, timeout_s);
  });
}

void PyHostGroup::send(Pointer data, size_t bytes, int destination,
                       uint64_t tag, double timeout_s) {
  wait(start_send(data, bytes, destination, tag), timeout_s);
}

void PyHostGroup::recv(Pointer data, size_t bytes, int source, uint64_t tag,
                       double timeout_s) {
  wait(start_receive(data, bytes, source, tag), timeout_s);
}

size_t PyHostGroup::allocate(size_t bytes, double timeout_s) {
  return collective(kUnlockBytes, timeout_s,
                    [&](HostGroup& group, double left_s) {
                      return group.heap.allocate(bytes, left_s);
                    });
}

Pointer PyHostGroup::pointer(size_t offset, int rank) {
  check_root(*group_, rank);
  return reinterpret_cast<Pointer>(group_->session.slab(rank) + offset);
}

double PyHostGroup::wait_for_turn(CallHooks& hooks, double timeout_s) {
  Turn& turn = group_->calls.turn();
  if (turn.is_mine()) throw Failure{.reason = Reason::kNested};
  hooks.before_block();
  const int64_t deadline_ns = now_ns() + group_->session.timeout_ns(timeout_s);
  const int64_t start_ns = now_ns();
  while (true) {
    const int64_t left_ns = std::max<int64_t>(0, deadline_ns - now_ns());
    if (turn.try_take_for(
            std::min(kLockSlice, std::chrono::nanoseconds(left_ns))))
      return static_cast<double>(std::max<int64_t>(0, deadline_ns - now_ns())) *
             1e-9;
    group_->session.check_usable();
    if (left_ns == 0) {
      throw Failure{.reason = Reason::kNoTurn,
                    .waited_s = static_cast<double>(now_ns() - start_ns) * 1e-9,
                    .thread = turn.holder()};
    }
    if (hooks.interrupted(true)) throw nb::python_error();
  }
}

void bind_host_group(nb::module_& m) {
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
      .def_prop_ro(
          "name",
          [](PyHostGroup& g) { return g.group().session.options().name; })
      .def_prop_ro("timeout_s", &PyHostGroup::timeout_s)
      .def_prop_ro("warn_after_s",
                   [](PyHostGroup& g) { return g.patience().warn_after_s; })
      .def(
          "with_patience",
          [](PyHostGroup& g, double timeout_s, double warn_after_s) {
            return PyHostGroup(g, Patience{timeout_s, warn_after_s});
          },
          "timeout_s"_a, "warn_after_s"_a, nb::keep_alive<0, 1>(),
          "The same group, with other time-outs for calls.")
      .def_prop_ro("is_closed",
                   [](PyHostGroup& g) { return g.group().session.is_closed(); })
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
      .def("all_gather_pieces", &PyHostGroup::all_gather_pieces, "pieces"_a,
           "sizes"_a, "counts"_a, "timeout_s"_a = kDefault)
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
          [](PyHostGroup& g, TransferId id) {
            return g.group().point_to_point.forget(id);
          },
          "transfer"_a)
      .def("check_usable",
           [](PyHostGroup& g) {
             g.call(0, [](HostGroup& group) { group.session.check_usable(); });
           })
      .def("wait", &PyHostGroup::wait, "transfer"_a, "timeout_s"_a = kDefault)
      .def("source_of_waiting", &PyHostGroup::source_of_waiting, "tag"_a = 0)
      .def("wait_for_source", &PyHostGroup::wait_for_source, "tag"_a = 0,
           "timeout_s"_a = kDefault)
      .def("allocate", &PyHostGroup::allocate, "nbytes"_a,
           "timeout_s"_a = kDefault)
      .def(
          "free",
          [](PyHostGroup& g, size_t offset) { g.group().heap.free(offset); },
          "offset"_a)
      .def("pointer", &PyHostGroup::pointer, "offset"_a, "rank"_a)
      .def(
          "abort",
          [](PyHostGroup& g, const std::string& message) {
            g.group().session.abort(message.c_str());
          },
          "message"_a)
      .def(
          "set_activity",
          [](PyHostGroup& g, const std::string& text, uint32_t forwards) {
            g.group().session.set_activity(text.c_str(), forwards);
          },
          "text"_a, "forwards"_a = 0)
      .def("close",
           [](PyHostGroup& g) {
             nb::gil_scoped_release unlocked;
             g.group().session.close();
           })
      .def("records", [](PyHostGroup& g) {
        g.check_not_forked();
        return describe_ranks(g.group());
      });
}

}  // namespace paceline

// HostGroup as Python calls it: pointers as integers, failures as exceptions.
//
// A call holds Python's lock until it sleeps or has much to copy, because
// giving the lock away and taking it back costs more than a small collective.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bind/buffer.h"
#include "bind/call.h"
#include "bind/failures.h"
#include "collectives/host_group.h"
#include "core/clock.h"

namespace paceline {

namespace nb = nanobind;

using Pointer = uintptr_t;

inline void* as_pointer(Pointer pointer) {
  return reinterpret_cast<void*>(pointer);
}

// Payloads from which copying takes longer than handing Python's lock to
// another thread and back.
inline constexpr size_t kUnlockBytes = 64 * 1024;
/// How long to wait for another thread's collective before a look at signals.
inline constexpr std::chrono::nanoseconds kLockSlice{100'000'000};

inline DType checked_dtype(int dtype) {
  if (dtype < 0 || dtype > static_cast<int>(DType::kBool))
    misuse("unknown dtype number " + std::to_string(dtype));
  return static_cast<DType>(dtype);
}

inline ReduceOp checked_op(int op, DType dtype) {
  if (op < 0 || op > static_cast<int>(ReduceOp::kProduct))
    misuse("unknown op number " + std::to_string(op));
  if (!is_supported(dtype, static_cast<ReduceOp>(op)))
    misuse("mean needs a floating type");
  return static_cast<ReduceOp>(op);
}

inline void check_root(const HostGroup& group, int root) {
  if (root < 0 || root >= group.world()) {
    misuse("root " + std::to_string(root) + " is not a rank of a group of " +
           std::to_string(group.world()));
  }
}

template <class Body>
using Result = std::invoke_result_t<Body, HostGroup&>;

/// Whether copying it costs less than a collective of its own.
inline bool is_small(size_t bytes) { return bytes <= 64 * 1024; }

/// A HostGroup, and how to build its errors.
class PyHostGroup {
 public:
  PyHostGroup(int fd, int rank, nb::bytes nonce, const std::string& name,
              double timeout_s, double warn_after_s, double spin_us,
              nb::object slow)
      : patience_{timeout_s, warn_after_s} {
    if (nonce.size() != 16) misuse("the nonce must have 16 bytes");
    uint64_t words[2];
    memcpy(words, nonce.c_str(), sizeof(words));
    slow_ = std::move(slow);
    CallHooks hooks(nullptr, slow_, nullptr, true);
    group_ = std::make_shared<HostGroup>(
        fd, rank, words, GroupOptions{name, timeout_s, warn_after_s, spin_us});
  }
  /// The same group, for somebody who waits as `patience` says.
  PyHostGroup(const PyHostGroup& other, Patience patience)
      : group_(other.group_), slow_(other.slow_), patience_(patience) {}

  void join() {
    call(kUnlockBytes, [](HostGroup& group) { group.join(); });
  }

  /// Turns failures of `body` into Python exceptions.
  template <class Body>
  Result<Body> guard(CallHooks& hooks, Body body) {
    try {
      return body(*group_);
    } catch (const Failure& failure) {
      hooks.lock();
      // Whoever waits for this rank in the same call would wait in vain.
      if (failure.reason == Reason::kInterrupted)
        group_->abort(describe_interruption().c_str());
      raise_failure(failure, group_.get());
    }
  }

  /// Runs `body`, which will copy about `bytes`.
  template <class Body>
  Result<Body> call(size_t bytes, Body body) {
    check_not_forked();
    CallHooks hooks(group_.get(), slow_, &patience_, bytes >= kUnlockBytes);
    return guard(hooks, body);
  }

  /// The same for a collective: those of one process take turns. `body` is also
  /// given what is left of `timeout_s`.
  template <class Body>
  auto collective(size_t bytes, double timeout_s, Body body) {
    check_not_forked();
    // Here, where it is at hand: below it would be looked up by thread.
    if (timeout_s < 0) timeout_s = patience_.timeout_s;
    CallHooks hooks(group_.get(), slow_, &patience_, bytes >= kUnlockBytes);
    struct Given {
      Turn& turn;
      ~Given() { turn.give_back(); }
    };
    Turn& turn = group_->turn();
    if (!turn.try_take()) {
      timeout_s = guard(
          hooks, [&](HostGroup&) { return wait_for_turn(hooks, timeout_s); });
    }
    const Given given{turn};
    hooks.defer_handlers();
    return guard(hooks,
                 [&](HostGroup& group) { return body(group, timeout_s); });
  }

  /// Runs `body`, which waits for nobody and begins with check_usable():
  /// Python's lock stays where it is.
  template <class Body>
  void call_without_waiting(Body body) {
    try {
      body(*group_);
    } catch (const Failure& failure) {
      raise_failure(failure, group_.get());
    }
  }

  HostGroup& group() { return *group_; }
  double timeout_s() const { return patience_.timeout_s; }
  const Patience& patience() const { return patience_; }
  /// Before anything else is touched: a forked child maps no region, and a lock
  /// may have been held by a thread that it does not have.
  void check_not_forked() {
    if (group_->is_forked())
      raise_failure({.reason = Reason::kForked}, group_.get());
  }

  void all_reduce(Pointer data, size_t count, int dtype, int op, double weight,
                  double timeout_s) {
    collective(count, timeout_s, [&](HostGroup& group, double left_s) {
      const DType type = checked_dtype(dtype);
      group.all_reduce(as_pointer(data), count, type, checked_op(op, type),
                       weight, left_s);
    });
  }
  /// The same on a numpy array; false: it is not one that can be taken as it
  /// is. `ordinal` is a handle because Python's enumerations are no exact ints,
  /// which nanobind converts through a new object.
  bool all_reduce_array(nb::handle array, nb::handle ordinal, double weight,
                        double timeout_s) {
    const std::optional<ArrayBuffer> buffer = array_buffer(array.ptr());
    const long op = PyLong_AsLong(ordinal.ptr());
    if (op == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
    if (!buffer || !is_supported(buffer->dtype, static_cast<ReduceOp>(op)))
      return false;
    collective(buffer->count, timeout_s, [&](HostGroup& group, double left_s) {
      group.all_reduce(buffer->data, buffer->count, buffer->dtype,
                       static_cast<ReduceOp>(op), weight, left_s);
    });
    return true;
  }
  void reduce(Pointer data, size_t count, int dtype, int op, int root,
              double timeout_s) {
    collective(count, timeout_s, [&](HostGroup& group, double left_s) {
      check_root(group, root);
      const DType type = checked_dtype(dtype);
      group.reduce(as_pointer(data), count, type, checked_op(op, type), root,
                   left_s);
    });
  }
  void reduce_scatter(Pointer in, Pointer out, size_t count, int dtype, int op,
                      double timeout_s) {
    collective(count, timeout_s, [&](HostGroup& group, double left_s) {
      const DType type = checked_dtype(dtype);
      group.reduce_scatter(as_pointer(in), as_pointer(out), count, type,
                           checked_op(op, type), left_s);
    });
  }
  void broadcast(Pointer data, size_t bytes, int root, double timeout_s) {
    collective(bytes, timeout_s, [&](HostGroup& group, double left_s) {
      check_root(group, root);
      group.broadcast(as_pointer(data), bytes, root, left_s);
    });
  }
  /// Many small pieces of memory in one broadcast, large ones where they are.
  void broadcast_all(const std::vector<Pointer>& pieces,
                     const std::vector<size_t>& sizes, int root,
                     double timeout_s) {
    if (pieces.size() != sizes.size())
      misuse("broadcast_all: pieces and sizes must have the same length");
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
        group.broadcast(packed.data(), packed_bytes, root, left_s);
      if (!is_root) copy_small(false);
      for (size_t i = 0; i < pieces.size(); ++i) {
        if (!is_small(sizes[i]))
          group.broadcast(as_pointer(pieces[i]), sizes[i], root, left_s);
      }
    });
  }
  void all_gather(Pointer in, Pointer out, size_t bytes, double timeout_s) {
    collective(bytes, timeout_s, [&](HostGroup& group, double left_s) {
      group.all_gather(as_pointer(in), as_pointer(out), bytes, left_s);
    });
  }
  void gather(Pointer in, Pointer out, size_t bytes, int root,
              double timeout_s) {
    collective(bytes, timeout_s, [&](HostGroup& group, double left_s) {
      check_root(group, root);
      group.gather(as_pointer(in), as_pointer(out), bytes, root, left_s);
    });
  }
  void scatter(Pointer in, Pointer out, size_t bytes, int root,
               double timeout_s) {
    collective(bytes, timeout_s, [&](HostGroup& group, double left_s) {
      check_root(group, root);
      group.scatter(as_pointer(in), as_pointer(out), bytes, root, left_s);
    });
  }
  void all_to_all(Pointer in, const std::vector<uint64_t>& in_bytes,
                  Pointer out, const std::vector<uint64_t>& out_bytes,
                  double timeout_s) {
    collective(kUnlockBytes, timeout_s, [&](HostGroup& group, double left_s) {
      group.all_to_all(as_pointer(in), in_bytes, as_pointer(out), out_bytes,
                       left_s);
    });
  }
  void barrier(double timeout_s) {
    collective(0, timeout_s,
               [&](HostGroup& group, double left_s) { group.barrier(left_s); });
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
  int source_of_waiting(uint64_t tag) {
    return call(0,
                [&](HostGroup& group) { return group.source_of_waiting(tag); });
  }
  int wait_for_source(uint64_t tag, double timeout_s) {
    return call(0, [&](HostGroup& group) {
      return group.wait_for_source(tag, timeout_s);
    });
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
    return collective(kUnlockBytes, timeout_s,
                      [&](HostGroup& group, double left_s) {
                        return group.allocate(bytes, left_s);
                      });
  }
  Pointer pointer(size_t offset, int rank) {
    check_root(*group_, rank);
    return reinterpret_cast<Pointer>(group_->slab(rank) + offset);
  }

 private:
  /// Returns once this thread may make a collective, which it does not do now,
  /// with what is left of `timeout_s`. The call has not begun: it leaves no
  /// trace if it gives up.
  double wait_for_turn(CallHooks& hooks, double timeout_s) {
    Turn& turn = group_->turn();
    if (turn.is_mine()) throw Failure{.reason = Reason::kNested};
    hooks.before_block();
    const int64_t deadline_ns = now_ns() + group_->timeout_ns(timeout_s);
    const int64_t start_ns = now_ns();
    while (true) {
      const int64_t left_ns = std::max<int64_t>(0, deadline_ns - now_ns());
      if (turn.try_take_for(
              std::min(kLockSlice, std::chrono::nanoseconds(left_ns))))
        return static_cast<double>(
                   std::max<int64_t>(0, deadline_ns - now_ns())) *
               1e-9;
      group_->check_usable();
      if (left_ns == 0) {
        throw Failure{
            .reason = Reason::kNoTurn,
            .waited_s = static_cast<double>(now_ns() - start_ns) * 1e-9,
            .thread = turn.holder()};
      }
      if (hooks.interrupted(true)) throw nb::python_error();
    }
  }

  std::shared_ptr<HostGroup> group_;
  nb::object slow_;
  Patience patience_;
};

}  // namespace paceline

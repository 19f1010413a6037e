// The Python class for HostGroup: pointers are integers, failures are
// exceptions.
//
// A call holds Python's lock until it sleeps or has much to copy, because
// releasing the lock and taking it back costs more than a small collective.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bind/call.h"
#include "bind/failures.h"
#include "bind/pointer.h"
#include "collectives/host_group.h"

namespace paceline {

namespace nb = nanobind;

// Copying payloads of at least this size takes longer than passing Python's
// lock to another thread and back.
inline constexpr size_t kUnlockBytes = 64 * 1024;

inline bool is_dtype(int dtype) {
  return dtype >= 0 && dtype <= static_cast<int>(DType::kBool);
}

/// Throws a misuse unless it is a dtype's number.
inline DType checked_dtype(int dtype) {
  if (!is_dtype(dtype)) misuse("unknown dtype number " + std::to_string(dtype));
  return static_cast<DType>(dtype);
}

template <class Body>
using Result = std::invoke_result_t<Body, HostGroup&>;

/// A HostGroup, and the way its errors are reported.
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
  /// The same group, for a user with time-outs of its own.
  PyHostGroup(const PyHostGroup& other, Patience patience)
      : group_(other.group_), slow_(other.slow_), patience_(patience) {}

  void join() {
    call(kUnlockBytes, [](HostGroup& group) { group.session.join(); });
  }

  /// Converts failures of `body` into Python exceptions.
  template <class Body>
  Result<Body> guard(CallHooks& hooks, Body body) {
    try {
      return body(*group_);
    } catch (const Failure& failure) {
      hooks.lock();
      // Otherwise ranks that wait for this one in the same call would wait in
      // vain.
      if (failure.reason == Reason::kInterrupted)
        group_->session.abort(describe_interruption().c_str());
      raise_failure(failure, group_.get());
    }
  }

  /// Runs `body`, which will copy about `bytes`.
  template <class Body>
  Result<Body> call(size_t bytes, Body body) {
    check_not_forked();
    group_->session.note_caller();
    CallHooks hooks(group_.get(), slow_, &patience_, bytes >= kUnlockBytes);
    return guard(hooks, body);
  }

  /// The same for a collective: those of one process take turns. `body` also
  /// gets the rest of `timeout_s`.
  template <class Body>
  auto collective(size_t bytes, double timeout_s, Body body) {
    check_not_forked();
    group_->session.note_caller();
    // Here, because below it would be looked up in thread-local storage.
    if (timeout_s < 0) timeout_s = patience_.timeout_s;
    CallHooks hooks(group_.get(), slow_, &patience_, bytes >= kUnlockBytes);
    struct Given {
      Turn& turn;
      ~Given() { turn.give_back(); }
    };
    Turn& turn = group_->calls.turn();
    if (!turn.try_take()) {
      timeout_s = guard(
          hooks, [&](HostGroup&) { return wait_for_turn(hooks, timeout_s); });
    }
    const Given given{turn};
    hooks.defer_handlers();
    return guard(hooks,
                 [&](HostGroup& group) { return body(group, timeout_s); });
  }

  /// Runs `body`, which waits for no other rank and begins with check_usable().
  /// Does not release Python's lock.
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
  /// Call before any other access: a forked child maps no region, and a thread
  /// that it does not have may have held a lock.
  void check_not_forked() {
    if (group_->session.is_forked())
      raise_failure({.reason = Reason::kForked}, group_.get());
  }

  void all_reduce(Pointer data, size_t count, int dtype, int op, double weight,
                  double timeout_s);
  /// The same for a numpy array; false: the array cannot be used as it is.
  /// `ordinal` is a handle, because Python's enumerations are not exact ints,
  /// and nanobind would convert them through a new object.
  bool all_reduce_array(nb::handle array, nb::handle ordinal, double weight,
                        double timeout_s);
  void reduce(Pointer data, size_t count, int dtype, int op, int root,
              double timeout_s);
  void reduce_scatter(Pointer in, Pointer out, size_t count, int dtype, int op,
                      double timeout_s);
  void broadcast(Pointer data, size_t bytes, int root, double timeout_s);
  /// Broadcasts many ranges of memory: the small ones packed into one
  /// broadcast, the large ones in place.
  void broadcast_all(const std::vector<Pointer>& pieces,
                     const std::vector<size_t>& sizes, int root,
                     double timeout_s);
  /// Copies the ranges of memory that each rank owns to the same ranges of the
  /// other ranks. `counts`: how many of the `pieces` each rank owns, in rank
  /// order.
  void all_gather_pieces(const std::vector<Pointer>& pieces,
                         const std::vector<size_t>& sizes,
                         const std::vector<size_t>& counts, double timeout_s);
  void all_gather(Pointer in, Pointer out, size_t bytes, double timeout_s);
  void gather(Pointer in, Pointer out, size_t bytes, int root,
              double timeout_s);
  void scatter(Pointer in, Pointer out, size_t bytes, int root,
               double timeout_s);
  void all_to_all(Pointer in, const std::vector<uint64_t>& in_bytes,
                  Pointer out, const std::vector<uint64_t>& out_bytes,
                  double timeout_s);
  void barrier(double timeout_s);
  TransferId start_send(Pointer data, size_t bytes, int destination,
                        uint64_t tag);
  TransferId start_receive(Pointer data, size_t bytes, int source,
                           uint64_t tag);
  bool test(TransferId id);
  void wait(TransferId id, double timeout_s);
  int source_of_waiting(uint64_t tag);
  int wait_for_source(uint64_t tag, double timeout_s);
  void send(Pointer data, size_t bytes, int destination, uint64_t tag,
            double timeout_s);
  void recv(Pointer data, size_t bytes, int source, uint64_t tag,
            double timeout_s);
  size_t allocate(size_t bytes, double timeout_s);
  Pointer pointer(size_t offset, int rank);

 private:
  /// Waits until this thread may make a collective, and returns what is left of
  /// `timeout_s`. The collective has not begun yet, so a failure here leaves no
  /// trace.
  double wait_for_turn(CallHooks& hooks, double timeout_s);

  std::shared_ptr<HostGroup> group_;
  nb::object slow_;
  Patience patience_;
};

}  // namespace paceline

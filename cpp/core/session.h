// One rank's side of a group: its mapping of the region, its liveness thread,
// and its end. wait.h has how it waits for other ranks.
//
// A session does not handle the data that ranks exchange, except for messages
// between two ranks: every wait moves those on (message_rings.h).
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/atomics.h"
#include "core/clock.h"
#include "core/failure.h"
#include "core/futex.h"
#include "core/liveness_thread.h"
#include "core/mapping.h"
#include "core/message_rings.h"
#include "core/region.h"
#include "core/region_words.h"
#include "core/wait_hooks.h"

namespace paceline {

/// Python passes its own defaults; these are for tests in C++.
struct GroupOptions {
  std::string name = "world";
  double timeout_s = 300;
  double warn_after_s = 10;
  /// How long to spin before sleeping, in microseconds; negative: 50 if the
  /// host's ranks fit on its cores, else 0.
  double spin_us = -1;
};

class Session {
 public:
  /// Takes place `rank` in the region and reserves this rank's memory. Does not
  /// block: call join() next.
  Session(std::shared_ptr<Region> region, int rank, const uint64_t nonce[2],
          const GroupOptions& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  /// Blocks until every rank has taken its place.
  void join();
  /// Leaves the group in good order. Idempotent; later calls throw
  /// Failure{kClosed}.
  void close();

  int rank() const { return mapping_.rank(); }
  int world() const { return mapping_.world(); }
  const GroupOptions& options() const { return options_; }
  /// Whether every rank of this host can have a core of its own.
  bool has_core_per_rank() const { return has_core_per_rank_; }
  const Mapping& mapping() const { return mapping_; }
  std::byte* slab(int rank) const { return mapping_.slab(rank); }
  const RankLine& line(int rank) const { return mapping_.line(rank); }
  MessageRings& message_rings() { return message_rings_; }

  // --- the state of the group ---
  /// Publishes that this rank raised. The other ranks raise too, and quote the
  /// message.
  void abort(const char* message);
  bool is_closed() const { return closed_; }
  /// Whether this process was forked from the one that joined; it does not map
  /// the region.
  bool is_forked() const { return fork_generation_ != fork_generation(); }
  /// `forwards`: the number of forwards since this rank's last backward.
  void set_activity(const char* text, uint32_t forwards = 0);
  /// Throws unless this process may use the group: not closed, not forked, not
  /// aborted.
  void check_usable() const;
  /// Whether a rank has ended the group: it died, timed out, or raised.
  bool is_over() const {
    // Acquire; pairs with abort_group().
    return mapping_.header().abort.load(std::memory_order_acquire) != 0;
  }
  /// Makes a range of this rank's slab private. Only after the end of the
  /// group, because no array may be placed there again.
  void keep_to_itself(size_t offset, size_t bytes) {
    mapping_.region().keep_to_itself(mapping_.layout().slab_at(rank()) + offset,
                                     bytes);
  }
  void die_for_test() { liveness_->die(); }
  /// Records that this thread makes a call that may wait.
  void note_caller() {
    const uint64_t self = static_cast<uint64_t>(pthread_self());
    uint64_t known = caller_.load(std::memory_order_relaxed);
    if (known == self) return;
    if (known != 0 || !caller_.compare_exchange_strong(
                          known, self, std::memory_order_relaxed))
      has_several_callers_.store(true, std::memory_order_relaxed);
  }

  // --- waiting ---
  /// Defined in wait.h. Blocks until `ready()`. Sleeps on `word`: the rank that
  /// makes ready() true changes the word, then wakes its sleepers if `sleepers`
  /// is not 0. `place`, of wait_place(), shows the other ranks where this one
  /// waits; `is_late(r)`: whether it waits for rank r. Messages between two
  /// ranks move on during the wait.
  template <class Ready, class IsLate>
  void wait_until(uint64_t place, Atomic<uint32_t>& word,
                  Atomic<uint32_t>& sleepers, int64_t timeout_ns, Ready ready,
                  IsLate is_late);
  /// Negative: the time-out of the caller on this thread, or else the group's.
  int64_t timeout_ns(double timeout_s) const {
    return seconds_to_ns(timeout_s < 0 ? patience().timeout_s : timeout_s);
  }

 private:
  Patience patience() const {
    if (current_hooks != nullptr && current_hooks->patience != nullptr)
      return *current_hooks->patience;
    return {options_.timeout_s, options_.warn_after_s};
  }
  void take_place();
  void decide_spinning();
  [[noreturn]] void fail_from_abort(double waited_s) const;
  [[noreturn]] void fail_deadline(Failure so_far);
  /// All ranks for which this rank waits, directly or through others.
  void find_reached(const Failure& so_far, uint64_t (&waiting)[2],
                    uint64_t (&reached)[2]) const;
  /// Whether this rank, which waits at `place` since `start_ns`, and a rank for
  /// which it waits are in different calls and wait for each other, so that
  /// neither can arrive. Also requires that all ranks for which they wait are
  /// in some call, so that the error can say which one is out of step.
  bool is_crossed(uint64_t place, int64_t start_ns,
                  const Failure& so_far) const;
  /// Whether a rank waits for others; false if its wait is over and it is just
  /// returning.
  bool is_waiting(int rank) const;
  /// Clears this rank's wait, unless the group has ended in the meantime.
  void end_waiting();

  const GroupOptions options_;
  const uint32_t fork_generation_;
  const Mapping mapping_;
  MessageRings message_rings_;
  std::unique_ptr<LivenessThread> liveness_;
  int64_t spin_ns_ = 0;
  int yields_ = 0;
  bool has_core_per_rank_ = false;
  /// Spins longer than this with yields.
  static constexpr int64_t kSpinAloneNs = 4000;
  Atomic<bool> closed_{false};
  /// The first thread to make a call, and whether other threads have made
  /// calls.
  Atomic<uint64_t> caller_{0};
  Atomic<bool> has_several_callers_{false};
  Atomic<int> waits_{0};  ///< waits in progress
};

}  // namespace paceline

// One rank's side of a group: its mapping of the region, its liveness thread,
// how it waits for other ranks, and which rank it blames when a wait fails.
//
// A session does not handle the data that ranks exchange, except for messages
// between two ranks: every wait moves those on (transfers.h).
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
#include "core/control.h"
#include "core/failure.h"
#include "core/futex.h"
#include "core/hooks.h"
#include "core/life.h"
#include "core/mapping.h"
#include "core/region.h"
#include "core/transfers.h"

namespace paceline {

struct GroupOptions {
  std::string name = "world";
  double timeout_s = 300;
  double warn_after_s = 10;
  /// How long to spin before sleeping, in microseconds; negative: 50 if the
  /// host's ranks fit on its cores, else 0.
  double spin_us = -1;
};

/// When, counted from the start of a wait, the next warning about late ranks is
/// due: with the default of 10 s after 30 s, after 1, 2 and 5 minutes, and then
/// every 5 minutes.
inline int64_t next_warning_ns(int64_t warn_after_ns, int64_t waited_ns) {
  const int64_t unit_ns = std::max<int64_t>(warn_after_ns, 1'000'000);
  for (const int64_t times : {3, 6, 12}) {
    if (waited_ns < times * unit_ns) return times * unit_ns;
  }
  return (waited_ns / (30 * unit_ns) + 1) * 30 * unit_ns;
}

inline constexpr int64_t kSignalRecheckNs = 500'000'000;
/// A waiting rank checks again every kSignalRecheckNs. If it has not checked
/// for this long, it is stopped, in a wait that may be over.
inline constexpr int64_t kStoppedNs = kSignalRecheckNs + 1'000'000'000;
/// How long two ranks may wait for each other in different calls before they
/// fail. Such a wait cannot end well, unless a signal handler of one of them is
/// about to make the call in which the other one already is.
inline constexpr int64_t kCrossedNs = 1'000'000'000;

/// How long this thread has slept in the waits of all sessions, including what
/// it did between one sleep and the next.
inline thread_local int64_t slept_ns = 0;

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
  Transfers& transfers() { return transfers_; }

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
  /// Blocks until `ready()`. Sleeps on `word`: the rank that makes ready() true
  /// changes the word, then wakes its sleepers if `sleepers` is not 0. `place`,
  /// of wait_place(), shows the other ranks where this one waits; `is_late(r)`:
  /// whether it waits for rank r. Messages between two ranks move on during the
  /// wait.
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
  Transfers transfers_;
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

template <class Ready, class IsLate>
void Session::wait_until(uint64_t place, Atomic<uint32_t>& word,
                         Atomic<uint32_t>& sleepers, int64_t timeout_ns,
                         Ready ready, IsLate is_late) {
  if (ready()) return;
  const int64_t start_ns = now_ns();
  if (spin_ns_ > 0) {
    int64_t spun_ns = 0;
    do {
      for (int i = 0; i < 32; ++i) {
        cpu_relax();
        if (ready()) return;
      }
      // The scheduler may have placed the late rank on this very core.
      if (spun_ns > kSpinAloneNs) sched_yield();
      spun_ns = now_ns() - start_ns;
    } while (spun_ns < spin_ns_);
  }
  for (int i = 0; i < yields_; ++i) {
    sched_yield();
    if (ready()) return;
  }

  const int64_t deadline_ns = start_ns + timeout_ns;
  const int64_t warn_after_ns = seconds_to_ns(patience().warn_after_s);
  int64_t warn_ns = start_ns + warn_after_ns;
  Header& header = mapping_.header();
  RankLine& own = mapping_.own_line();
  Hooks* const hooks = current_hooks;
  if (hooks != nullptr) hooks->before_block();
  // seq_cst: orders this increment before the load of `word`. The waking rank
  // changes the word before it loads `sleepers`.
  struct Announced {
    Atomic<uint32_t>& count;
    explicit Announced(Atomic<uint32_t>& c) : count(c) {
      count.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Announced() { count.fetch_sub(1, std::memory_order_seq_cst); }
  } announced(sleepers), at_bell(own.bell_sleepers);
  struct Slept {
    const int64_t start_ns;
    ~Slept() { slept_ns += now_ns() - start_ns; }
  } const slept{start_ns};
  struct Waiting {
    Session& session;
    explicit Waiting(Session& s) : session(s) { session.waits_.fetch_add(1); }
    ~Waiting() {
      session.end_waiting();
      session.waits_.fetch_sub(1);
    }
  } const waiting{*this};

  while (true) {
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    const uint32_t departures =
        header.departures.load(std::memory_order_seq_cst);
    const uint32_t bell = own.bell.load(std::memory_order_seq_cst);
    transfers_.advance_all();
    if (ready()) return;
    if (closed_) throw Failure{.reason = Reason::kClosed};

    Failure so_far{.reason = Reason::kDeadline};
    so_far.waited_s = static_cast<double>(now_ns() - start_ns) * 1e-9;
    // Acquire: what was complete before the end is seen; pairs with
    // abort_group().
    if (header.abort.load(std::memory_order_acquire) != 0) {
      if (ready()) return;  // what was complete before the end counts
      fail_from_abort(so_far.waited_s);
    }
    for (int r = 0; r < world(); ++r) {
      if (r == rank() || !is_late(r)) continue;
      so_far.late[r / 64] |= uint64_t{1} << (r % 64);
      if (so_far.culprit < 0) so_far.culprit = r;
      // Acquire: its last message is seen; pairs with LivenessThread::let_go().
      if (line(r).life.load(std::memory_order_acquire) == kLifeLeft) {
        transfers_.advance_all();  // its last message may have arrived by now
        if (ready()) return;
        abort_group(header, Reason::kLeft, rank(), r);
        fail_from_abort(so_far.waited_s);
      }
    }
    // Stored in each round: another thread of this rank may have waited, too,
    // and be done. Relaxed: these words are only read for error messages after
    // a deadline.
    const bool is_alone = waits_.load(std::memory_order_relaxed) == 1 &&
                          !has_several_callers_.load(std::memory_order_relaxed);
    own.waits_since_ns.store(start_ns, std::memory_order_relaxed);
    own.waits_alone.store(is_alone ? 1 : 0, std::memory_order_relaxed);
    own.waits_for[0].store(so_far.late[0], std::memory_order_relaxed);
    own.waits_for[1].store(so_far.late[1], std::memory_order_relaxed);
    // Release, here and below; pairs with is_crossed().
    own.waits_at.store(place, std::memory_order_release);
    const int64_t now = now_ns();
    own.looked_ns.store(now, std::memory_order_release);
    if (now >= deadline_ns) {
      // It became ready during the search for the rank to blame.
      if (ready()) return;
      fail_deadline(so_far);
    }
    if (is_alone && now - start_ns > kCrossedNs &&
        is_crossed(place, start_ns, so_far)) {
      if (ready()) return;
      fail_deadline(so_far);
    }
    if (now >= warn_ns) {
      so_far.left_s = static_cast<double>(deadline_ns - now) * 1e-9;
      if (hooks != nullptr) hooks->slow(so_far);
      warn_ns = start_ns + next_warning_ns(warn_after_ns, now_ns() - start_ns);
    }
    const FutexWait waits[] = {{&word, seen},
                               {&header.abort, 0},
                               {&header.departures, departures},
                               {&own.bell, bell}};
    // A signal that arrives before the sleep does not end it: wake up soon and
    // check.
    const int64_t wake_ns =
        std::min({deadline_ns, warn_ns, now + kSignalRecheckNs});
    const FutexResult woken = futex_wait_any(waits, wake_ns);
    if (woken != FutexResult::kWoken && hooks != nullptr &&
        hooks->interrupted(woken == FutexResult::kInterrupted)) {
      throw Failure{.reason = Reason::kInterrupted,
                    .waited_s = so_far.waited_s};
    }
  }
}

}  // namespace paceline

// The one wait of all calls: until the other ranks are ready, until a rank has
// died, raised or left, or until the deadline.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>

#include "core/atomics.h"
#include "core/clock.h"
#include "core/failure.h"
#include "core/futex.h"
#include "core/liveness_thread.h"
#include "core/region_words.h"
#include "core/session.h"
#include "core/wait_hooks.h"

namespace paceline {

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
  WaitHooks* const hooks = current_hooks;
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
    message_rings_.advance_all();
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
        // Its last message may have arrived by now.
        message_rings_.advance_all();
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

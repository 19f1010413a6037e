#include "core/session.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/cgroup.h"
#include "core/shared_text.h"

namespace paceline {
namespace {

// Measured on a 2-core virtual machine: a futex wake-up costs 10 to 60 us
// there, and two ranks that do the same work arrive within less time than that.
// See benchmarks/results/.
constexpr double kDefaultSpinUs = 50;

bool has_rank(const uint64_t (&set)[2], int rank) {
  return (set[rank / 64] >> (rank % 64) & 1) != 0;
}

}  // namespace

Session::Session(std::shared_ptr<Region> region, int rank,
                 const uint64_t nonce[2], const GroupOptions& options)
    : options_(options),
      fork_generation_(fork_generation()),
      mapping_(std::move(region), rank, nonce),
      transfers_(mapping_) {
  take_place();
}

void Session::take_place() {
  RankLine& own = mapping_.own_line();
  if (own.pid.exchange(static_cast<uint32_t>(getpid())) != 0) {
    misuse("another process has taken the place of rank " +
           std::to_string(rank()));
  }
  try {
    mapping_.reserve(0, Layout::buffers_bytes());
  } catch (const Failure& failure) {
    // The other ranks need not wait for this one.
    abort(failure.message.c_str());
    throw;
  }
  cpu_set_t affinity;
  static_assert(sizeof(affinity) == sizeof(own.affinity));
  if (sched_getaffinity(0, sizeof(affinity), &affinity) == 0) {
    memcpy(own.affinity, &affinity, sizeof(affinity));
    // Release: publishes the affinity; pairs with decide_spinning().
    own.affinity_known.store(1, std::memory_order_release);
  }
  liveness_ = std::make_unique<LivenessThread>(
      mapping_.header(), mapping_.lines(), rank(), &mapping_.region());
  mapping_.header().attached.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(mapping_.header().attached, kWakeAll);
}

void Session::join() {
  Atomic<uint32_t> no_sleepers{0};  // an attaching rank always wakes
  // Acquire in ready(): what each rank wrote to its line; pairs with
  // take_place().
  wait_until(
      wait_place(WaitKind::kForming, 0), mapping_.header().attached,
      no_sleepers, timeout_ns(-1),
      [&] {
        return mapping_.header().attached.load(std::memory_order_acquire) ==
               mapping_.header().world;
      },
      [&](int r) {  // pairs with LivenessThread::hold()
        return line(r).life.load(std::memory_order_acquire) == kLifeNotYet;
      });
  decide_spinning();
}

// Spins only if every rank of this host can have a core of its own.
void Session::decide_spinning() {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const RankLine& each : mapping_.lines()) {
    cpu_set_t one;
    // Acquire; pairs with take_place().
    if (each.affinity_known.load(std::memory_order_acquire) == 0) continue;
    memcpy(&one, each.affinity, sizeof(one));
    CPU_OR(&all, &all, &one);
  }
  const double cores =
      std::min<double>(CPU_COUNT(&all), read_cgroup_limits().cores);
  has_core_per_rank_ = cores >= world();
  if (world() == 1) return;
  spin_ns_ =
      static_cast<int64_t>(1000 * (options_.spin_us >= 0 ? options_.spin_us
                                   : has_core_per_rank_  ? kDefaultSpinUs
                                                         : 0));
  // With more ranks than cores, one yield often lets the late rank run: 5 us
  // instead of a 20 us sleep.
  yields_ = has_core_per_rank_ ? 0 : 2;
}

Session::~Session() {
  close();
  // A child forked from the group's process has a liveness thread object, but
  // not its thread.
  if (liveness_ != nullptr) liveness_->abandon();
}

void Session::close() {
  if (liveness_ == nullptr || closed_.exchange(true)) return;
  if (is_forked()) return;
  // Acquire; pairs with abort_group().
  if (mapping_.header().abort.load(std::memory_order_acquire) == 0)
    transfers_.advance_all();
  liveness_.reset();
}

void Session::abort(const char* message) {
  if (closed_ || is_forked()) return;
  // The first reason stays, and its message must not change while a rank reads
  // it. Acquire; pairs with abort_group().
  if (mapping_.header().abort.load(std::memory_order_acquire) != 0) return;
  RankLine& own = mapping_.own_line();
  snprintf(own.message, sizeof(own.message), "%s", message);
  abort_group(mapping_.header(), Reason::kRaised, rank(), rank());
}

void Session::set_activity(const char* text, uint32_t forwards) {
  if (closed_ || is_forked()) return;
  mapping_.own_line().forwards.store(forwards, std::memory_order_relaxed);
  write_text(mapping_.own_line().activity, text);
}

void Session::check_usable() const {
  if (is_forked()) throw Failure{.reason = Reason::kForked};
  if (closed_) throw Failure{.reason = Reason::kClosed};
  // Acquire; pairs with abort_group().
  if (mapping_.header().abort.load(std::memory_order_acquire) != 0)
    fail_from_abort(0);
}

void Session::fail_from_abort(double waited_s) const {
  // Acquire: the message, the late ranks and the waiting time of the reporting
  // rank; pairs with abort_group().
  const uint32_t word = mapping_.header().abort.load(std::memory_order_acquire);
  const auto by = static_cast<int>(word >> 8 & 0xff);
  Failure failure{.reason = static_cast<Reason>(word >> 16),
                  .culprit = culprit_of(word)};
  failure.waited_s = waited_s;
  if (failure.reason == Reason::kDeadline) {
    const RankLine& noticed = line(by);
    failure.late[0] = noticed.late[0];
    failure.late[1] = noticed.late[1];
    failure.waiting[0] = noticed.waiting[0];
    failure.waiting[1] = noticed.waiting[1];
    failure.waited_s = noticed.waited_s;
  } else {
    for (int r = 0; r < world(); ++r) {
      // A rank that died after it had raised for this abort died because of it.
      const bool is_victim =
          has_died(line(r)) &&
          line(r).is_informed.load(std::memory_order_relaxed) == 0;
      if (r == failure.culprit || is_victim)
        failure.late[r / 64] |= uint64_t{1} << (r % 64);
    }
  }
  if (failure.reason == Reason::kRaised) {
    const RankLine& raised = line(failure.culprit);
    failure.message.assign(raised.message,
                           strnlen(raised.message, sizeof(raised.message)));
  }
  mapping_.own_line().is_informed.store(1, std::memory_order_relaxed);
  throw failure;
}

// A late rank may wait itself: for a rank that is late there or, if the ranks
// are in different calls, for this one. Only ranks that do not wait are to
// blame. If all ranks wait, the error says so and shows where.
void Session::fail_deadline(Failure so_far) {
  RankLine& own = mapping_.own_line();
  uint64_t reached[2];
  find_reached(so_far, so_far.waiting, reached);
  const uint64_t absent[2] = {reached[0] & ~so_far.waiting[0],
                              reached[1] & ~so_far.waiting[1]};
  if ((absent[0] | absent[1]) != 0) {
    so_far.late[0] = absent[0];
    so_far.late[1] = absent[1];
    so_far.culprit = 0;
    while (!has_rank(absent, so_far.culprit)) ++so_far.culprit;
  }
  own.waiting[0] = so_far.waiting[0];
  own.waiting[1] = so_far.waiting[1];
  own.late[0] = so_far.late[0];
  own.late[1] = so_far.late[1];
  own.waited_s = so_far.waited_s;
  abort_group(mapping_.header(), Reason::kDeadline, rank(), so_far.culprit);
  fail_from_abort(so_far.waited_s);
}

void Session::find_reached(const Failure& so_far, uint64_t (&waiting)[2],
                           uint64_t (&reached)[2]) const {
  waiting[0] = waiting[1] = 0;
  for (int r = 0; r < world(); ++r) {
    if (is_waiting(r)) waiting[r / 64] |= uint64_t{1} << (r % 64);
  }
  reached[0] = so_far.late[0];
  reached[1] = so_far.late[1];
  for (bool grows = true; grows;) {
    const uint64_t before[2] = {reached[0], reached[1]};
    for (int r = 0; r < world(); ++r) {
      if (!has_rank(reached, r) || !has_rank(waiting, r)) continue;
      reached[0] |= line(r).waits_for[0].load(std::memory_order_relaxed);
      reached[1] |= line(r).waits_for[1].load(std::memory_order_relaxed);
    }
    grows = reached[0] != before[0] || reached[1] != before[1];
  }
}

// A rank whose only thread is in a wait makes no other call before that wait is
// over. So if the other rank has checked, after this one began to wait, and
// still waited for this one, neither can go on. The words that it published may
// belong to an earlier wait only if that wait is not over either, and then this
// rank would not be where it is. Messages between two ranks are left out: every
// wait moves them on.
bool Session::is_crossed(uint64_t place, int64_t start_ns,
                         const Failure& so_far) const {
  const auto is_call = [](uint64_t at) {
    return kind_of(at) == WaitKind::kCall || kind_of(at) == WaitKind::kBackward;
  };
  if (!is_call(place)) return false;
  bool is_found = false;
  for (int r = 0; r < world() && !is_found; ++r) {
    if (!has_rank(so_far.late, r)) continue;
    const RankLine& theirs = line(r);
    // Acquire, both; pairs with the releases in wait_until().
    const int64_t looked_ns = theirs.looked_ns.load(std::memory_order_acquire);
    const uint64_t at = theirs.waits_at.load(std::memory_order_acquire);
    const int64_t since_ns =
        theirs.waits_since_ns.load(std::memory_order_relaxed);
    is_found = is_call(at) && at != place && is_waiting(r) &&
               looked_ns - std::max(start_ns, since_ns) > kCrossedNs &&
               theirs.waits_alone.load(std::memory_order_relaxed) != 0 &&
               (theirs.waits_for[rank() / 64].load(std::memory_order_relaxed) >>
                    (rank() % 64) &
                1) != 0;
  }
  if (!is_found) return false;
  uint64_t waiting[2];
  uint64_t reached[2];
  find_reached(so_far, waiting, reached);
  return ((reached[0] & ~waiting[0]) | (reached[1] & ~waiting[1])) == 0;
}

// All relaxed: these words only serve an error message; no data is read because
// of them.
bool Session::is_waiting(int rank) const {
  const RankLine& theirs = line(rank);
  const uint64_t place = theirs.waits_at.load(std::memory_order_relaxed);
  if (place == 0 ||
      now_ns() - theirs.looked_ns.load(std::memory_order_relaxed) > kStoppedNs)
    return false;
  const uint32_t phase =
      mapping_.header().gate.phase.load(std::memory_order_relaxed);
  return kind_of(place) != WaitKind::kCall ||
         place == wait_place(WaitKind::kCall, phase);
}

void Session::end_waiting() {
  if (!is_over())
    mapping_.own_line().waits_at.store(0, std::memory_order_relaxed);
}

}  // namespace paceline

// Why a wait fails, and which rank its error blames.
#include <string.h>

#include <algorithm>

#include "core/wait.h"

namespace paceline {
namespace {

bool has_rank(const uint64_t (&set)[2], int rank) {
  return (set[rank / 64] >> (rank % 64) & 1) != 0;
}

}  // namespace

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

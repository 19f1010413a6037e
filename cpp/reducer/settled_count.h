// A count in shared memory that ranks wait for, and whose end is the same for
// all: it reaches a number for all ranks, or for none.
//
// A rank that gives up waiting (a rank died, a deadline passed, a signal came)
// tries to set the bit kPoison in the count, by compare-and-swap. If the count
// had reached the number before that, it has reached it for this rank, too, and
// the rank goes on. A count with the bit never changes again: the numbers that
// it had reached stay reached, and the others are never reached, for any rank.
#pragma once

#include <cstdint>

#include "core/atomics.h"
#include "core/failure.h"

namespace paceline {

inline constexpr uint64_t kPoison = uint64_t{1} << 63;

inline bool has_reached(uint64_t count, uint64_t target) {
  return (count & ~kPoison) >= target;
}

/// Adds 1, unless the count is poisoned; returns whether that reached the
/// target.
bool count_up(Atomic<uint64_t>& count, uint64_t target);

/// Poisons the count unless it has reached the target; returns whether it has.
bool settle(Atomic<uint64_t>& count, uint64_t target);

/// Runs `wait`, which returns once the count has reached the target. Rethrows
/// what `wait` throws, and then no rank returns from this wait that has not
/// done so already. Returns normally if `wait` threw only because the group has
/// ended, and the count had reached the target.
template <class Wait>
void wait_settled(Atomic<uint64_t>& count, uint64_t target, Wait wait) {
  try {
    wait();
  } catch (const Failure& failure) {
    // A rank that closes its own group does not poison a count for which others
    // wait.
    if (failure.reason == Reason::kClosed) throw;
    const bool is_reached = settle(count, target);
    // A failure of this rank alone, such as one raised by a signal handler, is
    // always rethrown.
    const bool is_of_group =
        failure.reason == Reason::kDied || failure.reason == Reason::kRaised ||
        failure.reason == Reason::kLeft || failure.reason == Reason::kDeadline;
    if (!is_reached || !is_of_group) throw;
  }
}

}  // namespace paceline

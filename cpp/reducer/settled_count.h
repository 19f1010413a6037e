// A count in shared memory that ranks wait for, and of which all see the same
// end: it reaches a number for everybody, or for nobody.
//
// Whoever gives up waiting (a rank died, a deadline passed, a signal came)
// tries to set the bit kPoison in it, by compare-and-swap. If the number was
// reached before, it is reached for him too, and he goes on. A count with the
// bit stands still: what it had reached stays reached, what it had not it never
// will, for anybody.
#pragma once

#include <cstdint>

#include "core/atomics.h"
#include "core/failure.h"

namespace paceline {

inline constexpr uint64_t kPoison = uint64_t{1} << 63;

inline bool has_reached(uint64_t count, uint64_t target) {
  return (count & ~kPoison) >= target;
}

/// Adds 1, unless the count is poisoned; whether that reached the target.
bool count_up(Atomic<uint64_t>& count, uint64_t target);

/// Poisons the count unless it has reached the target; whether it has.
bool settle(Atomic<uint64_t>& count, uint64_t target);

/// Runs `wait`, which returns once the count has reached the target. Throws
/// what it throws, and then no rank returns from this wait that has not done so
/// already; but not where the end of the group is all that it threw, and the
/// count was there.
template <class Wait>
void wait_settled(Atomic<uint64_t>& count, uint64_t target, Wait wait) {
  try {
    wait();
  } catch (const Failure& failure) {
    // A rank that closes its group gives nothing up that others wait for.
    if (failure.reason == Reason::kClosed) throw;
    const bool is_reached = settle(count, target);
    // What this rank has raised itself, a signal handler say, it must raise.
    const bool is_of_group =
        failure.reason == Reason::kDied || failure.reason == Reason::kRaised ||
        failure.reason == Reason::kLeft || failure.reason == Reason::kDeadline;
    if (!is_reached || !is_of_group) throw;
  }
}

}  // namespace paceline

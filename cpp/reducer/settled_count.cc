#include "reducer/settled_count.h"

namespace paceline {

bool count_up(Atomic<uint64_t>& count, uint64_t target) {
  uint64_t seen = count.load(std::memory_order_relaxed);
  // acq_rel: releases this rank's work; the rank that reaches the target has
  // acquired that of all. Pairs with count_up() of the other ranks, settle(),
  // and the acquires in Reducer::wait_for() and HostSums::wait_published().
  do {
    if ((seen & kPoison) != 0) return false;
  } while (!count.compare_exchange_weak(
      seen, seen + 1, std::memory_order_acq_rel, std::memory_order_relaxed));
  return seen + 1 == target;
}

bool settle(Atomic<uint64_t>& count, uint64_t target) {
  // Acquire at each load; pairs with count_up(). The release half of the
  // exchange has nothing to publish.
  uint64_t seen = count.load(std::memory_order_acquire);
  while (!has_reached(seen, target)) {
    if ((seen & kPoison) != 0) return false;
    if (count.compare_exchange_weak(seen, seen | kPoison,
                                    std::memory_order_acq_rel,
                                    std::memory_order_acquire))
      return false;
  }
  return true;
}

}  // namespace paceline

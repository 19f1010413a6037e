// Sleeps on words of shared memory, and wakes the sleepers.
#pragma once

#include <cstdint>
#include <span>

#include "core/atomics.h"

namespace paceline {

/// A word, and the value with which it is right to sleep.
struct FutexWait {
  const Atomic<uint32_t>* word;
  uint32_t expected;
};

inline constexpr int kMaxFutexWaits = 128;  // FUTEX_WAITV_MAX of Linux

enum class FutexResult { kWoken, kTimedOut, kInterrupted };

/// Sleeps until any of `waits` is woken or already differs, or until
/// `deadline_ns` (monotonic). Where futex_waitv is missing (before Linux 5.16)
/// or forbidden, it sleeps on the first word alone and returns after 20 ms at
/// the latest, so callers must check the other words again: a spurious kWoken
/// is always possible.
FutexResult futex_wait_any(std::span<const FutexWait> waits,
                           int64_t deadline_ns);

/// Wakes up to `count` sleepers of `word`, in any process.
void futex_wake(Atomic<uint32_t>& word, int count);
inline constexpr int kWakeAll = 0x7fffffff;

bool has_futex_waitv();
/// For tests: behave as on a kernel without futex_waitv.
void disable_futex_waitv(bool disabled);

}  // namespace paceline

// Atomics that processes share, and the CPU's hint for spinning.
//
// Words that processes share are Atomic: std::atomic, lock-free and independent
// of the address. The core uses no fences, because ThreadSanitizer does not
// model them: each hand-over between ranks has a release, and an acquire that
// pairs with it.
//
// With PACELINE_SCHEDULER, Atomic is a wrapper through which a test decides, at
// each operation, which rank runs next; see tests/cpp/schedules.
#pragma once

#include <atomic>
#include <cstdint>

#ifdef PACELINE_SCHEDULER
#include "schedules/scheduled_atomic.h"
#endif

namespace paceline {

#ifndef PACELINE_SCHEDULER
template <class T>
using Atomic = std::atomic<T>;
#endif

static_assert(std::atomic<uint32_t>::is_always_lock_free,
              "shared words must be lock-free");
static_assert(std::atomic<uint64_t>::is_always_lock_free,
              "shared words must be lock-free");
static_assert(sizeof(Atomic<uint32_t>) == 4, "a futex word is 4 bytes");

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace paceline

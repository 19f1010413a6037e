// The one file that spells atomics and CPU hints; everything else names what it
// means.
//
// Words that processes share are std::atomic with address-free, lock-free
// operations. No fences are used: ThreadSanitizer does not model them, and each
// hand-over below has a release and an acquire partner.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace paceline {

static_assert(std::atomic<uint32_t>::is_always_lock_free,
              "shared words must be lock-free");
static_assert(std::atomic<uint64_t>::is_always_lock_free,
              "shared words must be lock-free");
static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex word is 4 bytes");

/// Two cache lines: adjacent-line prefetchers pull lines in pairs.
inline constexpr size_t kLineBytes = 128;

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace paceline

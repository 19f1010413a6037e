#include "core/futex.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "core/clock.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449  // the same number on every architecture
#endif

namespace paceline {
namespace {

constexpr int64_t kRecheckNs = 20'000'000;
constexpr uint32_t kFutex2SizeU32 = 0x02;

// The kernel's struct futex_waitv, which headers before 5.16 lack.
struct KernelWait {
  uint64_t value;
  uint64_t address;
  uint32_t flags;
  uint32_t reserved;
};

Atomic<bool> waitv_disabled{false};

bool probe_futex_waitv() {
  // With zero waiters, the call gives EINVAL where it exists, and ENOSYS or a
  // seccomp filter's EPERM where it does not.
  return syscall(SYS_futex_waitv, nullptr, 0, 0, nullptr, 0) == -1 &&
         errno == EINVAL;
}

timespec to_timespec(int64_t ns) {
  return {.tv_sec = static_cast<time_t>(ns / 1'000'000'000),
          .tv_nsec = static_cast<long>(ns % 1'000'000'000)};
}

FutexResult classify(long rc) {
  if (rc >= 0) return FutexResult::kWoken;
  if (errno == ETIMEDOUT) return FutexResult::kTimedOut;
  if (errno == EINTR) return FutexResult::kInterrupted;
  return FutexResult::kWoken;  // EAGAIN: a word already differs
}

FutexResult wait_on_first(const FutexWait& wait, int64_t deadline_ns) {
  const int64_t left = std::max<int64_t>(0, deadline_ns - now_ns());
  const timespec timeout = to_timespec(std::min(left, kRecheckNs));
  const long rc = syscall(SYS_futex, wait.word, FUTEX_WAIT, wait.expected,
                          &timeout, nullptr, 0);
  const FutexResult result = classify(rc);
  // The end of a short slice is not the deadline: the caller checks the other
  // words and comes back.
  if (result == FutexResult::kTimedOut && left > kRecheckNs)
    return FutexResult::kWoken;
  return result;
}

}  // namespace

bool has_futex_waitv() {
  static const bool supported = probe_futex_waitv();
  return supported && !waitv_disabled.load(std::memory_order_relaxed);
}

void disable_futex_waitv(bool disabled) { waitv_disabled.store(disabled); }

FutexResult futex_wait_any(std::span<const FutexWait> waits,
                           int64_t deadline_ns) {
  if (!has_futex_waitv()) return wait_on_first(waits.front(), deadline_ns);
  KernelWait kernel[kMaxFutexWaits];
  const size_t count = std::min<size_t>(waits.size(), kMaxFutexWaits);
  for (size_t i = 0; i < count; ++i) {
    kernel[i] = {waits[i].expected, reinterpret_cast<uint64_t>(waits[i].word),
                 kFutex2SizeU32, 0};
  }
  const timespec deadline = to_timespec(std::max<int64_t>(0, deadline_ns));
  return classify(
      syscall(SYS_futex_waitv, kernel, count, 0, &deadline, CLOCK_MONOTONIC));
}

void futex_wake(Atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE, count, nullptr, nullptr, 0);
}

}  // namespace paceline

#include "core/life.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>

#include "core/clock.h"
#include "core/futex.h"

namespace paceline {
namespace {

// Only a safety net where futex_waitv exists; without it, futex_wait_any
// returns within 20 ms anyway.
constexpr int64_t kRecheckNs = 1'000'000'000;

void block_all_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

bool has_died(const RankLine& line) {
  // Acquire: what the rank had written before it died is seen.
  return (line.life.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
}

void abort_group(Header& header, Reason reason, int by, int culprit) {
  uint32_t none = 0;
  // Release: publishes the message, the late ranks and the waiting time of rank
  // `by`.
  header.abort.compare_exchange_strong(none, pack_abort(reason, by, culprit),
                                       std::memory_order_acq_rel);
  futex_wake(header.abort, kWakeAll);
}

Keeper::Keeper(Header& header, std::span<RankLine> ranks, int rank)
    : header_(header), ranks_(ranks), rank_(rank) {
  thread_ = std::thread([this] { run(); });
  while (state_.load(std::memory_order_acquire) == kStarting) {
    const FutexWait wait[] = {{&state_, kStarting}};
    futex_wait_any(wait, now_ns() + kRecheckNs);
  }
}

Keeper::~Keeper() {
  if (!thread_.joinable()) return;
  state_.store(kLeave, std::memory_order_release);
  futex_wake(state_, kWakeAll);
  thread_.join();
}

void Keeper::abandon() {
  if (thread_.joinable()) thread_.detach();
}

void Keeper::die() {
  state_.store(kDie, std::memory_order_release);
  futex_wake(state_, kWakeAll);
  thread_.join();
}

void Keeper::run() {
  block_all_signals();
  RankLine& line = ranks_[static_cast<size_t>(rank_)];
  // This thread's own robust list replaces glibc's, which it does not use: it
  // locks no robust mutex.
  list_.list.next = reinterpret_cast<robust_list*>(&line.robust_next);
  list_.futex_offset =
      static_cast<long>(reinterpret_cast<std::byte*>(&line.life) -
                        reinterpret_cast<std::byte*>(&line.robust_next));
  line.robust_next = &list_.list;
  syscall(SYS_set_robust_list, &list_, sizeof(list_));
  const auto thread_id = static_cast<uint32_t>(syscall(SYS_gettid));
  // FUTEX_WAITERS from the start: the kernel only wakes somebody at death if it
  // is set.
  line.life.store(thread_id | FUTEX_WAITERS, std::memory_order_release);
  state_.store(kHolding, std::memory_order_release);
  futex_wake(state_, kWakeAll);

  watch();

  if (state_.load(std::memory_order_acquire) == kLeave) {
    list_.list.next = &list_.list;  // nothing is held any more
    line.life.store(kLifeLeft, std::memory_order_release);
    header_.departures.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(header_.departures, kWakeAll);
    futex_wake(line.life, kWakeAll);
  }
}

// Sleeps on the life words of all others and on state_; the array holds 127 + 1
// words, the kernel's limit.
void Keeper::watch() {
  std::array<FutexWait, kMaxFutexWaits> waits;
  while (state_.load(std::memory_order_acquire) == kHolding) {
    size_t count = 0;
    waits[count++] = {&state_, kHolding};
    for (size_t peer = 0; peer < ranks_.size(); ++peer) {
      if (static_cast<int>(peer) == rank_) continue;
      const uint32_t life = ranks_[peer].life.load(std::memory_order_acquire);
      if ((life & FUTEX_OWNER_DIED) != 0) {
        abort_group(header_, Reason::kDied, rank_, static_cast<int>(peer));
      } else if (life != kLifeLeft) {
        waits[count++] = {&ranks_[peer].life, life};
      }
    }
    futex_wait_any({waits.data(), count}, now_ns() + kRecheckNs);
  }
}

}  // namespace paceline

#include "core/liveness_thread.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <string>
#include <system_error>
#include <utility>

#include "core/clock.h"
#include "core/failure.h"
#include "core/futex.h"

namespace paceline {
namespace {

// Only a safety net where futex_waitv exists; without it, futex_wait_any
// returns within 20 ms anyway.
constexpr int64_t kRecheckNs = 1'000'000'000;
// The interval between two checks of the file locks.
constexpr int64_t kLockRecheckNs = 500'000'000;

Atomic<bool> robust_list_disabled{false};

/// Registers a list of one word, which the calling thread holds until it ends.
bool hold_robustly(robust_list_head& head, void*& node,
                   Atomic<uint32_t>& word) {
  head.list.next = reinterpret_cast<robust_list*>(&node);
  head.futex_offset = static_cast<long>(reinterpret_cast<std::byte*>(&word) -
                                        reinterpret_cast<std::byte*>(&node));
  head.list_op_pending = nullptr;
  node = &head.list;
  // This replaces glibc's list of this thread, which locks no robust mutex.
  return syscall(SYS_set_robust_list, &head, sizeof(head)) == 0;
}

/// The value of a word that this thread holds. FUTEX_WAITERS is set from the
/// start: without it the kernel wakes no sleeper at a death.
uint32_t held_by_this_thread() {
  return static_cast<uint32_t>(syscall(SYS_gettid)) | FUTEX_WAITERS;
}

/// Throws Failure if this process cannot have another thread.
template <typename Body>
std::thread start_thread(Body body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    const int number = error.code().value();
    throw Failure{
        .reason = Reason::kNoMemory,
        .message = std::string("starting a thread: ") + strerror(number),
        .error_number = number};
  }
}

/// Lets a thread die while it holds a word: some sandboxes and emulators refuse
/// the call, or accept it and do nothing.
bool try_robust_list() {
  static struct {
    robust_list_head head;
    void* node;
    Atomic<uint32_t> word;
  } trial;
  bool is_taken = false;
  start_thread([&] {
    is_taken = hold_robustly(trial.head, trial.node, trial.word);
    // Release; pairs with the load below. (The join would do, too.)
    trial.word.store(held_by_this_thread(), std::memory_order_release);
  }).join();
  // The kernel marks the word before it reports the thread's end. Acquire;
  // pairs with the store above and with the kernel's mark.
  return is_taken &&
         (trial.word.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
}

void block_all_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

bool has_robust_list() {
  static const bool works = try_robust_list();
  return works && !robust_list_disabled.load(std::memory_order_relaxed);
}

void disable_robust_list(bool disabled) {
  robust_list_disabled.store(disabled, std::memory_order_relaxed);
}

bool has_died(const RankLine& line) {
  // Acquire: what the rank wrote before it died is seen. Pairs with the
  // kernel's mark, or with those who mark in its place: the crash handler and
  // look_at().
  return (line.life.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0 ||
         (line.crash.load(std::memory_order_acquire) & kCrashIsFatal) != 0;
}

LivenessThread::LivenessThread(Header& header, std::span<RankLine> ranks,
                               int rank, const Region* region)
    : header_(header), ranks_(ranks), rank_(rank), region_(region) {
  has_robust_list();  // tested here, not while others wait
  thread_ = start_thread([this] { run(); });
  // Acquire: the thread holds the word; pairs with run().
  while (state_.load(std::memory_order_acquire) == kStarting) {
    const FutexWait wait[] = {{&state_, kStarting}};
    futex_wait_any(wait, now_ns() + kRecheckNs);
  }
  crash_watch_.emplace(header, ranks[static_cast<size_t>(rank)], rank);
}

LivenessThread::~LivenessThread() {
  if (!thread_.joinable()) return;
  crash_watch_.reset();
  // Release; pairs with run() and watch().
  state_.store(kLeave, std::memory_order_release);
  futex_wake(state_, kWakeAll);
  thread_.join();
}

void LivenessThread::abandon() {
  if (thread_.joinable()) thread_.detach();
}

void LivenessThread::die() {
  crash_watch_.reset();
  // Release; pairs with run() and watch().
  state_.store(kDie, std::memory_order_release);
  futex_wake(state_, kWakeAll);
  thread_.join();
}

void LivenessThread::run() {
  block_all_signals();
  hold();
  // Release: the word is held; pairs with the constructor.
  state_.store(kHolding, std::memory_order_release);
  futex_wake(state_, kWakeAll);
  watch();
  // Acquire; pairs with the destructor and die().
  if (state_.load(std::memory_order_acquire) == kLeave) let_go();
  lock_.reset();  // as the kernel does when the process ends
}

void LivenessThread::hold() {
  RankLine& line = ranks_[static_cast<size_t>(rank_)];
  LivenessCheck check = LivenessCheck::kNone;
  if (has_robust_list() &&
      hold_robustly(line.robust_head, line.robust_next, line.life)) {
    check = LivenessCheck::kKernel;
  } else if (region_ != nullptr) {
    lock_ = RegionLock::take(*region_, rank_);
    if (lock_ != nullptr) check = LivenessCheck::kFileLock;
  }
  line.check.store(check, std::memory_order_relaxed);
  // Release: publishes `check`, too; pairs with watch(), look_at() and
  // has_died().
  line.life.store(held_by_this_thread(), std::memory_order_release);
}

void LivenessThread::let_go() {
  RankLine& line = ranks_[static_cast<size_t>(rank_)];
  // First: if the process is killed from here on, this rank has already left.
  // The kernel marks no word that does not hold the id of its thread, although
  // the word is still on the list.
  line.life.store(kLifeLeft, std::memory_order_seq_cst);
  header_.departures.fetch_add(1, std::memory_order_seq_cst);
  // After an atomic that also acquires: the compiler could move this line
  // before a plain store.
  line.robust_head.list.next = &line.robust_head.list;
  futex_wake(header_.departures, kWakeAll);
  futex_wake(line.life, kWakeAll);
}

// Sleeps on the life words of all others and on state_; the array holds 127 + 1
// words, the kernel's limit.
void LivenessThread::watch() {
  std::array<FutexWait, kMaxFutexWaits> waits;
  // Acquire; pairs with the destructor and die().
  while (state_.load(std::memory_order_acquire) == kHolding) {
    size_t count = 0;
    waits[count++] = {&state_, kHolding};
    beat();
    int64_t recheck_ns = kRecheckNs;
    for (size_t peer = 0; peer < ranks_.size(); ++peer) {
      if (static_cast<int>(peer) == rank_) continue;
      look_at(peer);
      const RankLine& line = ranks_[peer];
      // Acquire: the check is there; pairs with hold().
      const uint32_t life = line.life.load(std::memory_order_acquire);
      if (has_died(line)) {
        abort_group(header_, Reason::kDied, rank_, static_cast<int>(peer));
      } else if (life != kLifeLeft) {
        waits[count++] = {&line.life, life};
      }
      if (line.check.load(std::memory_order_relaxed) ==
          LivenessCheck::kFileLock)
        recheck_ns = kLockRecheckNs;
    }
    futex_wait_any({waits.data(), count}, now_ns() + recheck_ns);
  }
}

void LivenessThread::look_at(size_t peer) {
  RankLine& line = ranks_[peer];
  // Acquire: the check is there; pairs with hold().
  uint32_t life = line.life.load(std::memory_order_acquire);
  if (life == kLifeNotYet || life == kLifeLeft || has_died(line)) return;
  if (line.check.load(std::memory_order_relaxed) == LivenessCheck::kFileLock &&
      region_ != nullptr &&
      !RegionLock::is_held(*region_, static_cast<int>(peer))) {
    // Fails if the rank has left in the meantime: it publishes that before it
    // unlocks. acq_rel, in place of the kernel; pairs with has_died().
    line.life.compare_exchange_strong(life, life | FUTEX_OWNER_DIED,
                                      std::memory_order_acq_rel);
  }
  // Acquire; pairs with the crash handler's stores and end_crash().
  uint32_t crash = line.crash.load(std::memory_order_acquire);
  const int64_t now = now_ns();
  if (crash != crashes_[peer].word) crashes_[peer] = {crash, now};
  if (crash != 0 && now - crashes_[peer].since_ns >= kSilenceNs) {
    // Fails if the handler has just returned, or the liveness thread is alive.
    // acq_rel, in place of the handler; pairs with has_died().
    line.crash.compare_exchange_strong(crash, crash | kCrashIsFatal,
                                       std::memory_order_acq_rel);
  }
}

void LivenessThread::beat() {
  // After this long, the handler must have jumped out of the crash.
  constexpr int64_t kLongestNs = 60'000'000'000;
  Atomic<uint32_t>& word = ranks_[static_cast<size_t>(rank_)].crash;
  uint32_t crash = word.load(std::memory_order_relaxed);
  Crash& known = crashes_[static_cast<size_t>(rank_)];
  if (crash == 0 || (crash & kCrashIsFatal) != 0) {
    known.word = 0;
    return;
  }
  const int64_t now = now_ns();
  if (known.word != (crash & ~kCrashBeat)) known = {crash & ~kCrashBeat, now};
  if (now - known.since_ns >= kLongestNs) {
    end_crash(word, crash);
    return;
  }
  // Fails if the handler has just returned, or there is another crash.
  const uint32_t next =
      (crash & ~kCrashBeat) | ((crash + kOneBeat) & kCrashBeat);
  word.compare_exchange_strong(crash, next, std::memory_order_relaxed);
}

}  // namespace paceline

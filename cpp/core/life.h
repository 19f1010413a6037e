// Who is alive: a thread per rank that the kernel speaks for when it dies.
//
// The liveness thread holds this rank's life word the way a thread holds a
// robust mutex. When its process dies, however, the kernel marks the word and
// wakes a sleeper, before it tears the address space down: 0.1 to 0.2 ms,
// whatever the size of the process (pidfd and sockets need hundreds at 4 GiB).
// The liveness threads of the other ranks sleep on all life words, and turn a
// death into the group's abort word. Where the kernel does not do this (some
// sandboxes and emulators) the liveness threads ask every half second whether a
// file lock is still held.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <thread>

#include "core/control.h"
#include "core/crash.h"
#include "core/region.h"

namespace paceline {

class LivenessThread {
 public:
  /// Starts the thread; returns once this rank's life word is held. `region`
  /// must outlive it; without one there are no file locks.
  LivenessThread(Header& header, std::span<RankLine> ranks, int rank,
                 const Region* region = nullptr);
  /// Leaves in good order: the life word says so, and who waits for this rank
  /// is woken.
  ~LivenessThread();
  LivenessThread(const LivenessThread&) = delete;
  LivenessThread& operator=(const LivenessThread&) = delete;

  /// For a forked child, which has no such thread: forgets it.
  void abandon();
  /// For tests with ranks as threads: ends the thread without a goodbye, as a
  /// SIGKILL would.
  void die();

 private:
  enum State : uint32_t { kStarting, kHolding, kLeave, kDie };
  void run();
  void hold();
  void let_go();
  void watch();
  /// Notes in its line that the peer is dead, if it is and the kernel did not.
  void look_at(size_t peer);

  Header& header_;
  std::span<RankLine> ranks_;
  const int rank_;
  Atomic<uint32_t> state_{
      kStarting};  // futex word between this object and its thread
  const Region* const region_;
  std::unique_ptr<RegionLock> lock_;
  /// While a handler has a crash of this very process: says that it is alive.
  void beat();
  /// Since when a crash has been the same.
  struct Crash {
    uint32_t word = 0;
    int64_t since_ns = 0;
  };
  std::array<Crash, kMaxRanks> crashes_{};
  std::optional<CrashWatch> crash_watch_;
  std::thread thread_;
};

bool has_died(const RankLine& line);

/// Whether the kernel marks the words that a dying thread holds; tried out
/// once.
bool has_robust_list();
/// For tests: behave as in a sandbox that forbids it.
void disable_robust_list(bool disabled);

}  // namespace paceline

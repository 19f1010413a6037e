// Detects dead ranks: each rank has a liveness thread whose end the kernel
// reports.
//
// The liveness thread holds this rank's life word as a thread holds a robust
// mutex. When its process dies, in whatever way, the kernel marks the word and
// wakes a sleeper before it tears down the address space: after 0.1 to 0.2 ms,
// whatever the size of the process (pidfd and sockets need hundreds of ms at
// 4 GiB). The liveness threads of the other ranks sleep on all life words, and
// set the group's abort word at a death. Where the kernel does not do this (some
// sandboxes and emulators), the liveness threads check every half second
// whether a file lock is still held.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <thread>

#include "core/crash.h"
#include "core/region.h"
#include "core/region_words.h"

namespace paceline {

class LivenessThread {
 public:
  /// Starts the thread and returns once it holds this rank's life word.
  /// `region` must outlive this object; without a region there are no file
  /// locks.
  LivenessThread(Header& header, std::span<RankLine> ranks, int rank,
                 const Region* region = nullptr);
  /// Leaves in good order: writes that to the life word, and wakes ranks that
  /// wait for this one.
  ~LivenessThread();
  LivenessThread(const LivenessThread&) = delete;
  LivenessThread& operator=(const LivenessThread&) = delete;

  /// For a forked child, which has no such thread: forgets the thread.
  void abandon();
  /// For tests with ranks as threads: ends the thread without leaving, as a
  /// SIGKILL would.
  void die();

 private:
  enum State : uint32_t { kStarting, kHolding, kLeave, kDie };
  void run();
  void hold();
  void let_go();
  void watch();
  /// Marks the peer's line if the peer is dead and the kernel has not marked
  /// it.
  void look_at(size_t peer);

  Header& header_;
  std::span<RankLine> ranks_;
  const int rank_;
  Atomic<uint32_t> state_{
      kStarting};  // futex word between this object and its thread
  const Region* const region_;
  std::unique_ptr<RegionLock> lock_;
  /// Changes the beat while a handler processes a crash of this process, to
  /// show that the process is alive.
  void beat();
  /// The crash word last seen, and since when it has been the same.
  struct Crash {
    uint32_t word = 0;
    int64_t since_ns = 0;
  };
  std::array<Crash, kMaxRanks> crashes_{};
  std::optional<CrashWatch> crash_watch_;
  std::thread thread_;
};

bool has_died(const RankLine& line);

/// Whether the kernel marks the words that a dying thread holds. Tested once.
bool has_robust_list();
/// For tests: behave as in a sandbox that forbids robust lists.
void disable_robust_list(bool disabled);

}  // namespace paceline

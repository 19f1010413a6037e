// Who is alive: a thread per rank that the kernel speaks for when it dies.
//
// The keeper holds this rank's life word the way a thread holds a robust mutex.
// When its process dies, however, the kernel marks the word and wakes a
// sleeper, before it tears the address space down: 0.1 to 0.2 ms, whatever the
// size of the process (pidfd and sockets need hundreds at 4 GiB). The keepers
// of the other ranks sleep on all life words, and turn a death into the group's
// abort word.
#pragma once

#include <linux/futex.h>

#include <span>
#include <thread>

#include "core/control.h"

namespace paceline {

class Keeper {
 public:
  /// Starts the thread; returns once this rank's life word is held.
  Keeper(Header& header, std::span<RankLine> ranks, int rank);
  /// Leaves in good order: the life word says so, and who waits for this rank
  /// is woken.
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  /// For a forked child, which has no such thread: forgets it.
  void abandon();
  /// For tests with ranks as threads: ends the thread without a goodbye, as a
  /// SIGKILL would.
  void die();

 private:
  enum State : uint32_t { kStarting, kHolding, kLeave, kDie };
  void run();
  void watch();

  Header& header_;
  std::span<RankLine> ranks_;
  const int rank_;
  std::atomic<uint32_t> state_{
      kStarting};  // futex word between this object and its thread
  // Not on the thread's stack: the kernel reads it after run() has returned.
  robust_list_head list_{};
  std::thread thread_;
};

bool has_died(const RankLine& line);

/// Ends the group unless it is over already: the first reason stays. Wakes
/// every waiter.
void abort_group(Header& header, Reason reason, int by, int culprit);

}  // namespace paceline

// What a crash of this process tells the other ranks, before the process is
// gone.
//
// The kernel marks the life word of a process that crashes only when its core
// dump is written: 20 s for 2 GiB, minutes where dumps go over the network. So
// SIGSEGV, SIGBUS, SIGILL, SIGFPE and SIGABRT have a handler of ours while the
// process is in a group, or has a model in memory that it shares. It sets the
// abort word of each group, which takes two async-signal-safe steps, and hands
// the signal on to whoever was there before.
//
// A handler that was there before (faulthandler's, torch's, glog's, that of a
// Java or Julia runtime) is asked first, because for some of them the signal is
// no crash at all but a page to be mapped. If it returns and has not restored
// the default, the process lives on. If it ends the process in a way that does
// not come back to us, the liveness thread of this rank no longer runs, while a
// dump is written: the other ranks find RankLine::crash unchanged for
// kSilenceNs and take it for a death.
//
// Whoever takes our place later and restores or calls us (faulthandler) is fine
// as well; the next group to be joined goes on top of it. A signal that is
// ignored stays ignored. A write to a model that is only to be read is no crash
// (see model_memory.h). In a forked child, where the handler is inherited,
// there is no group to end.
#pragma once

#include <cstdint>

#include "core/control.h"
#include "core/signal_safe_list.h"

namespace paceline {

/// How long the liveness thread of a rank may say nothing while a handler of
/// somebody else has its crash, before the other ranks take the process for
/// dead.
inline constexpr int64_t kSilenceNs = 5'000'000'000;

/// Ends the group unless it is over already: the first reason stays. Wakes
/// every waiter. Async-signal-safe.
void abort_group(Header& header, Reason reason, int by, int culprit);

/// While one of them lives, our handlers are in place. The first to be made puts
/// them there, the last to go puts them away again, except where somebody has
/// put another one on top. PACELINE_CRASH_HANDLERS=0: none.
class CrashHandlers {
 public:
  CrashHandlers();
  ~CrashHandlers();
  CrashHandlers(const CrashHandlers&) = delete;
  CrashHandlers& operator=(const CrashHandlers&) = delete;

 private:
  const uint32_t fork_generation_;
};

/// While it lives, a crash of this process ends the group.
class CrashWatch {
 public:
  CrashWatch(Header& header, RankLine& line, int rank);
  ~CrashWatch();
  CrashWatch(const CrashWatch&) = delete;
  CrashWatch& operator=(const CrashWatch&) = delete;

  /// What the handler needs of a group.
  struct Group {
    Header* header;
    RankLine* line;
    int rank;
    int pid;  ///< a child between vfork and exec shares this memory
    uint32_t fork_generation;
  };

 private:
  const uint32_t fork_generation_;
  SignalSafeList<Group>::Entry* const entry_;
  const CrashHandlers handlers_;
};

}  // namespace paceline

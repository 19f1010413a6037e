// Reports a crash of this process to the other ranks before the process is
// gone.
//
// The kernel marks the life word of a crashing process only when its core dump
// is written: after 20 s for 2 GiB, after minutes where dumps go over the
// network. So this file installs a handler for SIGSEGV, SIGBUS, SIGILL, SIGFPE
// and SIGABRT while the process is in a group, or has a model in memory that it
// shares. The handler sets the abort word of each group, which takes two
// async-signal-safe steps, and passes the signal on to the previous handler.
//
// A previous handler (of faulthandler, torch, glog, or a Java or Julia runtime)
// runs first, because for some of them the signal is no crash but a page to be
// mapped. If it returns and has not restored the default action, the process
// lives on. If it ends the process without returning here, the liveness thread
// of this rank stops running while the dump is written: the other ranks see
// that RankLine::crash has not changed for kSilenceNs, and treat the rank as
// dead.
//
// A handler that is installed later and restores or calls ours (faulthandler)
// is fine as well; the next group that this process joins installs ours on top
// of it. A signal that is ignored stays ignored. A write to a read-only model
// is no crash (see model_memory.h). A forked child inherits the handler, but
// has no group to end.
#pragma once

#include <cstdint>

#include "core/region_words.h"
#include "core/signal_safe_list.h"

namespace paceline {

/// How long the liveness thread of a rank may stay silent while a previous
/// handler processes a crash, before the other ranks treat the process as dead.
inline constexpr int64_t kSilenceNs = 5'000'000'000;

/// Ends the group and wakes every waiter. If the group is over already, the
/// first reason stays. Async-signal-safe.
void abort_group(Header& header, Reason reason, int by, int culprit);

/// Keeps our handlers installed while one of these objects lives. The first
/// object installs them. The last one removes them, except where another
/// handler has been installed on top. PACELINE_CRASH_HANDLERS=0 installs none.
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

  /// The parts of a group that the handler uses.
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

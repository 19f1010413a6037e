// Why a call on a group gave up. The binding turns it into an exception of
// errors.py.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace paceline {

enum class Reason : uint32_t {
  kNone = 0,
  kDied = 1,  ///< a process was killed or crashed: its life word says so
  kRaised =
      2,  ///< a rank told the others that it raised; its message says what
  kLeft =
      3,  ///< a rank closed the group, or exited, while others waited for it
  kDeadline = 4,     ///< a rank was later than the time-out
  kMismatch = 5,     ///< ranks made different calls; the group stays usable
  kClosed = 6,       ///< this rank had closed the group
  kForked = 7,       ///< used in a forked child, which does not map the region
  kInterrupted = 8,  ///< a signal handler of this process raised (Ctrl-C)
  kNoMemory = 9,     ///< the region could not be reserved
  kMisuse =
      10,  ///< an argument or an order of calls that this rank alone got wrong
  kInjected = 11,  ///< a fault that a test asked for
  kNested = 12,    ///< this thread was inside a collective: in a signal handler
  kNoTurn = 13,    ///< another thread of this process was in a collective
  kTooMany = 14,   ///< more arrays than a group has blocks for
};

struct Failure {
  Reason reason = Reason::kNone;
  int culprit = -1;       ///< the rank to blame first; -1: none
  uint64_t late[2] = {};  ///< bit r: rank r had not arrived
  double waited_s = 0;    ///< how long this rank had waited
  std::string message =
      {};  ///< of the rank that raised, or of the failed system call
  uint64_t thread = 0;   ///< kNoTurn: of this process, in a collective
  int error_number = 0;  ///< errno of the failed system call
};

[[noreturn]] inline void misuse(std::string message) {
  throw Failure{.reason = Reason::kMisuse, .message = std::move(message)};
}

}  // namespace paceline

// Why a call on a group failed. The binding turns it into an exception of
// errors.py.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace paceline {

enum class Reason : uint32_t {
  kNone = 0,
  /// A process was killed or crashed, according to its life word.
  kDied = 1,
  /// A rank reported that it raised; its message says why.
  kRaised = 2,
  /// A rank closed the group or exited while others waited for it.
  kLeft = 3,
  /// A rank did not arrive within the time-out.
  kDeadline = 4,
  /// Ranks made different calls; the group stays usable.
  kMismatch = 5,
  /// This rank had already closed the group.
  kClosed = 6,
  /// The group was used in a forked child, which does not map the region.
  kForked = 7,
  /// A signal handler of this process raised (Ctrl-C).
  kInterrupted = 8,
  /// Memory of the region could not be reserved.
  kNoMemory = 9,
  /// This rank alone passed a wrong argument or made calls in a wrong order.
  kMisuse = 10,
  /// An injected fault of a test.
  kInjected = 11,
  /// This thread was already inside a collective: the call came from a signal
  /// handler.
  kNested = 12,
  /// Another thread of this process was in a collective.
  kNoTurn = 13,
  /// A group has no entry left for another array.
  kTooMany = 14,
};

/// The name that Python sees; null: no such reason.
constexpr const char* name_of(Reason reason) {
  switch (reason) {
    case Reason::kNone:
      return "none";
    case Reason::kDied:
      return "died";
    case Reason::kRaised:
      return "raised";
    case Reason::kLeft:
      return "left";
    case Reason::kDeadline:
      return "deadline";
    case Reason::kMismatch:
      return "mismatch";
    case Reason::kClosed:
      return "closed";
    case Reason::kForked:
      return "forked";
    case Reason::kInterrupted:
      return "interrupted";
    case Reason::kNoMemory:
      return "no_memory";
    case Reason::kMisuse:
      return "misuse";
    case Reason::kInjected:
      return "injected";
    case Reason::kNested:
      return "nested";
    case Reason::kNoTurn:
      return "no_turn";
    case Reason::kTooMany:
      return "too_many";
  }
  return nullptr;
}

struct Failure {
  Reason reason = Reason::kNone;
  /// The rank to blame first; -1: none.
  int culprit = -1;
  /// Bit r: rank r had not arrived.
  uint64_t late[2] = {};
  /// kDeadline, bit r: rank r was waiting itself, in this call or another one.
  uint64_t waiting[2] = {};
  /// How long this rank had waited.
  double waited_s = 0;
  /// Of a warning: seconds until the wait ends with an error.
  double left_s = 0;
  /// What the rank that raised reported, or which system call failed and how.
  std::string message = {};
  /// kNoTurn: the thread of this process that is in a collective.
  uint64_t thread = 0;
  /// errno of the failed system call.
  int error_number = 0;
};

[[noreturn]] inline void misuse(std::string message) {
  throw Failure{.reason = Reason::kMisuse, .message = std::move(message)};
}

}  // namespace paceline

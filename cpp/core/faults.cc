#include "core/faults.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>

#include "core/failure.h"

namespace paceline {

std::atomic<bool> any_fault_armed{false};

namespace {

struct Armed {
  Point point = Point::kNumPoints;
  FaultAction action = FaultAction::kKill;
  uint32_t passages_left = 0;
};
thread_local Armed armed;

}  // namespace

const char* point_name(Point point) {
  static constexpr const char* kNames[] = {
      "call_begin",   "before_arrive", "after_arrive",  "before_reduce",
      "after_reduce", "copy_out",      "mark_ready",    "before_post",
      "after_post",   "chunk_claimed", "chunk_reduced", "before_end",
      "after_end",    "send",          "receive",       "allocate"};
  static_assert(sizeof(kNames) / sizeof(kNames[0]) ==
                static_cast<size_t>(Point::kNumPoints));
  return kNames[static_cast<uint32_t>(point)];
}

void arm_fault(Point point, FaultAction action, uint32_t nth) {
  armed = {point, action, nth};
  any_fault_armed.store(true, std::memory_order_relaxed);
}

void disarm_fault() { armed = {}; }

void strike_if_armed(Point point) {
  if (armed.point != point || armed.passages_left == 0 ||
      --armed.passages_left > 0)
    return;
  switch (armed.action) {
    case FaultAction::kKill:
      kill(getpid(), SIGKILL);
      break;
    case FaultAction::kStop:
      kill(getpid(), SIGSTOP);
      break;
    case FaultAction::kSegfault:
      raise(SIGSEGV);
      break;
    case FaultAction::kRaise:
      throw Failure{
          .reason = Reason::kInjected,
          .message = std::string("injected fault at ") + point_name(point)};
  }
}

}  // namespace paceline

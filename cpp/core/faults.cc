#include "core/faults.h"

#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <string>

#include "core/clock.h"
#include "core/failure.h"

namespace paceline {

Atomic<bool> any_fault_armed{false};

namespace {

struct Armed {
  Point point = Point::kNumPoints;
  FaultAction action = FaultAction::kKill;
  uint32_t passages_left = 0;
  FaultPeer peer;
  uint32_t peer_passages = 0;  ///< of the peer, when the fault was armed
};
thread_local Armed armed;

constexpr auto kPoints = static_cast<size_t>(Point::kNumPoints);
struct PassageTable {
  Atomic<uint32_t>* words = nullptr;
  int world = 0;
  int rank = 0;

  Atomic<uint32_t>& passages(int of, Point point) const {
    return words[static_cast<size_t>(of) * kPoints +
                 static_cast<size_t>(point)];
  }
  /// The number of points that all other ranks have passed.
  uint64_t passages_of_others() const {
    uint64_t sum = 0;
    for (size_t i = 0; i < static_cast<size_t>(world) * kPoints; ++i) {
      if (i / kPoints != static_cast<size_t>(rank))
        sum += words[i].load(std::memory_order_relaxed);
    }
    return sum;
  }
};
PassageTable table;

/// If no other rank passes a point for this long, all of them wait for this
/// rank, and the peer cannot pass its point before this rank goes on.
constexpr int64_t kStandstillNs = 30'000'000;

void wait_for_peer() {
  if (armed.peer.rank < 0 || table.words == nullptr) return;
  const Atomic<uint32_t>& passages =
      table.passages(armed.peer.rank, armed.peer.point);
  uint64_t seen = table.passages_of_others();
  int64_t since_ns = now_ns();
  // Acquire: what the other rank did before it passed; pairs with
  // strike_if_armed().
  while (passages.load(std::memory_order_acquire) == armed.peer_passages) {
    const timespec nap{0, 100'000};
    nanosleep(&nap, nullptr);
    const uint64_t now_seen = table.passages_of_others();
    if (now_seen != seen) since_ns = now_ns();
    if (now_ns() - since_ns > kStandstillNs) return;
    seen = now_seen;
  }
}

}  // namespace

const char* point_name(Point point) {
  static constexpr const char* kNames[] = {
      "call_begin",    "before_arrive", "after_arrive",  "before_reduce",
      "after_reduce",  "copy_out",      "mark_ready",    "before_post",
      "after_post",    "chunk_claimed", "chunk_reduced", "before_end",
      "after_end",     "send",          "receive",       "allocate",
      "step_met",      "step_begun",    "block_copied",  "block_opened",
      "block_written", "block_closed",  "step_written",  "step_done"};
  static_assert(sizeof(kNames) / sizeof(kNames[0]) ==
                static_cast<size_t>(Point::kNumPoints));
  return kNames[static_cast<uint32_t>(point)];
}

void arm_fault(Point point, FaultAction action, uint32_t nth, FaultPeer peer) {
  armed = {point, action, nth, peer};
  if (peer.rank >= 0 && table.words != nullptr) {
    // Acquire; pairs with strike_if_armed().
    armed.peer_passages =
        table.passages(peer.rank, peer.point).load(std::memory_order_acquire);
  }
  any_fault_armed.store(true, std::memory_order_relaxed);
}

void count_passages(Atomic<uint32_t>* words, int world, int rank) {
  table = {words, world, rank};
  any_fault_armed.store(true, std::memory_order_relaxed);
}

void disarm_fault() { armed = {}; }

void strike_if_armed(Point point) {
  // acq_rel: a rank that waits for this passage sees what came before it; pairs
  // with the acquires in wait_for_peer() and arm_fault().
  if (table.words != nullptr)
    table.passages(table.rank, point).fetch_add(1, std::memory_order_acq_rel);
  if (armed.point != point || armed.passages_left == 0 ||
      --armed.passages_left > 0)
    return;
  wait_for_peer();
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
    case FaultAction::kHold:
      break;
  }
}

}  // namespace paceline

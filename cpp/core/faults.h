// Labelled steps of the protocol at which a test can kill, stop or fail this
// rank.
//
// Always compiled in, because the binary that is tested must be the one that is
// shipped: an unarmed point costs one relaxed load of a word that never
// changes.
#pragma once

#include <cstdint>

#include "core/atomics.h"

namespace paceline {

enum class Point : uint32_t {
  kCallBegin = 0,      ///< a collective was called, nothing is shared yet
  kBeforeArrive = 1,   ///< own data is in place, the others do not know yet
  kAfterArrive = 2,    ///< arrived, not yet waiting
  kBeforeReduce = 3,   ///< everybody arrived, about to reduce a chunk
  kAfterReduce = 4,    ///< own chunk is written, the others do not know yet
  kCopyOut = 5,        ///< the result is in the region, about to be copied out
  kMarkReady = 6,      ///< reducer: a gradient is final
  kBeforePost = 7,     ///< reducer: a bucket is full
  kAfterPost = 8,      ///< reducer: a bucket was posted
  kChunkClaimed = 9,   ///< reducer: owns a chunk that nobody else will reduce
  kChunkReduced = 10,  ///< reducer: the chunk is written, not yet counted
  kBeforeEnd = 11,     ///< reducer: the backward pass is over on this rank
  kAfterEnd = 12,      ///< reducer: everybody's is over
  kSend = 13,          ///< point to point: about to write a piece
  kReceive = 14,       ///< point to point: about to read a piece
  kAllocate = 15,      ///< about to reserve memory
  kStepMet = 16,       ///< optimizer: has met all ranks, and decides to step
  kStepBegun = 17,     ///< optimizer: the step is decided, nothing is written
  kBlockCopied = 18,   ///< optimizer: a block's old values are copied
  kBlockOpened = 19,   ///< optimizer: the same, and told; about to write it
  kBlockWritten = 20,  ///< optimizer: the block is written, not yet told
  kBlockClosed = 21,   ///< optimizer: the block is written, and told
  kStepWritten = 22,   ///< optimizer: own part is written, not yet told
  kStepDone = 23,      ///< optimizer: own part is written, and told
  kNumPoints = 24,
};

enum class FaultAction : uint32_t {
  kKill,
  kStop,
  kSegfault,
  kRaise,
  kHold,  ///< goes on: for faults that strike when another rank has passed
};

/// Null beyond the last.
constexpr const char* name_of(FaultAction action) {
  switch (action) {
    case FaultAction::kKill:
      return "kill";
    case FaultAction::kStop:
      return "stop";
    case FaultAction::kSegfault:
      return "segfault";
    case FaultAction::kRaise:
      return "raise";
    case FaultAction::kHold:
      return "hold";
  }
  return nullptr;
}

const char* point_name(Point point);

/// Another rank that a fault waits for: it strikes only when `rank` has passed
/// `point` once more since the fault was armed.
struct FaultPeer {
  int rank = -1;  ///< -1: waits for nobody
  Point point = Point::kNumPoints;
};

/// Arms this thread (a rank is a thread in the C++ tests): at the `nth` (from
/// 1) passage of `point`, do it.
void arm_fault(Point point, FaultAction action, uint32_t nth,
               FaultPeer peer = {});
void disarm_fault();

/// Lets the ranks see which points each of them has passed, which faults with a
/// peer need. `table` is zeroed memory that they share: `world` times
/// kNumPoints words. This process counts its passages as `rank`; null: no more.
void count_passages(Atomic<uint32_t>* table, int world, int rank);

extern Atomic<bool> any_fault_armed;
void strike_if_armed(Point point);

inline void fault_point(Point point) {
  if (any_fault_armed.load(std::memory_order_relaxed)) [[unlikely]]
    strike_if_armed(point);
}

}  // namespace paceline

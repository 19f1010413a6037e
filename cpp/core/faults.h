// Named steps of the protocol at which a test can kill, stop or fail this rank.
//
// They are always compiled in, because tests must run the binary that is
// shipped: a point that is not armed costs one relaxed load of a word that
// never changes.
#pragma once

#include <cstdint>

#include "core/atomics.h"

namespace paceline {

enum class Point : uint32_t {
  kCallBegin = 0,      ///< a collective was called, nothing is shared yet
  kBeforeArrive = 1,   ///< own data is in place, the others do not know yet
  kAfterArrive = 2,    ///< arrived, not yet waiting
  kBeforeReduce = 3,   ///< all ranks have arrived, about to reduce a chunk
  kAfterReduce = 4,    ///< own chunk is written, the others do not know yet
  kCopyOut = 5,        ///< the result is in the region, about to be copied out
  kMarkReady = 6,      ///< reducer: a gradient is final
  kBeforePost = 7,     ///< reducer: a bucket is full
  kAfterPost = 8,      ///< reducer: a bucket was posted
  kChunkClaimed = 9,   ///< reducer: owns a chunk that no other rank reduces
  kChunkReduced = 10,  ///< reducer: the chunk is written, not yet counted
  kBeforeEnd = 11,     ///< reducer: backward is over on this rank
  kAfterEnd = 12,      ///< reducer: backward is over on all ranks
  kSend = 13,          ///< point to point: about to write bytes to the ring
  kReceive = 14,       ///< point to point: about to read bytes from the ring
  kAllocate = 15,      ///< about to reserve memory
  kStepMet = 16,       ///< optimizer: past the barrier, about to decide
  kStepBegun = 17,     ///< optimizer: the step is decided, nothing is written
  kBlockCopied = 18,   ///< optimizer: a block's old values are copied
  kBlockOpened = 19,   ///< optimizer: the block is published as open
  kBlockWritten = 20,  ///< optimizer: the block is written, not published
  kBlockClosed = 21,   ///< optimizer: the block is published as written
  kStepWritten = 22,   ///< optimizer: own shard is written, not published
  kStepDone = 23,      ///< optimizer: own shard is published as written
  kNumPoints = 24,
};

enum class FaultAction : uint32_t {
  kKill,
  kStop,
  kSegfault,
  kRaise,
  kHold,  ///< only delays: for faults that wait for another rank
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

/// Another rank that a fault waits for: the fault strikes only once `rank` has
/// passed `point` again since the fault was armed.
struct FaultPeer {
  int rank = -1;  ///< -1: waits for no rank
  Point point = Point::kNumPoints;
};

/// Arms a fault of this thread (in the C++ tests, a rank is a thread): `action`
/// happens at the `nth` passage of `point`, counted from 1.
void arm_fault(Point point, FaultAction action, uint32_t nth,
               FaultPeer peer = {});
void disarm_fault();

/// Counts which points each rank has passed, which faults with a peer need.
/// `table` is zeroed shared memory of `world` times kNumPoints words. This
/// process counts its passages as those of `rank`; null: it stops counting.
void count_passages(Atomic<uint32_t>* table, int world, int rank);

extern Atomic<bool> any_fault_armed;
void strike_if_armed(Point point);

inline void fault_point(Point point) {
  if (any_fault_armed.load(std::memory_order_relaxed)) [[unlikely]]
    strike_if_armed(point);
}

}  // namespace paceline

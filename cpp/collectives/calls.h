// What every collective consists of: a description of the call, barriers, and
// buffers that the other ranks can read.
//
// A collective puts data where the other ranks can read it (its small buffers,
// its staging buffers, or an array in the region), and calls barrier(), which
// returns once every rank has reached it. Ranks must make the same collective
// calls in the same order; barrier() compares their calls and makes all of them
// fail together if they differ.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/turn.h"
#include "core/region_layout.h"
#include "core/region_words.h"
#include "core/session.h"
#include "core/sizes.h"
#include "kernels/kernels.h"

namespace paceline {

/// Where the ranks' arrays of one call are.
enum class Places {
  kDifferent,  ///< at different offsets, or not all in the region
  kOutside,    ///< all outside the region
  kInRegion,   ///< all in the region, at the same offset
};

class Calls {
 public:
  explicit Calls(Session& session)
      : session_(session),
        mapping_(session.mapping()),
        gate_(mapping_.header().gate),
        own_(mapping_.own_line()) {}
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  Session& session() const { return session_; }
  int rank() const { return mapping_.rank(); }
  int world() const { return mapping_.world(); }
  std::byte* slab(int rank) const { return mapping_.slab(rank); }
  /// Held while a collective runs. Messages and the reducer do not take it:
  /// they must not depend on a collective that waits for them.
  Turn& turn() { return turn_; }

  void begin(CallKind kind, size_t count, DType dtype, ReduceOp op, int root,
             double weight, double timeout_s);
  /// Arrives at the gate and waits for all ranks. Throws kMismatch on every
  /// rank if calls differ. Returns how the `place`s of all ranks compare.
  Places barrier(uint64_t place = 0);
  /// 0 if the pointer is not in this rank's heap; else a number that is equal
  /// at equal offsets.
  uint64_t place_of(const void* data, size_t bytes) const;
  /// The last call of this rank.
  const CallRecord& current() const { return call_; }
  /// The weights that the ranks passed to begin(), by rank. Null: all are 1, or
  /// the call computes no mean.
  const double* weights(double (&storage)[kMaxRanks]) const;

  /// A rank's small buffer of this call.
  std::byte* small(int rank) const {
    return slab(rank) + Layout::small_at(call_.number & 1);
  }
  /// A rank's staging buffer for the piece with this number. Pieces are counted
  /// over all calls, so that the two buffers alternate across calls, too: the
  /// last piece of one call may still be read while the first one of the next
  /// is written.
  std::byte* piece(int rank, uint64_t number) const {
    return slab(rank) + Layout::piece_at(number & 1);
  }
  std::byte* piece(int rank) const { return piece(rank, piece_number_); }
  uint64_t piece_number() const { return piece_number_; }
  void next_piece() { ++piece_number_; }

 private:
  Session& session_;
  const Mapping& mapping_;
  Gate& gate_;
  RankLine& own_;
  Turn turn_;
  CallRecord call_;
  int64_t call_timeout_ns_ = 0;
  uint64_t piece_number_ = 0;
};

}  // namespace paceline

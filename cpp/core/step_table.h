// How far each rank of a host is with an optimizer step on shared memory. When
// a rank is lost, this table shows whether the step is complete.
//
// It lies beside the values that the step writes, so it outlives the group and
// its ranks. It starts as zeros. Each rank writes one shard of the values.
//
//   decision   whether the ranks make step n. A rank that has passed the barrier
//              with all others decides yes before it writes; a rank for which the
//              barrier failed decides no. The first decision holds for all ranks,
//              so no rank writes after another has reported that nothing was
//              written.
//   done       of each rank, the last step of which its shard is written
//   progress   of each rank, how far it is within its shard, in blocks: a block
//              is open when its old values are copied and it may be half written,
//              and closed when it is written
//   gave up    of each rank, the last step in which it raised before its shard
//              was written: the others need not wait for it
//   claim      of each rank, which rank writes the rest of its shard if it is
//              lost
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/atomics.h"
#include "core/sizes.h"

namespace paceline {

class StepTable {
 public:
  /// Memory to copy before a block is written.
  struct Copy {
    const void* from;
    void* to;
    size_t bytes;
  };
  struct Progress {
    uint32_t block;  ///< blocks before this one are written
    bool is_open;    ///< this one may be half written
  };

  /// The bytes that the table of `world` ranks takes.
  static constexpr size_t bytes(int world) {
    return (static_cast<size_t>(world) + 1) * kLinePairBytes;
  }

  /// The table at `at`, which outlives this object, as seen by rank `rank`.
  StepTable(void* at, int world, int rank);

  /// The step that the ranks make now, or made last.
  uint64_t step() const;
  /// Whether every rank's shard is written for the last step that was decided
  /// on.
  bool is_whole() const;
  /// Proposes whether to make the next step; returns what was decided.
  bool decide(bool wants);
  // The functions below refer to the step that this rank last decided on, or,
  // if it has decided on none, to step(): another rank may have gone on to the
  // next step.

  /// Publishes that the shard of rank `of` is written.
  void finish(int of);
  bool is_finished(int of) const;

  /// Copies the values that block `block` of the shard of `of` will replace,
  /// then publishes the block as open.
  void open_block(int of, uint32_t block, const std::vector<Copy>& copies);
  void close_block(int of, uint32_t block);
  Progress progress(int of) const;

  /// Publishes that this rank has raised and will not write its shard.
  void give_up();
  bool has_given_up(int of) const;
  /// Claims the rest of the shard of `of`. Returns the rank that writes it:
  /// this one, unless another has claimed it first. `instead_of`: a rank that
  /// had claimed it and is lost.
  int claim(int of, std::optional<int> instead_of);

 private:
  struct alignas(kLinePairBytes) Head {
    Atomic<uint64_t> decision;  ///< twice the step, plus 1 if it is made
  };
  struct alignas(kLinePairBytes) Line {
    Atomic<uint64_t> done;
    Atomic<uint64_t> progress;  ///< step << 32 | block << 1 | is open
    Atomic<uint64_t> gave_up;   ///< the step
    Atomic<uint64_t> claim;     ///< step << 16 | rank + 1
  };
  static_assert(sizeof(Head) == kLinePairBytes);
  static_assert(sizeof(Line) == kLinePairBytes);

  Line& line(int of) const { return lines_[of]; }
  uint64_t own_step() const { return own_step_ ? own_step_ : step(); }

  Head* const head_;
  Line* const lines_;
  const int world_;
  const int rank_;
  uint64_t own_step_ = 0;  ///< 0: this rank has decided on none
};

}  // namespace paceline

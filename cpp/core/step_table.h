// How far each rank of a host is with a step on memory that they share: what
// tells a whole step from half of one when a rank is lost.
//
// Lies beside the values that the step writes, so it outlives the group and its
// ranks. It begins as zeros.
//
//   decision   whether the ranks make step n. A rank that has met all others
//              says yes before it writes; one that could not meet them says no.
//              Whoever speaks first has decided for all, so nobody writes after
//              another rank has told that nothing was written.
//   done       of each rank, the last step of which its part is written
//   progress   of each rank, how far it is within its part, in blocks: a block
//              is open when a copy of its old values is made and it may be half
//              written, and closed when it is written
//   gave up    of each rank, the last step in which it has raised before its
//              part was written: the others need not wait for it
//   claim      of each rank, who does the rest of its part if it is lost
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
  /// Memory to be copied before a block is written.
  struct Copy {
    const void* from;
    void* to;
    size_t bytes;
  };
  struct Progress {
    uint32_t block;  ///< blocks before this one are written
    bool is_open;    ///< this one may be half written
  };

  /// What `world` ranks need.
  static constexpr size_t bytes(int world) {
    return (static_cast<size_t>(world) + 1) * kLinePairBytes;
  }

  /// The step table at `at`, which outlives this object, for the rank `rank`.
  StepTable(void* at, int world, int rank);

  /// The step that is made, or that was made last.
  uint64_t step() const;
  /// Whether every rank's part of every step that was decided on is written.
  bool is_whole() const;
  /// Says whether this rank wants the next step; returns what was decided.
  bool decide(bool wants);
  // What follows is of the step that this rank decided on last, and without
  // one, of the step that is made: another rank may have gone on to the next.

  /// The part of `of` is written.
  void finish(int of);
  bool is_finished(int of) const;

  /// The values that block `block` of `of` will replace are copied first.
  void open_block(int of, uint32_t block, const std::vector<Copy>& copies);
  void close_block(int of, uint32_t block);
  Progress progress(int of) const;

  /// This rank's part is not to be awaited: it has raised.
  void give_up();
  bool has_given_up(int of) const;
  /// The rank that does the rest of the part of `of`: this one, unless another
  /// has come first. `instead_of`: a rank that had come first, and is lost.
  int claim(int of, std::optional<int> instead_of);

 private:
  struct alignas(kLinePairBytes) Head {
    Atomic<uint64_t> decision;  ///< twice the step, and 1 if it is made
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

// The result of a finished backward: the same on all ranks, except for the
// members that concern this rank alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "reducer/backward_status.h"

namespace paceline {

struct BackwardResult {
  /// The parameters, out of `parameters`, that no rank with data has marked,
  /// according to `unused`.
  std::vector<size_t> unused_by_all(size_t parameters) const {
    size_t with_data = 0;
    std::vector<size_t> times_unused(parameters);
    for (size_t r = 0; r < unused.size(); ++r) {
      if (ranks[r].status().finished) continue;
      ++with_data;
      for (const size_t index : unused[r]) ++times_unused.at(index);
    }
    std::vector<size_t> found;
    for (size_t p = 0; p < parameters; ++p)
      if (times_unused[p] == with_data) found.push_back(p);
    return found;
  }

  /// Whether all ranks with data have left the same parameters unused.
  bool is_unused_alike() const {
    const std::vector<size_t>* first = nullptr;
    for (size_t r = 0; r < unused.size(); ++r) {
      if (ranks[r].status().finished) continue;
      if (first == nullptr) first = &unused[r];
      if (unused[r] != *first) return false;
    }
    return true;
  }

  uint32_t outcome = 0;  ///< kBackward...
  /// Whether the gradients are not means, on any rank.
  bool is_void = false;
  /// What each rank reported of the backward.
  struct Rank {
    BackwardStatus status() const { return BackwardStatus::unpack(word); }
    uint64_t word;
    uint32_t note;
  };
  std::vector<Rank> ranks;
  /// The parameters that each rank did not mark; empty: all ranks have marked
  /// all.
  std::vector<std::vector<size_t>> unused;
  /// Those that no rank with data has marked.
  std::vector<size_t> globally_unused;
  /// (rank, parameter) of each gradient that was not finite.
  std::vector<std::pair<int, size_t>> nonfinite;
  /// Parameters whose mean is not finite although every rank's gradient is:
  /// their sum overflowed.
  std::vector<size_t> overflowed;
  /// Parameters whose gradients shared memory with others on this rank: their
  /// means are in the gradient buffer only. In no particular order.
  std::vector<size_t> overlapping;
  /// When this rank's first bucket was complete, by now_ns(); 0: none was.
  int64_t first_bucket_ns = 0;
};

}  // namespace paceline

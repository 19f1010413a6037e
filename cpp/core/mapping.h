// The region as one rank maps it, with pointers to its parts. See region_layout.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/region.h"
#include "core/region_layout.h"
#include "core/region_words.h"

namespace paceline {

class Mapping {
 public:
  /// Checks that this version made the region, that it belongs to this job, and
  /// that it has a place for `rank`.
  Mapping(std::shared_ptr<Region> region, int rank, const uint64_t nonce[2]);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  int rank() const { return rank_; }
  int world() const { return layout_.world; }
  const Layout& layout() const { return layout_; }
  Region& region() const { return *region_; }
  Header& header() const { return *header_; }
  std::span<Allocation> allocations() const { return allocations_; }
  std::span<RankLine> lines() const { return lines_; }
  RankLine& line(int rank) const { return lines_[static_cast<size_t>(rank)]; }
  RankLine& own_line() const { return line(rank_); }
  Channel& channel(int source, int destination) const {
    return channels_[source * layout_.world + destination];
  }
  std::byte* slab(int rank) const {
    return first_slab_ + layout_.slab_bytes * static_cast<size_t>(rank);
  }
  /// Reserves memory for a range of this rank's slab. Throws
  /// Failure{kNoMemory}.
  void reserve(size_t offset, size_t bytes) const {
    region_->reserve(layout_.slab_at(rank_) + offset, bytes);
  }

 private:
  const std::shared_ptr<Region> region_;
  Header* const header_;
  const int rank_;
  Layout layout_{};
  std::byte* first_slab_ = nullptr;
  std::span<Allocation> allocations_;
  std::span<RankLine> lines_;
  Channel* channels_ = nullptr;
};

}  // namespace paceline

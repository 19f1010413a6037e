// What lies where in the region.
//
//   region:  Header | Allocation x 4096 | RankLine x N | Channel x N * N |
//            slab of rank 0 | slab of rank 1 | ...
//   slab:    small buffers (2) | staging buffers (2) |
//            outboxes (one per destination) | heap
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/region_words.h"
#include "core/sizes.h"

namespace paceline {

inline constexpr uint64_t kMagic = 0x31656e696c656361;  // "aceline1"
/// Incremented whenever the layout of the region or the meaning of a word in it
/// changes: ranks of different versions refuse each other.
inline constexpr uint32_t kAbiVersion = 7;

/// Payloads up to this size are exchanged with one synchronisation instead of
/// two. benchmarks/results/all_reduce_*.md shows where the two cost the same.
inline constexpr size_t kSmallBytes = 16 * 1024 / kSmaller;
/// Arrays outside the region pass through it in chunks of this size: two of
/// them stay in a core's L2 cache.
inline constexpr size_t kPieceBytes = 256 * 1024 / kSmaller;
inline constexpr size_t kOutboxBytes = 128 * 1024 / kSmaller;

inline constexpr size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

/// Offsets within the region. They depend only on the world size and the slab
/// size.
struct Layout {
  int world;
  size_t slab_bytes;

  size_t allocations_at() const;
  size_t rank_lines_at() const;
  size_t channels_at() const;
  size_t control_bytes() const;  ///< everything before the slabs
  size_t slab_at(int rank) const {
    return control_bytes() + slab_bytes * static_cast<size_t>(rank);
  }
  size_t region_bytes() const { return slab_at(world); }

  static constexpr size_t small_at(uint64_t parity) {
    return kSmallBytes * parity;
  }
  static constexpr size_t piece_at(uint64_t parity) {
    return 2 * kSmallBytes + kPieceBytes * parity;
  }
  static constexpr size_t buffers_bytes() {
    return 2 * (kSmallBytes + kPieceBytes);
  }
  static size_t outbox_at(int destination) {
    return buffers_bytes() + kOutboxBytes * static_cast<size_t>(destination);
  }
  size_t heap_at() const { return outbox_at(world); }
};

/// Creates a region for `world` ranks and writes its header. A slab has at most
/// the whole pages of `slab_limit` (sanitizers leave little address space), and
/// is halved until the region can be mapped. Returns the descriptor. Throws
/// Failure{kNoMemory}.
int create_region(int world, const uint64_t nonce[2],
                  size_t slab_limit = SIZE_MAX);

}  // namespace paceline

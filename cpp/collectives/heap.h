// Allocates arrays at the same offset in every rank's slab.
//
// Steps: a barrier; rank 0 decides where; a barrier; each rank reserves its own
// memory; a third barrier, after which all ranks know whether any could not. No
// data moves.
// moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "collectives/calls.h"
#include "collectives/free_space.h"
#include "core/failure.h"
#include "core/mapping.h"

namespace paceline {

class Heap {
 public:
  explicit Heap(Calls& calls);
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  Session& session() const { return calls_.session(); }
  /// Collective: returns the same offset on every rank, of page-aligned, zeroed
  /// memory. Throws on every rank if one lacks memory.
  size_t allocate(size_t bytes, double timeout_s);
  /// Not collective: frees this rank's memory of the array. The offset is used
  /// again once all ranks have freed it. `others_still_read`: the memory, too,
  /// stays until then.
  void free(size_t offset, bool others_still_read = false);

 private:
  void reclaim();
  void decide(size_t length);
  void remember(size_t offset, uint32_t entry);
  std::optional<uint32_t> forget(size_t offset);
  void check_reserved(size_t length, const std::optional<Failure>& own) const;

  Calls& calls_;
  const Mapping& mapping_;
  /// Only on rank 0, which decides: the free ranges of the slabs, and the
  /// entries without an array.
  FreeSpace<> free_space_;
  std::vector<uint32_t> free_entries_;
  /// The entries of the arrays that this rank has not freed, by offset. The
  /// mutex is needed because a garbage collector may free an array while
  /// another thread allocates.
  std::unordered_map<size_t, uint32_t> own_entries_;
  std::mutex own_entries_mutex_;
};

}  // namespace paceline

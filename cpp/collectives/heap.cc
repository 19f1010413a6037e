#include "collectives/heap.h"

#include <errno.h>
#include <string.h>

#include <algorithm>
#include <string>

#include "core/failure.h"
#include "core/faults.h"

namespace paceline {

Heap::Heap(Calls& calls) : calls_(calls), mapping_(calls.session().mapping()) {
  if (calls_.rank() != 0) return;
  const Layout& layout = mapping_.layout();
  const size_t heap_at = round_up(layout.heap_at(), page_bytes());
  if (heap_at < layout.slab_bytes)
    free_space_.give_back(heap_at, layout.slab_bytes - heap_at);
  for (size_t i = kMaxAllocations; i > 0; --i)
    free_entries_.push_back(static_cast<uint32_t>(i - 1));
}

void Heap::remember(size_t offset, uint32_t entry) {
  const std::lock_guard lock(own_entries_mutex_);
  own_entries_[offset] = entry;
}

std::optional<uint32_t> Heap::forget(size_t offset) {
  const std::lock_guard lock(own_entries_mutex_);
  const auto found = own_entries_.find(offset);
  if (found == own_entries_.end()) return std::nullopt;
  const uint32_t entry = found->second;
  own_entries_.erase(found);
  return entry;
}

// Takes back the arrays that all ranks have freed.
void Heap::reclaim() {
  // Acquire: pairs with the release in free().
  uint32_t first = mapping_.header().freed_allocations.exchange(
      0, std::memory_order_acquire);
  while (first != 0) {
    const uint32_t entry = first - 1;
    Allocation& array = mapping_.allocations()[entry];
    const size_t offset = array.offset.load(std::memory_order_relaxed);
    const size_t length = array.bytes.load(std::memory_order_relaxed);
    first = array.next.load(std::memory_order_relaxed);
    for (int r = 0; r < calls_.world(); ++r)
      mapping_.region().release(mapping_.layout().slab_at(r) + offset, length);
    array.bytes.store(0, std::memory_order_relaxed);
    free_space_.give_back(offset, length);
    free_entries_.push_back(entry);
  }
}

// Called by rank 0 alone, because garbage collectors free in a different order
// on each rank.
void Heap::decide(size_t length) {
  reclaim();
  uint32_t entry = kNoAllocationLeft;
  if (!free_entries_.empty()) {
    const std::optional<size_t> offset = free_space_.take(length);
    entry = offset ? free_entries_.back() : kNoRoom;
    try {  // for all ranks together: each alone would find enough memory
      if (offset)
        Region::check_memory(uint64_t{length} * mapping_.header().world);
    } catch (const Failure&) {
      free_space_.give_back(*offset, length);
      entry = kNoMemoryLeft;
    }
    if (entry < kMaxAllocations) {
      free_entries_.pop_back();
      mapping_.allocations()[entry].offset.store(*offset,
                                                 std::memory_order_relaxed);
      mapping_.allocations()[entry].owners.store(mapping_.header().world,
                                                 std::memory_order_relaxed);
      // Release, although last_allocation already orders the readers; pairs
      // with allocate().
      mapping_.allocations()[entry].bytes.store(length,
                                                std::memory_order_release);
    }
  }
  // Release: publishes the entry; pairs with allocate(). (The following barrier
  // would suffice.)
  mapping_.header().last_allocation.store(entry, std::memory_order_release);
}

size_t Heap::allocate(size_t bytes, double timeout_s) {
  calls_.begin(CallKind::kAllocate, bytes, DType::kUInt8, ReduceOp::kSum, 0, 1,
               timeout_s);
  // Larger than any slab: decide() refuses it, and no sum overflows before
  // that.
  bytes = std::min(bytes, size_t{1} << 60);
  const size_t length = round_up(std::max<size_t>(bytes, 1), page_bytes());
  calls_.barrier();
  if (calls_.rank() == 0) decide(length);
  calls_.barrier();
  // Acquire; pairs with decide().
  const uint32_t entry =
      mapping_.header().last_allocation.load(std::memory_order_acquire);
  if (entry == kNoMemoryLeft) {
    throw Failure{.reason = Reason::kNoMemory,
                  .message = std::to_string(calls_.world()) + " ranks need " +
                             std::to_string(length) +
                             " bytes each, which the machine or the container "
                             "does not have left"};
  }
  if (entry == kNoAllocationLeft)
    throw Failure{.reason = Reason::kTooMany,
                  .message = std::to_string(kMaxAllocations)};
  if (entry == kNoRoom) {
    throw Failure{.reason = Reason::kNoMemory,
                  .message = "no room for " + std::to_string(length) +
                             " bytes per rank in a slab of " +
                             std::to_string(mapping_.layout().slab_bytes)};
  }
  const size_t offset =
      mapping_.allocations()[entry].offset.load(std::memory_order_relaxed);
  remember(offset, entry);
  std::optional<Failure> own_failure;
  try {
    fault_point(Point::kAllocate);
    mapping_.reserve(offset, length);
  } catch (const Failure& failure) {
    if (failure.reason != Reason::kNoMemory) throw;
    own_failure = failure;
  }
  const int error = !own_failure                     ? 0
                    : own_failure->error_number != 0 ? own_failure->error_number
                                                     : ENOMEM;
  mapping_.own_line().allocation_error.store(static_cast<uint32_t>(error),
                                             std::memory_order_relaxed);
  calls_.barrier();
  try {
    check_reserved(length, own_failure);
  } catch (const Failure&) {
    free(offset);
    throw;
  }
  return offset;
}

// Throws on every rank if one could not reserve its memory, and names that
// rank. `own`: the failure of this rank.
void Heap::check_reserved(size_t length,
                          const std::optional<Failure>& own) const {
  Failure failure{.reason = Reason::kNoMemory};
  for (int r = 0; r < calls_.world(); ++r) {
    const auto error = static_cast<int>(
        mapping_.line(r).allocation_error.load(std::memory_order_relaxed));
    if (error == 0) continue;
    if (failure.culprit < 0) {
      failure.culprit = r;
      failure.error_number = error;
    } else {
      failure.message += '\n';
    }
    failure.late[r / 64] |= uint64_t{1} << (r % 64);
    failure.message += "rank " + std::to_string(r) + " could not reserve " +
                       std::to_string(length) + " bytes: ";
    failure.message += r == calls_.rank() ? own->message : strerror(error);
  }
  if (failure.culprit < 0) return;
  if (own) failure.error_number = own->error_number;
  throw failure;
}

void Heap::free(size_t offset, bool others_still_read) {
  if (calls_.session().is_forked()) return;
  const std::optional<uint32_t> entry = forget(offset);
  if (!entry) return;
  Allocation& array = mapping_.allocations()[*entry];
  if (!others_still_read) {
    mapping_.region().release(mapping_.layout().slab_at(calls_.rank()) + offset,
                              array.bytes.load(std::memory_order_relaxed));
  }
  // acq_rel: the last rank to free the array passes it to rank 0 on behalf of
  // all ranks; pairs with this operation on the others.
  if (array.owners.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  uint32_t first =
      mapping_.header().freed_allocations.load(std::memory_order_relaxed);
  // Release: all use of the array has ended; pairs with the exchange in
  // reclaim().
  do {
    array.next.store(first, std::memory_order_relaxed);
  } while (!mapping_.header().freed_allocations.compare_exchange_weak(
      first, *entry + 1, std::memory_order_release, std::memory_order_relaxed));
}

}  // namespace paceline

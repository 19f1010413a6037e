// allocate and free: arrays at the same offset in every rank's slab.
//
// Rank 0 decides where, between two meetings; each rank then reserves its own
// share, and a third meeting tells all of them whether somebody could not.
#include <algorithm>
#include <string>

#include "collectives/host_group.h"

namespace paceline {

// First fit in the gaps between the blocks that are in use.
std::optional<size_t> HostGroup::find_heap_space(size_t bytes) const {
  std::vector<std::pair<size_t, size_t>> used;
  for (const Block& block : blocks_) {
    const size_t length = block.bytes.load(std::memory_order_acquire);
    if (length != 0)
      used.emplace_back(block.offset.load(std::memory_order_relaxed), length);
  }
  std::sort(used.begin(), used.end());
  size_t at = round_up(layout_.heap_at(), page_bytes());
  for (const auto& [offset, length] : used) {
    if (offset - at >= bytes) break;
    at = offset + length;
  }
  if (bytes > layout_.slab_bytes || at > layout_.slab_bytes - bytes)
    return std::nullopt;
  return at;
}

// By rank 0, because garbage collectors free in another order on each rank.
void HostGroup::decide_allocation(size_t length) {
  uint32_t entry = kNoBlockLeft;
  for (uint32_t i = 0; i < kMaxBlocks; ++i) {
    Block& block = blocks_[i];
    const size_t old_length = block.bytes.load(std::memory_order_relaxed);
    // Acquire: pairs with the release in free(); no rank uses it any more.
    if (old_length != 0 && block.owners.load(std::memory_order_acquire) == 0) {
      const size_t offset = block.offset.load(std::memory_order_relaxed);
      for (int r = 0; r < world(); ++r)
        region_->release(layout_.slab_at(r) + offset, old_length);
      block.bytes.store(0, std::memory_order_relaxed);
    }
    if (block.bytes.load(std::memory_order_relaxed) == 0 &&
        entry == kNoBlockLeft)
      entry = i;
  }
  const std::optional<size_t> offset = find_heap_space(length);
  if (!offset && entry < kMaxBlocks) entry = kNoRoom;
  try {  // for all ranks at once: each by itself would find enough
    if (entry < kMaxBlocks)
      Region::check_memory(uint64_t{length} * header_->world);
  } catch (const Failure&) {
    entry = kNoMemoryLeft;
  }
  if (entry < kMaxBlocks) {
    blocks_[entry].offset.store(*offset, std::memory_order_relaxed);
    blocks_[entry].owners.store(header_->world, std::memory_order_relaxed);
    blocks_[entry].bytes.store(length, std::memory_order_release);
  }
  header_->allocation_failures.store(0, std::memory_order_relaxed);
  header_->allocated_block.store(entry, std::memory_order_release);
}

size_t HostGroup::allocate(size_t bytes, double timeout_s) {
  begin(CallKind::kAllocate, bytes, DType::kUInt8, ReduceOp::kSum, 0, 1,
        timeout_s);
  // More than any slab: refused below, and no sum overflows on the way there.
  bytes = std::min(bytes, size_t{1} << 60);
  const size_t length = round_up(std::max<size_t>(bytes, 1), page_bytes());
  meet();
  if (rank_ == 0) decide_allocation(length);
  meet();
  const uint32_t entry =
      header_->allocated_block.load(std::memory_order_acquire);
  if (entry == kNoMemoryLeft) {
    throw Failure{.reason = Reason::kNoMemory,
                  .message = std::to_string(world()) + " ranks need " +
                             std::to_string(length) +
                             " bytes each, which the machine or the container "
                             "does not have left"};
  }
  if (entry == kNoBlockLeft)
    throw Failure{.reason = Reason::kTooMany,
                  .message = std::to_string(kMaxBlocks)};
  if (entry == kNoRoom) {
    throw Failure{.reason = Reason::kNoMemory,
                  .message = "no room for " + std::to_string(length) +
                             " bytes per rank in a slab of " +
                             std::to_string(layout_.slab_bytes)};
  }
  const size_t offset = blocks_[entry].offset.load(std::memory_order_relaxed);
  std::optional<Failure> own_failure;
  try {
    fault_point(Point::kAllocate);
    region_->reserve(layout_.slab_at(rank_) + offset, length);
  } catch (const Failure& failure) {
    if (failure.reason != Reason::kNoMemory) throw;
    own_failure = failure;
    header_->allocation_failures.fetch_add(1, std::memory_order_relaxed);
  }
  meet();
  const uint32_t failures =
      header_->allocation_failures.load(std::memory_order_relaxed);
  if (failures == 0) return offset;
  free(offset);
  if (own_failure) throw *own_failure;
  throw Failure{.reason = Reason::kNoMemory,
                .message = std::to_string(failures) + " of " +
                           std::to_string(world()) +
                           " ranks could not reserve " +
                           std::to_string(length) + " bytes"};
}

void HostGroup::free(size_t offset, bool others_still_read) {
  if (is_forked()) return;
  for (Block& block : blocks_) {
    const size_t length = block.bytes.load(std::memory_order_acquire);
    if (length == 0 || block.offset.load(std::memory_order_relaxed) != offset)
      continue;
    if (block.owners.load(std::memory_order_relaxed) == 0)
      continue;  // an older block, not reclaimed yet
    if (!others_still_read)
      region_->release(layout_.slab_at(rank_) + offset, length);
    block.owners.fetch_sub(1, std::memory_order_release);
    return;
  }
}

}  // namespace paceline

#include "core/step_table.h"

#include <string.h>

#include "core/faults.h"

namespace paceline {

StepTable::StepTable(void* at, int world, int rank)
    : head_(static_cast<Head*>(at)),
      lines_(reinterpret_cast<Line*>(head_ + 1)),
      world_(world),
      rank_(rank) {}

uint64_t StepTable::step() const {
  // Acquire; pairs with decide().
  return head_->decision.load(std::memory_order_acquire) >> 1;
}

bool StepTable::decide(bool wants) {
  const uint64_t next =
      line(rank_).done.load(std::memory_order_relaxed) + uint64_t{1};
  own_step_ = next;
  if (wants) fault_point(Point::kStepMet);
  // Acquire; pairs with the exchange below, of another rank.
  uint64_t seen = head_->decision.load(std::memory_order_acquire);
  while (seen < next << 1) {
    // acq_rel; pairs with the other ranks' loads here.
    if (head_->decision.compare_exchange_weak(seen, next << 1 | uint64_t{wants},
                                              std::memory_order_acq_rel)) {
      seen = next << 1 | uint64_t{wants};
      break;
    }
  }
  const bool is_made = (seen & 1) != 0;
  if (wants && is_made) fault_point(Point::kStepBegun);
  return is_made;
}

void StepTable::finish(int of) {
  fault_point(Point::kStepWritten);
  // Release: the shard is written; pairs with is_finished().
  line(of).done.store(own_step(), std::memory_order_release);
  fault_point(Point::kStepDone);
}

bool StepTable::is_finished(int of) const {
  // Acquire; pairs with finish().
  return line(of).done.load(std::memory_order_acquire) >= own_step();
}

bool StepTable::is_whole() const {
  // Acquire; pairs with decide().
  const uint64_t decision = head_->decision.load(std::memory_order_acquire);
  if ((decision & 1) == 0) return true;  // the last step was not made
  const uint64_t step = decision >> 1;
  for (int r = 0; r < world_; ++r) {
    // Acquire: the shard is written; pairs with finish().
    if (line(r).done.load(std::memory_order_acquire) < step) return false;
  }
  return true;
}

void StepTable::open_block(int of, uint32_t block,
                           const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) memcpy(copy.to, copy.from, copy.bytes);
  fault_point(Point::kBlockCopied);
  // Release: the copies are made; pairs with progress().
  line(of).progress.store(own_step() << 32 | uint64_t{block} << 1 | 1,
                          std::memory_order_release);
  fault_point(Point::kBlockOpened);
}

void StepTable::close_block(int of, uint32_t block) {
  fault_point(Point::kBlockWritten);
  // Release: the block is written; pairs with progress().
  line(of).progress.store(own_step() << 32 | (uint64_t{block} + 1) << 1,
                          std::memory_order_release);
  fault_point(Point::kBlockClosed);
}

StepTable::Progress StepTable::progress(int of) const {
  // Acquire; pairs with open_block() and close_block().
  const uint64_t word = line(of).progress.load(std::memory_order_acquire);
  if (word >> 32 != (own_step() & 0xffffffff)) return {0, false};
  const auto low = static_cast<uint32_t>(word);
  return {low >> 1, (low & 1) != 0};
}

void StepTable::give_up() {
  // Release: this rank writes no more; pairs with has_given_up().
  line(rank_).gave_up.store(own_step(), std::memory_order_release);
}

bool StepTable::has_given_up(int of) const {
  // Acquire; pairs with give_up().
  return line(of).gave_up.load(std::memory_order_acquire) == own_step();
}

int StepTable::claim(int of, std::optional<int> instead_of) {
  const uint64_t step = own_step();
  const uint64_t own = step << 16 | static_cast<uint64_t>(rank_ + 1);
  Atomic<uint64_t>& word = line(of).claim;
  // Acquire; pairs with the exchange below, of another rank.
  uint64_t seen = word.load(std::memory_order_acquire);
  // A claim of an earlier step does not count.
  while (seen >> 16 != step ||
         (instead_of &&
          seen == (step << 16 | static_cast<uint64_t>(*instead_of + 1)))) {
    // acq_rel: the work of the rank that claimed before is seen; pairs with
    // this exchange on other ranks.
    if (word.compare_exchange_weak(seen, own, std::memory_order_acq_rel))
      return rank_;
  }
  return static_cast<int>(seen & 0xffff) - 1;
}

}  // namespace paceline

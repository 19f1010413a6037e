// Gradients that share memory; see reducer.h.
//
// Two parameters behind views of one sum may get one memory for both gradients,
// on one rank and not on the others. Written in place, the mean of one would be
// read as the gradient of the other, and only one of two means would remain. So
// each of them is moved into the arena, and the front end gives it memory of
// its own. This holds between all passes that one thread runs at a time:
// several models may get their gradients in one backward.
#include <string.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "reducer/reducer.h"

namespace paceline {
namespace {

/// The reducers of this process that are in a pass. A thread looks into its own
/// alone, so the lock is held for the list.
struct OpenPasses {
  std::mutex mutex;
  std::vector<Reducer*> reducers;
  uint32_t fork_generation;
};

// A forked child has none of its parent's passes; and the lock may have been
// held by a thread that it does not have.
OpenPasses& open_passes() {
  static Atomic<OpenPasses*> current{nullptr};
  // Acquire: what another thread has made; partner: the exchange below.
  OpenPasses* seen = current.load(std::memory_order_acquire);
  if (seen == nullptr || seen->fork_generation != fork_generation()) {
    auto fresh = std::make_unique<OpenPasses>();
    fresh->fork_generation = fork_generation();
    // acq_rel: publishes what this thread has made, or finds what another has;
    // partners: each other, and the load above.
    if (current.compare_exchange_strong(seen, fresh.get(),
                                        std::memory_order_acq_rel))
      seen = fresh.release();  // outlives every reducer
  }
  return *seen;
}

}  // namespace

void Reducer::enter_pass() {
  OpenPasses& open = open_passes();
  const std::lock_guard lock(open.mutex);
  thread_ = std::this_thread::get_id();
  if (std::find(open.reducers.begin(), open.reducers.end(), this) ==
      open.reducers.end())
    open.reducers.push_back(this);
}

void Reducer::leave_pass() {
  if (session_.is_forked()) return;
  OpenPasses& open = open_passes();
  const std::lock_guard lock(open.mutex);
  std::erase(open.reducers, this);
}

void Reducer::part_overlapping() {
  overlapping_.clear();
  if (scatters_) return;  // nothing is written there
  extents_.clear();
  collect_extents(*this, true);
  if (extents_.empty()) return;
  {
    OpenPasses& open = open_passes();
    const std::lock_guard lock(open.mutex);
    for (Reducer* other : open.reducers) {
      if (other != this && other->thread_ == thread_)
        collect_extents(*other, false);
    }
  }
  std::sort(extents_.begin(), extents_.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  // The one that reaches furthest of those that begin before. Whoever overlaps
  // with any of them overlaps with it; and those that it overlaps with, it does
  // when they come.
  const Extent* furthest = &extents_[0];
  for (size_t i = 1; i < extents_.size(); ++i) {
    const Extent& extent = extents_[i];
    if (extent.begin < furthest->end) {
      if (extent.parameter != nullptr) part(*extent.parameter);
      if (furthest->parameter != nullptr) part(*furthest->parameter);
    }
    if (extent.end > furthest->end) furthest = &extent;
  }
}

void Reducer::collect_extents(Reducer& from, bool is_own) {
  for (Parameter& parameter : from.parameters_) {
    if (parameter.ready_in_pass != from.pass_ ||
        parameter.copy_back == nullptr || parameter.span.count == 0)
      continue;
    const size_t bytes =
        parameter.span.count * dtype_bytes(parameter.span.dtype);
    extents_.push_back({parameter.copy_back, parameter.copy_back + bytes,
                        is_own ? &parameter : nullptr});
  }
  for (const Extent& extent : from.copied_) {
    // A gradient that two wrapped models have copied, of a parameter that both
    // hold, gets the same mean from both.
    const auto is_same = [&](const Extent& own) {
      return own.is_same_memory(extent);
    };
    if (is_own) {
      extents_.push_back(extent);
    } else if (std::none_of(copied_.begin(), copied_.end(), is_same)) {
      extents_.push_back({extent.begin, extent.end, nullptr});
    }
  }
}

void Reducer::part(Parameter& parameter) {
  const auto index = static_cast<size_t>(&parameter - parameters_.data());
  if (std::find(overlapping_.begin(), overlapping_.end(), index) !=
      overlapping_.end())
    return;
  if (parameter.copy_back != nullptr) move_into_arena(parameter);
  overlapping_.push_back(index);
}

// Only chunks that are assigned to this rank are not there already, and none of
// them is reduced yet.
void Reducer::move_into_arena(Parameter& parameter) {
  for (uint32_t i = parameter.first_segment; i < parameter.end_segment; ++i) {
    const Segment& segment = segments_[segments_in_order_[i]];
    if (segment.owner != session_.rank()) continue;
    memcpy(arena() + segment.offset, own_place_of(segment), segment.bytes());
  }
  parameter.copy_back = nullptr;
}

}  // namespace paceline

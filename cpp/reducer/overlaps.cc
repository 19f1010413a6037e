#include "reducer/overlaps.h"

#include <algorithm>
#include <memory>
#include <mutex>

#include "core/atomics.h"
#include "core/region.h"

namespace paceline {
namespace {

/// The backward passes of this process. A thread looks into its own alone, so
/// the lock is held for the list.
struct OpenBackwards {
  std::mutex mutex;
  std::vector<OpenBackward*> backwards;
  uint32_t fork_generation;
};

// A forked child has none of its parent's backward passes; and the lock may
// have been held by a thread that it does not have.
OpenBackwards& open_backwards() {
  static Atomic<OpenBackwards*> current{nullptr};
  // Acquire: what another thread has made; pairs with the exchange below.
  OpenBackwards* seen = current.load(std::memory_order_acquire);
  if (seen == nullptr || seen->fork_generation != fork_generation()) {
    auto fresh = std::make_unique<OpenBackwards>();
    fresh->fork_generation = fork_generation();
    // acq_rel: publishes what this thread has made, or finds what another has;
    // pairs with itself in other threads, and with the load above.
    if (current.compare_exchange_strong(seen, fresh.get(),
                                        std::memory_order_acq_rel))
      seen = fresh.release();  // outlives every backward
  }
  return *seen;
}

}  // namespace

void OpenBackward::enter() {
  copied_.clear();
  OpenBackwards& open = open_backwards();
  const std::lock_guard lock(open.mutex);
  thread_ = std::this_thread::get_id();
  if (std::find(open.backwards.begin(), open.backwards.end(), this) ==
      open.backwards.end())
    open.backwards.push_back(this);
}

void OpenBackward::leave() {
  OpenBackwards& open = open_backwards();
  const std::lock_guard lock(open.mutex);
  std::erase(open.backwards, this);
}

void OpenBackward::add_copied(size_t parameter, const void* gradient,
                              size_t bytes, bool is_shared) {
  const auto* begin = static_cast<const std::byte*>(gradient);
  if (bytes > 0)
    copied_.push_back({begin, begin + bytes, parameter, is_shared});
}

std::vector<size_t> OpenBackward::find_overlapping() {
  std::vector<size_t> found;
  extents_.clear();
  collect(*this);
  if (extents_.empty()) return found;
  {
    OpenBackwards& open = open_backwards();
    const std::lock_guard lock(open.mutex);
    for (const OpenBackward* other : open.backwards) {
      if (other != this && other->thread_ == thread_) collect(*other);
    }
  }
  std::sort(extents_.begin(), extents_.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  const auto add = [&](const Extent& extent) {
    if (extent.parameter != kForeign &&
        std::find(found.begin(), found.end(), extent.parameter) == found.end())
      found.push_back(extent.parameter);
  };
  // The one that reaches furthest of those that begin before. Whoever overlaps
  // with any of them overlaps with it; and those that it overlaps with, it does
  // when they come.
  const Extent* furthest = &extents_[0];
  for (size_t i = 1; i < extents_.size(); ++i) {
    const Extent& extent = extents_[i];
    if (extent.begin < furthest->end) {
      add(extent);
      add(*furthest);
    }
    if (extent.end > furthest->end) furthest = &extent;
  }
  return found;
}

void OpenBackward::collect(const OpenBackward& from) {
  const size_t own = extents_.size();
  from.collect_written(extents_);
  if (&from == this) {
    extents_.insert(extents_.end(), copied_.begin(), copied_.end());
    return;
  }
  for (size_t i = own; i < extents_.size(); ++i)
    extents_[i].parameter = kForeign;
  for (const Extent& extent : from.copied_) {
    const bool is_same =
        extent.is_shared &&
        std::any_of(copied_.begin(), copied_.end(), [&](const Extent& own) {
          return own.is_shared && own.is_same_memory(extent);
        });
    if (!is_same) extents_.push_back({extent.begin, extent.end, kForeign});
  }
}

}  // namespace paceline

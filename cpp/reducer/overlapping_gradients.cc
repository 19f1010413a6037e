#include "reducer/overlapping_gradients.h"

#include <algorithm>
#include <memory>
#include <mutex>

#include "core/atomics.h"
#include "core/region.h"

namespace paceline {
namespace {

/// The open backwards of this process. A thread examines only its own
/// backwards, so the lock protects the list alone.
struct OpenBackwards {
  std::mutex mutex;
  std::vector<OpenBackward*> backwards;
  uint32_t fork_generation;
};

// A forked child has none of its parent's backwards, and a thread that it does
// not have may have held the lock.
OpenBackwards& open_backwards() {
  static Atomic<OpenBackwards*> current{nullptr};
  // Acquire: the list that another thread has made; pairs with the exchange
  // below.
  OpenBackwards* seen = current.load(std::memory_order_acquire);
  if (seen == nullptr || seen->fork_generation != fork_generation()) {
    auto fresh = std::make_unique<OpenBackwards>();
    fresh->fork_generation = fork_generation();
    // acq_rel: publishes this thread's list, or finds that of another thread;
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
  // Of the extents that begin earlier, the one that reaches furthest. An extent
  // that overlaps with any of them overlaps with this one. The extents that
  // this one overlaps with are found when the loop reaches them.
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

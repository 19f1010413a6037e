// Collectives of one process take turns: the threads of a rank must not make
// two at a time.
#pragma once

#include <pthread.h>

#include <chrono>
#include <cstdint>
#include <mutex>

#include "core/atomics.h"

namespace paceline {

/// A lock that knows who holds it, so that a thread that would wait for itself
/// (in a signal handler that interrupted its own collective) can be told, and
/// others whom they wait for.
class Turn {
 public:
  /// As Python's threading.get_ident() has it; never 0.
  using Thread = uint64_t;

  /// Returns whether this thread has the turn now. Not for one that has it.
  bool try_take() { return noted(mutex_.try_lock()); }
  bool try_take_for(std::chrono::nanoseconds limit) {
    return noted(mutex_.try_lock_for(limit));
  }
  void give_back() {
    holder_.store(kNobody, std::memory_order_relaxed);
    mutex_.unlock();
  }
  /// Relaxed suffices: a thread always sees what it stored itself, and what
  /// others stored is only told.
  bool is_mine() const { return holder() == this_thread(); }
  Thread holder() const { return holder_.load(std::memory_order_relaxed); }

  static Thread this_thread() { return static_cast<Thread>(pthread_self()); }

 private:
  static constexpr Thread kNobody = 0;
  bool noted(bool taken) {
    if (taken) holder_.store(this_thread(), std::memory_order_relaxed);
    return taken;
  }

  std::timed_mutex mutex_;
  Atomic<Thread> holder_{kNobody};
};

}  // namespace paceline

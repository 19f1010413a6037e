// Collectives of one process take turns: the threads of a rank must not make
// two at a time.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "core/atomics.h"

namespace paceline {

/// A lock that knows who holds it, so that a thread that would wait for itself
/// (in a signal handler that interrupted its own collective) can be told, and
/// others whom they wait for. Who holds it is the lock: taking and giving back
/// are one atomic operation each while nobody waits, because a small collective
/// takes no longer than ten of them.
class Turn {
 public:
  /// As Python's threading.get_ident() has it; never 0.
  using Thread = uint64_t;

  /// Returns whether this thread has the turn now. Not for one that has it.
  bool try_take() {
    Thread nobody = kNobody;
    // acquire: sees what the last holder did; pairs with give_back(). seq_cst:
    // orders it after try_take_for()'s announcement.
    return holder_.compare_exchange_strong(nobody, this_thread(),
                                           std::memory_order_seq_cst,
                                           std::memory_order_seq_cst);
  }
  /// The same, once it is free, or when `limit` is over.
  bool try_take_for(std::chrono::nanoseconds limit) {
    waiting_.fetch_add(1, std::memory_order_seq_cst);
    std::unique_lock lock(mutex_);
    const bool taken =
        given_back_.wait_for(lock, limit, [&] { return try_take(); });
    waiting_.fetch_sub(1, std::memory_order_relaxed);
    return taken;
  }
  void give_back() {
    // seq_cst: before the look at `waiting_`. Whoever announced itself too late
    // for that look finds the turn free.
    holder_.store(kNobody, std::memory_order_seq_cst);
    if (waiting_.load(std::memory_order_seq_cst) == 0) return;
    // Who has announced itself either has not looked yet, or sleeps.
    {
      const std::lock_guard lock(mutex_);
    }
    given_back_.notify_one();
  }
  /// Relaxed suffices: a thread always sees what it stored itself, and what
  /// others stored is only told.
  bool is_mine() const { return holder() == this_thread(); }
  Thread holder() const { return holder_.load(std::memory_order_relaxed); }

  static Thread this_thread() { return static_cast<Thread>(pthread_self()); }

 private:
  static constexpr Thread kNobody = 0;

  Atomic<Thread> holder_{kNobody};
  Atomic<uint32_t> waiting_{0};
  std::mutex mutex_;  ///< of `given_back_`
  std::condition_variable given_back_;
};

}  // namespace paceline

// The collectives of one process take turns: no two threads of a rank may make
// one at the same time.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "core/atomics.h"

namespace paceline {

/// A lock that knows which thread holds it. A thread that would wait for itself
/// (in a signal handler that interrupted its own collective) gets an error
/// instead, and errors of other threads can name the holder. The holder's id is
/// the lock: taking and releasing it are one atomic operation each while no
/// thread waits, because a small collective takes no longer than ten of them.
class Turn {
 public:
  /// As returned by Python's threading.get_ident(); never 0.
  using Thread = uint64_t;

  /// Takes the turn if it is free; returns whether it did. The caller must not
  /// hold it.
  bool try_take() {
    Thread expected = kNoThread;
    // acquire: sees what the last holder did; pairs with give_back(). seq_cst:
    // ordered after the increment of `waiting_` in try_take_for().
    return holder_.compare_exchange_strong(expected, this_thread(),
                                           std::memory_order_seq_cst,
                                           std::memory_order_seq_cst);
  }
  /// Waits until the turn is free and takes it, or returns false after `limit`.
  bool try_take_for(std::chrono::nanoseconds limit) {
    waiting_.fetch_add(1, std::memory_order_seq_cst);
    std::unique_lock lock(mutex_);
    const bool taken =
        given_back_.wait_for(lock, limit, [&] { return try_take(); });
    waiting_.fetch_sub(1, std::memory_order_relaxed);
    return taken;
  }
  void give_back() {
    // seq_cst: before the load of `waiting_`. A thread that increments
    // `waiting_` after that load finds the turn free.
    holder_.store(kNoThread, std::memory_order_seq_cst);
    if (waiting_.load(std::memory_order_seq_cst) == 0) return;
    // A thread in try_take_for() has either not checked yet, or sleeps.
    {
      const std::lock_guard lock(mutex_);
    }
    given_back_.notify_one();
  }
  /// Relaxed suffices: a thread always sees its own stores, and those of other
  /// threads only serve error messages.
  bool is_mine() const { return holder() == this_thread(); }
  Thread holder() const { return holder_.load(std::memory_order_relaxed); }

  static Thread this_thread() { return static_cast<Thread>(pthread_self()); }

 private:
  static constexpr Thread kNoThread = 0;

  Atomic<Thread> holder_{kNoThread};
  Atomic<uint32_t> waiting_{0};
  std::mutex mutex_;  ///< for `given_back_`
  std::condition_variable given_back_;
};

}  // namespace paceline

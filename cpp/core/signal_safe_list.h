// A list that signal handlers and forked children may walk at any moment.
//
// It takes no lock, and its entries are never freed: a removed entry is used
// again. take_out() waits until no thread walks the list, so that the object to
// which the entry points may be destroyed afterwards.
#pragma once

#include <sched.h>

#include "core/atomics.h"

namespace paceline {

template <class T>
class SignalSafeList {
 public:
  struct Entry {
    Atomic<uint32_t> state{kChanging};
    T value{};
    Entry* next = nullptr;
  };

  Entry* put(const T& value) {
    // Acquire: pairs with the release in which the list or the entry was
    // published.
    Entry* entry = first_.load(std::memory_order_acquire);
    for (; entry != nullptr; entry = entry->next) {
      // Acquire in the exchange: the previous user of the entry is done; pairs
      // with the release of kFree in take_out().
      uint32_t state = kFree;
      if (entry->state.compare_exchange_strong(state, kChanging,
                                               std::memory_order_acquire))
        break;
    }
    if (entry == nullptr) {
      entry = new Entry;  // never deleted: a handler may be looking at it
      entry->next = first_.load(std::memory_order_relaxed);
      // Release: publishes the entry; pairs with the loads of first_ in put()
      // and visit().
      while (!first_.compare_exchange_weak(entry->next, entry,
                                           std::memory_order_release)) {
      }
    }
    entry->value = value;
    // Release: publishes the value; pairs with the load in visit().
    entry->state.store(kThere, std::memory_order_release);
    return entry;
  }

  void take_out(Entry* entry) {
    // seq_cst here and in visit(): either the walking thread sees that the
    // entry is changing, or this thread sees the walker.
    entry->state.store(kChanging, std::memory_order_seq_cst);
    while (walkers_.load(std::memory_order_seq_cst) != 0) sched_yield();
    // Release: no thread reads the value any more; pairs with the exchange in
    // put().
    entry->state.store(kFree, std::memory_order_release);
  }

  /// Calls `visit(value)` for each entry. Async-signal-safe if `visit` is.
  template <class Visit>
  void visit(Visit visit) {
    walkers_.fetch_add(1, std::memory_order_seq_cst);
    // Acquire; pairs with the release in put().
    for (Entry* entry = first_.load(std::memory_order_acquire);
         entry != nullptr; entry = entry->next) {
      if (entry->state.load(std::memory_order_seq_cst) == kThere)
        visit(entry->value);
    }
    walkers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  /// For a forked child, which has none of the threads that walked.
  void forget_walkers() { walkers_.store(0, std::memory_order_relaxed); }

 private:
  enum State : uint32_t { kFree, kChanging, kThere };
  Atomic<Entry*> first_{nullptr};
  Atomic<uint32_t> walkers_{0};
};

}  // namespace paceline

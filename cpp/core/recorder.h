// Records what this process does in its backwards: a ring of records in a
// mapped file, which remains after the process was killed.
//
// A record is written where the event happens, without a lock or a system call.
// The reader of the file (paceline/trace/ring_file.py) may read at any time. It
// takes a record as complete if its sequence number is that of its place.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/atomics.h"
#include "core/clock.h"

namespace paceline {

/// What a record describes. Python adds others; paceline/trace/records.py has
/// the same numbers.
enum class Event : uint16_t {
  /// This rank has posted a bucket (its number, 0).
  kPosted = 1,
  /// It has reduced chunks of a bucket (when it began, bucket << 32 | chunks).
  kReduced = 2,
  /// It has waited (when it began, the last rank to arrive, or -1).
  kWaited = 3,
  /// It has copied means back (when it began, 0).
  kCopiedBack = 4,
  /// As in records.py; the first number is a backward of a model.
  kForwardBegan = 5,
  kForwardEnded = 6,
  kBackwardBegan = 7,
  kBackwardEnded = 8,
  kAveragingEnded = 9,
};

struct Record {
  /// When it was written, by CLOCK_MONOTONIC.
  int64_t time_ns;
  /// The number of the record, from 1; written last.
  Atomic<uint32_t> sequence;
  uint16_t event;
  /// The thread that wrote it: 0 for the first one that wrote a record.
  uint16_t thread;
  int64_t first;
  int64_t second;
};
static_assert(sizeof(Record) == 32);

class Recorder {
 public:
  /// `count`: the number of records begun. `capacity`: a power of two. All of
  /// the memory stays mapped until the process ends.
  Recorder(Atomic<uint64_t>* count, Record* records, uint64_t capacity)
      : count_(*count), records_(records), mask_(capacity - 1) {}

  /// Null: recording is off. One load of a word that hardly ever changes.
  static Recorder* current() {
    // Acquire: the recorder is made; pairs with use().
    return current_.load(std::memory_order_acquire);
  }
  /// Uses this recorder from now on. It is never deleted, because a thread may
  /// be in the middle of a record. Null: stops recording.
  static void use(Recorder* recorder) {
    // Release; pairs with current().
    current_.store(recorder, std::memory_order_release);
  }

  void record(Event event, int64_t first, int64_t second) {
    record_at(now_ns(), event, first, second);
  }
  void record_at(int64_t time_ns, Event event, int64_t first, int64_t second) {
    const uint64_t index = count_.fetch_add(1, std::memory_order_relaxed);
    Record& record = records_[index & mask_];
    record.time_ns = time_ns;
    record.event = static_cast<uint16_t>(event);
    record.thread = this_thread();
    record.first = first;
    record.second = second;
    // Release: the record is complete; pairs with the reader of the file.
    record.sequence.store(static_cast<uint32_t>(index + 1),
                          std::memory_order_release);
    // The next records lie where nothing was written since the last turn of the
    // ring, so they are in no cache: prefetch them while the model computes.
    __builtin_prefetch(&records_[(index + kAhead) & mask_], 1);
  }

 private:
  /// How many records ahead are prefetched: two cache lines.
  static constexpr uint64_t kAhead = 4;

  static uint16_t this_thread() {
    thread_local const uint16_t number =
        num_threads_.fetch_add(1, std::memory_order_relaxed);
    return number;
  }

  // std::atomic, not Atomic: nothing between ranks depends on these, so the
  // schedule tests need not explore them.
  static inline std::atomic<Recorder*> current_{nullptr};
  static inline std::atomic<uint16_t> num_threads_{0};

  Atomic<uint64_t>& count_;
  Record* const records_;
  const uint64_t mask_;
};

}  // namespace paceline

// The single copy of a model's values that all ranks of a host read.
//
// It is a sealed memfd of its own, so it outlives the group whose ranks share
// it and is freed with the last tensor in it. Each rank maps it twice:
//
//   values      read-only: the parameters' memory
//   writable    the same pages, for code that owns the writes (an optimizer that
//               updates one shard on each rank)
//
// So a write through a parameter that was not announced is stopped by the
// processor's memory protection and does not reach the forward of other ranks.
// It is undone and reported (see `allow_stray_write`).
//
// Announced writes are a transaction. begin_writing() lets this rank write to
// `values`, in private pages that the kernel copies as they are written; no
// other rank sees them. When all ranks have finished writing, one of them
// publishes its changes through `writable`. Then each rank calls end_writing(),
// which drops its private pages. If a rank has failed, they are dropped without
// a publication.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/atomics.h"
#include "core/crash.h"
#include "core/descriptor.h"
#include "core/signal_safe_list.h"

namespace paceline {

class ModelMemory {
 public:
  /// Consecutive pages, in bytes from the beginning.
  struct Run {
    size_t begin;
    size_t bytes;
  };

  /// Makes the file, if there is memory for it, and returns its descriptor.
  /// Throws Failure{kNoMemory}.
  static int create(size_t bytes);

  /// Maps the file behind `fd`, which the caller keeps. A forked child can read
  /// `values`, and has no `writable`.
  explicit ModelMemory(int fd);
  ~ModelMemory();
  ModelMemory(const ModelMemory&) = delete;
  ModelMemory& operator=(const ModelMemory&) = delete;

  /// Reserves memory for slice `index` of `count` equal slices, on the NUMA
  /// node that this thread runs on. Throws Failure{kNoMemory}.
  void reserve_share(size_t index, size_t count);

  std::byte* values() const { return values_; }
  std::byte* writable() const { return writable_; }
  size_t size() const { return size_; }

  /// Throws Failure{kNoMemory} if the address space is full.
  void begin_writing();
  /// The pages that this rank has changed since begin_writing().
  std::vector<Run> changes() const;
  /// Copies these changes of this rank to where all ranks see them.
  void publish(const std::vector<Run>& changes);
  /// Drops what this rank has changed and not published; it sees the shared
  /// values again.
  void end_writing();

  /// Where an unannounced write occurred, in bytes from the beginning; -1:
  /// there was none since the last call. Undoes its effect.
  int64_t take_stray_write();

 private:
  friend bool allow_stray_write(const void* address);
  enum Mode : uint32_t { kReading, kWriting, kStrayed };

  bool map_values(Mode mode) noexcept;

  Descriptor file_;
  std::byte* values_ = nullptr;
  std::byte* writable_ = nullptr;
  size_t size_ = 0;
  const uint32_t fork_generation_;
  Atomic<uint32_t> mode_{kReading};
  Atomic<uint64_t> stray_at_{0};
  SignalSafeList<ModelMemory*>::Entry* entry_ = nullptr;
  const CrashHandlers handlers_;
};

/// Handles a refused write to `address`. If the address is among the values of
/// a model, the write goes on in pages that only this process sees, and is
/// reported to the listener. False: it is another fault. Async-signal-safe.
bool allow_stray_write(const void* address);

/// For a forked child, which has none of the threads that walked the list of
/// memories.
void forget_walkers_of_models();

/// Sets the function that is called, within a signal handler, for each stray
/// write that was let through. Null: such writes are crashes.
void set_stray_write_listener(void (*listener)());

}  // namespace paceline

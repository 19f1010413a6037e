// The one copy of a model's values that all ranks of a host read.
//
// A sealed memfd of its own, so that it outlives the group whose ranks share it
// and is gone with the last tensor in it. Each rank maps it twice:
//
//   values      read-only: where the parameters lie
//   writable    the same pages, for those who own the writes (an optimizer that
//               updates a part on each rank)
//
// So a write through a parameter that nobody has announced meets the processor's
// protection, and not the other ranks' forward. It is undone, and told (see
// `allow_stray_write`).
//
// Announced writes are a transaction. begin_writing() lets this rank write to
// `values`, in pages of its own that the kernel copies as they are written;
// nobody else sees them. When all ranks have ended their part, one of them
// publishes what it has changed, through `writable`; and each calls
// end_writing(), which drops its copies, or drops them without a publication if
// a rank has failed.
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
  /// Pages one after the other, in bytes from the beginning.
  struct Run {
    size_t begin;
    size_t bytes;
  };

  /// Makes the file, if there is memory for it, and returns its descriptor.
  /// Throws Failure{kNoMemory}.
  static int create(size_t bytes);

  /// Maps the file behind `fd`, which stays the caller's. A forked child can
  /// read `values`, and has no `writable`.
  explicit ModelMemory(int fd);
  ~ModelMemory();
  ModelMemory(const ModelMemory&) = delete;
  ModelMemory& operator=(const ModelMemory&) = delete;

  /// Puts memory behind share `index` of `count` equal ones, of the NUMA node
  /// that this thread runs on. Throws Failure{kNoMemory}.
  void reserve_share(size_t index, size_t count);

  std::byte* values() const { return values_; }
  std::byte* writable() const { return writable_; }
  size_t size() const { return size_; }

  /// Throws Failure{kNoMemory}: the address space is full.
  void begin_writing();
  /// What this rank has changed since begin_writing().
  std::vector<Run> changes() const;
  /// Lets everybody see these changes of this rank.
  void publish(const std::vector<Run>& changes);
  /// What this rank has changed is dropped; it sees what everybody sees.
  void end_writing();

  /// Where a write has come that nobody had announced, in bytes from the
  /// beginning; -1: none has since the last call. Its effect is undone.
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

/// A write to `address` was refused: if it lies among the values of a model,
/// let it go on, in pages that only this process sees, and tell. False: it is
/// another fault. Async-signal-safe.
bool allow_stray_write(const void* address);

/// In a forked child, which has none of the threads that looked for memories.
void forget_walkers_of_models();

/// What is called, within a signal handler, when a stray write was let on. Null:
/// such writes are crashes.
void set_stray_write_listener(void (*listener)());

}  // namespace paceline

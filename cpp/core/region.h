// The memory that the processes of a host share: one sealed memfd, which each
// of them maps in full.
//
// The file is sparse and as large as any user could need; only what is reserved
// takes memory. It has no name, so it cannot leak or be squatted, and Docker's
// 64 MB limit on /dev/shm does not apply. The kernel frees it with the last
// process that maps it, whatever killed that process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/descriptor.h"
#include "core/signal_safe_list.h"

namespace paceline {

/// A file, and perhaps its mapping, that a forked child must not keep; see
/// region.cc.
struct ForkedAway {
  Descriptor file;
  std::byte* data;  ///< null: a descriptor without a mapping
  size_t size;
  uint32_t generation;  ///< of the process that owns it
};
using ForkedEntry = SignalSafeList<ForkedAway>::Entry;

/// The page size of this machine: 4 KiB, or 16 or 64 KiB on some Arm and POWER
/// machines.
size_t page_bytes();

class Region {
 public:
  /// Creates the file: `bytes` long, zeroed, sealed against resizing,
  /// close-on-exec, accessible to this user alone. Returns its descriptor.
  static int create(size_t bytes);

  /// Maps the file behind `fd`, which the caller keeps. Core dumps leave it
  /// out. A forked child has nothing to read or write at these addresses, and
  /// no descriptor of the file, which would keep the memory of all ranks.
  explicit Region(int fd);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  /// Throws Failure{kNoMemory} unless this much memory is left. A memfd is
  /// charged to the memory cgroup, where too much causes an OOM kill rather
  /// than an error, so check first.
  static void check_memory(uint64_t bytes);
  /// Reserves memory for [offset, offset + bytes) now, so that a lack of memory
  /// is an error here and not a SIGBUS later. Throws Failure{kNoMemory}.
  void reserve(size_t offset, size_t bytes);
  /// The same for any file, without check_memory().
  static void reserve_in(int fd, size_t offset, size_t bytes);
  /// Frees the memory behind the range. It reads as zeros afterwards and needs
  /// reserve() again.
  void release(size_t offset, size_t bytes);
  /// Gives this process a private copy of [offset, offset + bytes): at the same
  /// addresses, with the same values, no longer shared. `offset` must be at the
  /// start of a page, and the rest of the last page is included. Where the
  /// kernel refuses, the remaining bytes stay shared; never throws.
  void keep_to_itself(size_t offset, size_t bytes) noexcept;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  friend class RegionLock;
  Descriptor file_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  uint32_t fork_generation_ = 0;
  ForkedEntry* entry_ = nullptr;
};

/// A lock on one number of the region's file, held by this process until it
/// ends or runs another program. The kernel then unlocks it, and other
/// processes see that in any pid namespace.
class RegionLock {
 public:
  /// Null: this machine does not support it.
  static std::unique_ptr<RegionLock> take(const Region& region, int number);
  ~RegionLock();
  RegionLock(const RegionLock&) = delete;
  RegionLock& operator=(const RegionLock&) = delete;

  /// Whether any process holds it; true if that cannot be determined.
  static bool is_held(const Region& region, int number);

 private:
  explicit RegionLock(int fd);
  const Descriptor file_;
  const uint32_t fork_generation_;
  ForkedEntry* const entry_;
};

/// Incremented in each forked child: an object that stored another value
/// belongs to the parent.
uint32_t fork_generation();

/// Whether `address` is within a region that an ancestor process had mapped
/// before it forked this one. Async-signal-safe.
bool lies_in_region_of_parent(const void* address);

}  // namespace paceline

// The memory that the processes of a host share: one sealed memfd, mapped whole
// by each of them.
//
// The file is sparse and as large as anybody could want; only what is reserved
// takes memory. It has no name, so nothing can leak or be squatted, and
// Docker's 64 MB limit on /dev/shm does not apply. It goes away with the last
// process that maps it, whatever killed that process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/descriptor.h"
#include "core/signal_safe_list.h"

namespace paceline {

/// What a forked child must not have; see region.cc.
struct ForkedAway {
  Descriptor file;
  std::byte* data;  ///< null: a descriptor alone
  size_t size;
  uint32_t generation;  ///< of the process that has it
};
using ForkedEntry = SignalSafeList<ForkedAway>::Entry;

/// The size of a page of this machine's memory: 4 KiB, or 16 or 64 KiB on some
/// Arm and POWER machines.
size_t page_bytes();

class Region {
 public:
  /// Creates the file: `bytes` long, zeroed, sealed against resizing,
  /// close-on-exec, for this user alone. Returns its descriptor.
  static int create(size_t bytes);

  /// Maps the file behind `fd` (which stays the caller's). Not in core dumps. A
  /// forked child has nothing that it could read or write in its place, and no
  /// descriptor of the file, which would keep everybody's memory.
  explicit Region(int fd);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  /// Throws Failure{kNoMemory} unless this much memory is left. A memfd is
  /// charged to the memory cgroup, where too much is an OOM kill and not an
  /// error: ask first.
  static void check_memory(uint64_t bytes);
  /// Backs [offset, offset + bytes) with memory now, so that the lack of it is
  /// an error here and not a SIGBUS later. Throws Failure{kNoMemory}.
  void reserve(size_t offset, size_t bytes);
  /// The same of any file.
  static void reserve_in(int fd, size_t offset, size_t bytes);
  /// Gives the memory behind the range back; it reads as zeros afterwards and
  /// needs reserve() again.
  void release(size_t offset, size_t bytes);
  /// From now on this process sees [offset, offset + bytes) alone: at the same
  /// addresses, with the values that they hold, in memory of its own. `offset`
  /// begins a page, and the rest of the last page goes along. Where the kernel
  /// refuses, what is left stays shared; never throws.
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

/// A number of the region's file, locked by this process until it ends or runs
/// another program: the kernel unlocks it then, and tells so wherever a pid
/// means something.
class RegionLock {
 public:
  /// Null: this machine does not let us.
  static std::unique_ptr<RegionLock> take(const Region& region, int number);
  ~RegionLock();
  RegionLock(const RegionLock&) = delete;
  RegionLock& operator=(const RegionLock&) = delete;

  /// Whether any process holds it; true where that can't be found out.
  static bool is_held(const Region& region, int number);

 private:
  explicit RegionLock(int fd);
  const Descriptor file_;
  const uint32_t fork_generation_;
  ForkedEntry* const entry_;
};

/// Grows by one in every forked child: an object that remembers another value
/// belongs to the parent.
uint32_t fork_generation();

/// Whether `address` lies where a region of the process was from which this one
/// was forked. Async-signal-safe.
bool lies_in_region_of_parent(const void* address);

}  // namespace paceline

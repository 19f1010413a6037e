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

namespace paceline {

/// Of this machine's memory: 4 KiB, or 16 or 64 on some Arm and POWER machines.
size_t page_bytes();

class Region {
 public:
  /// Creates the file: `bytes` long, zeroed, sealed against resizing,
  /// close-on-exec, for this user alone. Returns its descriptor.
  static int create(size_t bytes);

  /// Maps the file behind `fd` (which stays the caller's). Not inherited by
  /// forks, not in core dumps.
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
  /// Gives the memory behind the range back; it reads as zeros afterwards and
  /// needs reserve() again.
  void release(size_t offset, size_t bytes);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  int fd_ = -1;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  uint32_t fork_generation_ = 0;
};

/// Grows by one in every forked child: an object that remembers another value
/// belongs to the parent.
uint32_t fork_generation();

}  // namespace paceline

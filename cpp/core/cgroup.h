// The memory and processor time that this process's control groups still grant.
//
// A limit may be set at any level: in a container at the root of what it sees,
// under Slurm or systemd in the group that /proc/self/cgroup names or in a
// group above it. So every group from the process's own up to the root is read,
// in both versions of the interface, and the smallest limit counts.
#pragma once

#include <cstdint>
#include <string>

namespace paceline {

struct CgroupLimits {
  /// Bytes that may still be used; UINT64_MAX: no limit. Cached files do not
  /// count as used, because the kernel drops them when the memory is needed.
  uint64_t memory_left = UINT64_MAX;
  /// Cores that the CPU quota amounts to; kNoCoreLimit: no limit.
  double cores = kNoCoreLimit;

  static constexpr double kNoCoreLimit = 1e9;
};

/// Reads `root`/proc and the mount points listed there, also below `root`: a
/// test passes the folder of a simulated machine. A file that cannot be read
/// sets no limit. Takes some 100 us, so it is for rare calls.
CgroupLimits read_cgroup_limits(const std::string& root = "");

}  // namespace paceline

// What the control groups of this process grant: memory and processor time.
//
// A limit may stand at any height: in a container at the root of what it sees,
// under Slurm or systemd in the group that /proc/self/cgroup names or in one
// above it. So every group on the way up is asked, in both versions of the
// interface, and the least answer counts.
#pragma once

#include <cstdint>
#include <string>

namespace paceline {

struct CgroupLimits {
  /// Bytes that may still be used. Cached files do not count as used: they go
  /// when the memory is needed. UINT64_MAX: no limit.
  uint64_t memory_left = UINT64_MAX;
  /// Cores that the quota amounts to; kNoCoreLimit: no limit.
  double cores = kNoCoreLimit;

  static constexpr double kNoCoreLimit = 1e9;
};

/// Reads `root`/proc and the mount points that are named there, below `root`
/// too: a test gives the folder of a simulated machine. What cannot be read is
/// no limit. Takes some 100 us, so it is for rare calls.
CgroupLimits read_cgroup_limits(const std::string& root = "");

}  // namespace paceline

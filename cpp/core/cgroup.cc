#include "core/cgroup.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

namespace paceline {
namespace {

/// Whether `wanted` is one of the names in "memory,cpu,cpuacct".
bool lists(const std::string& names, const std::string& wanted) {
  return ("," + names + ",").find("," + wanted + ",") != std::string::npos;
}

bool begins_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

// Spaces, tabs, line ends and backslashes of a path, which mountinfo writes as
// \040 and so on.
std::string without_escapes(const std::string& text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool is_escape = text[i] == '\\' && text.size() - i > 3 &&
                           text.find_first_not_of("01234567", i + 1) >= i + 4;
    plain +=
        is_escape
            ? static_cast<char>(std::stoi(text.substr(i + 1, 3), nullptr, 8))
            : text[i];
    if (is_escape) i += 3;
  }
  return plain;
}

std::optional<uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;  // "max" and -1 are no numbers here: no limit
  if (file.peek() == '-' || !(file >> value)) return std::nullopt;
  return value;
}

/// A line of /proc/self/mountinfo that mounts control groups.
struct Mount {
  std::string root;   ///< the group that is visible at the mount point
  std::string point;  ///< where
  bool is_v2;
  std::string controllers;  ///< of version 1
};

std::vector<Mount> read_mounts(const std::string& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    // 36 35 98:0 /group /mount/point rw,noatime shared:1 - cgroup cgroup rw,cpu
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream before(line.substr(0, dash));
    std::istringstream after(line.substr(dash + 3));
    std::string skipped, group, point, type, options;
    before >> skipped >> skipped >> skipped >> group >> point;
    after >> type >> skipped >> options;
    if (type != "cgroup" && type != "cgroup2") continue;
    mounts.push_back({without_escapes(group), root + without_escapes(point),
                      type == "cgroup2", options});
  }
  return mounts;
}

/// The group of this process in one hierarchy: version 2, or that of version 1
/// which has `controller`.
std::optional<std::string> own_group(const std::string& root, bool is_v2,
                                     const std::string& controller) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    // 4:cpu,cpuacct:/slurm/job_7, and 0::/system.slice/job in version 2
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    const bool is_it = is_v2 ? line.substr(0, first) == "0" && names.empty()
                             : lists(names, controller);
    if (is_it) return line.substr(second + 1);
  }
  return std::nullopt;
}

/// The folders of this process's group and of all that are above it, as far as
/// they are visible.
std::vector<std::string> folders(const std::string& root,
                                 const std::vector<Mount>& mounts, bool is_v2,
                                 const std::string& controller) {
  std::vector<std::string> found;
  const std::optional<std::string> group = own_group(root, is_v2, controller);
  if (!group) return found;
  for (const Mount& mount : mounts) {
    if (mount.is_v2 != is_v2 ||
        (!is_v2 && !lists(mount.controllers, controller)))
      continue;
    const std::string above = mount.root == "/" ? "" : mount.root;
    const bool is_below = begins_with(*group + "/", above + "/");
    // ".." stands for what is above the root of this cgroup namespace: the way
    // from the mount to the group is unknown, but what is mounted is above it.
    const bool is_hidden =
        begins_with(*group, "/..") || begins_with(mount.root, "/..");
    if (!is_below && !is_hidden) continue;  // another part of the tree
    std::string way = is_hidden ? "" : group->substr(above.size());
    while (!way.empty() && way.back() == '/') way.pop_back();
    while (true) {
      found.push_back(mount.point + way);
      if (way.empty()) break;
      way.resize(way.rfind('/'));
    }
  }
  return found;
}

uint64_t cached_bytes(const std::string& path, std::string_view prefix) {
  std::ifstream file(path);
  uint64_t sum = 0;
  uint64_t bytes = 0;
  for (std::string name; file >> name >> bytes;) {
    if (name == std::string(prefix) + "inactive_file" ||
        name == std::string(prefix) + "active_file")
      sum += bytes;
  }
  return sum;
}

uint64_t memory_left(const std::string& folder, bool is_v2) {
  const auto limit =
      read_number(folder + (is_v2 ? "/memory.max" : "/memory.limit_in_bytes"));
  const auto usage = read_number(
      folder + (is_v2 ? "/memory.current" : "/memory.usage_in_bytes"));
  if (!limit || !usage) return UINT64_MAX;
  // "total_": with the groups below it, as usage_in_bytes counts.
  const uint64_t cached =
      cached_bytes(folder + "/memory.stat", is_v2 ? "" : "total_");
  const uint64_t used = *usage - std::min(cached, *usage);
  return *limit - std::min(used, *limit);
}

double cores(const std::string& folder, bool is_v2) {
  double quota = 0;
  double period = 0;
  if (is_v2) {
    std::ifstream file(folder + "/cpu.max");  // "max 100000": no limit
    file >> quota >> period;
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;  // -1: no limit
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : CgroupLimits::kNoCoreLimit;
}

}  // namespace

CgroupLimits read_cgroup_limits(const std::string& root) {
  const std::vector<Mount> mounts = read_mounts(root);
  CgroupLimits limits;
  for (const bool is_v2 : {true, false}) {
    for (const std::string& each : folders(root, mounts, is_v2, "memory"))
      limits.memory_left =
          std::min(limits.memory_left, memory_left(each, is_v2));
    for (const std::string& each : folders(root, mounts, is_v2, "cpu"))
      limits.cores = std::min(limits.cores, cores(each, is_v2));
  }
  return limits;
}

}  // namespace paceline

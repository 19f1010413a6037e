#include "core/cgroup.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "core/text_file.h"

namespace paceline {
namespace {

/// Whether `wanted` is one of the names in "memory,cpu,cpuacct".
bool lists(std::string_view names, std::string_view wanted) {
  while (true) {
    const size_t comma = names.find(',');
    if (names.substr(0, comma) == wanted) return true;
    if (comma == std::string_view::npos) return false;
    names.remove_prefix(comma + 1);
  }
}

bool begins_with(std::string_view text, std::string_view start) {
  return text.substr(0, start.size()) == start;
}

// Decodes the octal escapes (\040 and so on) with which mountinfo writes
// spaces, tabs, line ends and backslashes.
std::string without_escapes(std::string_view text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool is_escape = text[i] == '\\' && text.size() - i > 3 &&
                           text.find_first_not_of("01234567", i + 1) >= i + 4;
    if (is_escape) {
      plain += static_cast<char>((text[i + 1] - '0') * 64 +
                                 (text[i + 2] - '0') * 8 + text[i + 3] - '0');
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

/// Reads the first word of a file as a number. "max" and -1 are no number: they
/// mean that there is no limit.
std::optional<uint64_t> read_number(const std::string& path) {
  const std::string text = read_text_file(path);
  std::string_view rest = text;
  return parse_natural(take_word(rest));
}

/// A line of /proc/self/mountinfo that mounts control groups.
struct Mount {
  std::string root;   ///< the group that is visible at the mount point
  std::string point;  ///< where it is mounted
  bool is_v2;
  std::string controllers;  ///< of version 1
};

std::vector<Mount> read_mounts(const std::string& root) {
  std::vector<Mount> mounts;
  const std::string text = read_text_file(root + "/proc/self/mountinfo");
  std::string_view lines = text;
  for (std::string_view line; take_line(lines, line);) {
    // 36 35 98:0 /group /mount/point rw,noatime shared:1 - cgroup cgroup rw,cpu
    const size_t dash = line.find(" - ");
    if (dash == std::string_view::npos) continue;
    std::string_view before = line.substr(0, dash);
    std::string_view after = line.substr(dash + 3);
    for (int skipped = 0; skipped < 3; ++skipped) take_word(before);
    const std::string_view group = take_word(before);
    const std::string_view point = take_word(before);
    const std::string_view type = take_word(after);
    take_word(after);
    const std::string_view options = take_word(after);
    if (type != "cgroup" && type != "cgroup2") continue;
    mounts.push_back({without_escapes(group), root + without_escapes(point),
                      type == "cgroup2", std::string(options)});
  }
  return mounts;
}

/// The group of this process in one hierarchy: that of version 2, or the one of
/// version 1 that has `controller`.
std::optional<std::string> own_group(const std::string& root, bool is_v2,
                                     const std::string& controller) {
  const std::string text = read_text_file(root + "/proc/self/cgroup");
  std::string_view lines = text;
  for (std::string_view line; take_line(lines, line);) {
    // 4:cpu,cpuacct:/slurm/job_7, and 0::/system.slice/job in version 2
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string_view::npos || second == std::string_view::npos)
      continue;
    const std::string_view names = line.substr(first + 1, second - first - 1);
    const bool is_it = is_v2 ? line.substr(0, first) == "0" && names.empty()
                             : lists(names, controller);
    if (is_it) return std::string(line.substr(second + 1));
  }
  return std::nullopt;
}

/// The folders of this process's group and of all groups above it that are
/// visible.
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
    // ".." stands for what is above the root of this cgroup namespace: the path
    // from the mount to the group is unknown, but the mounted group is above
    // it.
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

uint64_t cached_bytes(const std::string& path, const std::string& prefix) {
  const std::string text = read_text_file(path);
  std::string_view lines = text;
  uint64_t sum = 0;
  for (std::string_view line; take_line(lines, line);) {
    const std::string_view name = take_word(line);
    if (name == prefix + "inactive_file" || name == prefix + "active_file")
      sum += parse_natural(take_word(line)).value_or(0);
  }
  return sum;
}

uint64_t memory_left(const std::string& folder, bool is_v2) {
  const auto limit =
      read_number(folder + (is_v2 ? "/memory.max" : "/memory.limit_in_bytes"));
  const auto usage = read_number(
      folder + (is_v2 ? "/memory.current" : "/memory.usage_in_bytes"));
  if (!limit || !usage) return UINT64_MAX;
  // "total_" includes the groups below this one, as usage_in_bytes does.
  const uint64_t cached =
      cached_bytes(folder + "/memory.stat", is_v2 ? "" : "total_");
  const uint64_t used = *usage - std::min(cached, *usage);
  return *limit - std::min(used, *limit);
}

double cores(const std::string& folder, bool is_v2) {
  // "max 100000", and -1 in version 1: no limit
  std::string text =
      read_text_file(folder + (is_v2 ? "/cpu.max" : "/cpu.cfs_quota_us"));
  if (!is_v2) {
    text += ' ';
    text += read_text_file(folder + "/cpu.cfs_period_us");
  }
  std::string_view words = text;
  const int64_t quota = parse_integer(take_word(words)).value_or(0);
  const int64_t period = parse_integer(take_word(words)).value_or(0);
  return quota > 0 && period > 0
             ? static_cast<double>(quota) / static_cast<double>(period)
             : CgroupLimits::kNoCoreLimit;
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

// When the ranks of one model reach the ends of their backwards, and how long
// they wait there for each other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace paceline {

struct BackwardTimes {
  explicit BackwardTimes(size_t world)
      : waited_for_ns(world),
        worked_ns(world),
        times_last(world),
        held_up_ns(world),
        recent_ns(world) {}

  /// Adds the sums of a reducer that this one has replaced.
  void add(const BackwardTimes& earlier) {
    waited_ns += earlier.waited_ns;
    backwards += earlier.backwards;
    const auto add_all = [](std::vector<int64_t>& to,
                            const std::vector<int64_t>& from) {
      for (size_t r = 0; r < to.size(); ++r) to[r] += from.at(r);
    };
    add_all(waited_for_ns, earlier.waited_for_ns);
    add_all(worked_ns, earlier.worked_ns);
    add_all(times_last, earlier.times_last);
    add_all(held_up_ns, earlier.held_up_ns);
  }
  /// Call when all ranks have ended a backward. `worked`: how long each has
  /// worked since the previous one. `late_ns`: how much later than the others
  /// the last rank arrived, summed over the others.
  void note(std::span<const int64_t> worked, size_t last, int64_t late_ns) {
    const auto others = std::max<int64_t>(1, std::ssize(worked) - 1);
    for (size_t r = 0; r < worked.size(); ++r) {
      worked_ns[r] += worked[r];
      if (recent_ns[r].size() < kRecent) {
        recent_ns[r].push_back(worked[r]);
      } else {
        recent_ns[r][backwards % kRecent] = worked[r];
      }
    }
    ++backwards;
    ++times_last[last];
    held_up_ns[last] += late_ns / others;
  }

  /// How long this rank has waited in all.
  int64_t waited_ns = 0;
  /// How much of that was for each rank as the last to end its backward. The
  /// rest was for chunks that other ranks reduced, or for the network.
  std::vector<int64_t> waited_for_ns;
  /// The number of backwards in the following sums: those for which it is known
  /// how long every rank has worked.
  uint64_t backwards = 0;
  /// How long each rank worked between the end of a backward and the end of its
  /// next one, without waiting.
  std::vector<int64_t> worked_ns;
  /// The number of backwards in which each rank was the last to end.
  std::vector<int64_t> times_last;
  /// How much later than the others it was then, as the mean over the others.
  std::vector<int64_t> held_up_ns;
  /// Like `worked_ns`, but the single values of the latest backwards of the
  /// reducer in use, in no particular order.
  std::vector<std::vector<int64_t>> recent_ns;

 private:
  static constexpr size_t kRecent = 64;
};

}  // namespace paceline

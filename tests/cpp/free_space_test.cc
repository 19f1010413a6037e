// Free ranges: against a map of single bytes, and the number of comparisons
// that they cost.

#include "collectives/free_space.h"

#include <math.h>

#include <algorithm>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "check.h"

namespace paceline {
namespace {

/// The length of the free range that begins at each byte, or 0.
std::vector<size_t> ranges_of(const std::vector<bool>& is_free) {
  std::vector<size_t> lengths(is_free.size(), 0);
  for (size_t at = 0; at < is_free.size(); ++at) {
    if (!is_free[at] || (at > 0 && is_free[at - 1])) continue;
    while (at + lengths[at] < is_free.size() && is_free[at + lengths[at]])
      ++lengths[at];
  }
  return lengths;
}

TEST(the_smallest_range_that_is_long_enough_is_taken) {
  std::mt19937 random(3);
  std::vector<bool> is_free(3000, false);
  FreeSpace<> space;
  std::fill(is_free.begin() + 100, is_free.end(), true);
  space.give_back(100, is_free.size() - 100);
  std::vector<std::pair<size_t, size_t>> taken;
  for (int call = 0; call < 4000; ++call) {
    const std::vector<size_t> lengths = ranges_of(is_free);
    CHECK_EQ(space.num_ranges(),
             lengths.size() - static_cast<size_t>(std::count(
                                  lengths.begin(), lengths.end(), size_t{0})));
    if (random() % 2 == 0 || taken.empty()) {
      const size_t wanted = random() % 200 + 1;
      std::optional<size_t> best;
      for (size_t at = 0; at < lengths.size(); ++at) {
        if (lengths[at] >= wanted && (!best || lengths[at] < lengths[*best]))
          best = at;
      }
      const std::optional<size_t> found = space.take(wanted);
      CHECK(found == best);
      if (!found) continue;
      for (size_t i = 0; i < wanted; ++i) is_free[*found + i] = false;
      taken.emplace_back(*found, wanted);
    } else {
      std::swap(taken[random() % taken.size()], taken.back());
      const auto [offset, length] = taken.back();
      taken.pop_back();
      for (size_t i = 0; i < length; ++i) is_free[offset + i] = true;
      space.give_back(offset, length);
    }
  }
  for (const auto& [offset, length] : taken) space.give_back(offset, length);
  CHECK_EQ(space.num_ranges(), size_t{1});
  CHECK(space.take(is_free.size() - 100) == size_t{100});
  CHECK(!space.take(1));
}

size_t comparisons = 0;

struct CountingLess {
  using is_transparent = void;
  bool operator()(size_t one, size_t other) const {
    ++comparisons;
    return one < other;
  }
};

/// Comparisons when `count` arrays are allocated, of which every second is
/// freed and allocated again in another size, so that nearly as many ranges are
/// free.
size_t comparisons_of(size_t count) {
  comparisons = 0;
  FreeSpace<CountingLess> space;
  space.give_back(0, count * 4);
  std::vector<size_t> offsets;
  for (size_t i = 0; i < count; ++i) offsets.push_back(*space.take(3));
  for (size_t i = 0; i < count; i += 2) space.give_back(offsets[i], 3);
  CHECK(space.num_ranges() >= count / 2);
  for (size_t i = 0; i < count; i += 2) CHECK(space.take(i % 3 + 1));
  return comparisons;
}

TEST(the_work_grows_hardly_faster_than_the_number_of_arrays) {
  for (const size_t count : {1000u, 4000u, 100000u}) {
    const double most =
        30.0 * static_cast<double>(count) * log2(static_cast<double>(count));
    CHECK(static_cast<double>(comparisons_of(count)) < most);
  }
}

}  // namespace
}  // namespace paceline

// The free ranges of a byte range. Allocating and freeing take logarithmic time
// in the number of free ranges.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace paceline {

/// `Less` compares offsets and lengths; a test counts its calls.
template <class Less = std::less<>>
class FreeSpace {
 public:
  /// Best fit: the smallest free range that is long enough, and the first of
  /// several equal ones. So short-lived arrays do not break up the long ranges.
  std::optional<size_t> take(size_t length) {
    const auto found = by_length_.lower_bound({length, 0});
    if (found == by_length_.end()) return std::nullopt;
    const auto [free_length, offset] = *found;
    by_length_.erase(found);
    by_offset_.erase(offset);
    if (free_length > length) add(offset + length, free_length - length);
    return offset;
  }

  /// Frees a range that was taken, or adds a new one. Adjacent free ranges are
  /// merged.
  void give_back(size_t offset, size_t length) {
    if (length == 0) return;
    const auto after = by_offset_.lower_bound(offset);
    if (after != by_offset_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == offset) {
        offset = before->first;
        length += before->second;
        remove(before);
      }
    }
    if (after != by_offset_.end() && offset + length == after->first) {
      length += after->second;
      remove(after);
    }
    add(offset, length);
  }

  size_t num_ranges() const { return by_offset_.size(); }

 private:
  using Offsets = std::map<size_t, size_t, Less>;  // lengths by offset

  struct LengthLess {
    bool operator()(const std::pair<size_t, size_t>& one,
                    const std::pair<size_t, size_t>& other) const {
      return Less{}(one.first, other.first) ||
             (one.first == other.first && Less{}(one.second, other.second));
    }
  };

  void add(size_t offset, size_t length) {
    by_offset_.emplace(offset, length);
    by_length_.emplace(length, offset);
  }
  void remove(typename Offsets::iterator range) {
    by_length_.erase({range->second, range->first});
    by_offset_.erase(range);
  }

  Offsets by_offset_;
  std::set<std::pair<size_t, size_t>, LengthLess> by_length_;  // and offsets
};

}  // namespace paceline

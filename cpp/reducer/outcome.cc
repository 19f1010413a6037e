// What a finished backward was like; see reducer.h.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/default_floats.h"
#include "reducer/reducer.h"

namespace paceline {

std::vector<size_t> Reducer::unused(int rank) const {
  const uint64_t* bits = unused_bits(rank, finished_backwards_);
  std::vector<size_t> found;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if ((bits[p / 64] >> (p % 64) & 1) != 0) found.push_back(p);
  }
  return found;
}

std::vector<size_t> Reducer::globally_unused() const {
  std::vector<size_t> found;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    bool everywhere = true;
    for (int r = 0; r < session_.world() && everywhere; ++r) {
      if (BackwardStatus::unpack(header(r, finished_backwards_).status)
              .finished)
        continue;
      everywhere =
          (unused_bits(r, finished_backwards_)[p / 64] >> (p % 64) & 1) != 0;
    }
    if (everywhere) found.push_back(p);
  }
  return found;
}

std::vector<std::vector<int64_t>> Reducer::worked_ns() const {
  const auto count = static_cast<ptrdiff_t>(
      std::min<uint64_t>(worked_backwards_, kWorkedBackwards));
  std::vector<std::vector<int64_t>> found;
  for (size_t r = 0; r < waited_for_ns_.size(); ++r) {
    const auto first =
        worked_.begin() + static_cast<ptrdiff_t>(r * kWorkedBackwards);
    found.emplace_back(first, first + count);
  }
  return found;
}

std::vector<BackwardStatus> Reducer::statuses() const {
  std::vector<BackwardStatus> found;
  for (int r = 0; r < session_.world(); ++r)
    found.push_back(
        BackwardStatus::unpack(header(r, finished_backwards_).status));
  return found;
}

std::vector<uint32_t> Reducer::notes_by_rank() const {
  std::vector<uint32_t> found;
  for (int r = 0; r < session_.world(); ++r)
    found.push_back(header(r, finished_backwards_).note);
  return found;
}

std::vector<int> Reducer::waiting_ranks() const {
  const uint64_t next = finished_backwards_ + 1;
  std::vector<int> found;
  if (closed_ || session_.is_closed()) return found;
  for (int r = 0; r < session_.world(); ++r) {
    const uint64_t stage =
        header(r, next).stage.load(std::memory_order_relaxed);
    if (r != session_.rank() && stage == next * 4 + kEnded) found.push_back(r);
  }
  return found;
}

std::vector<std::pair<int, size_t>> Reducer::nonfinite() const {
  std::vector<std::pair<int, size_t>> found;
  if (finished_backwards_ == 0 || has_no_means_ ||
      control().nonfinite_backward.load(std::memory_order_relaxed) !=
          finished_backwards_)
    return found;
  const SegmentStats* table = stats(finished_backwards_);
  for (const uint32_t s : segments_in_order_) {
    for (int r = 0; r < session_.world(); ++r) {
      if ((table[s].nonfinite_ranks[r / 64] >> (r % 64) & 1) == 0) continue;
      const std::pair<int, size_t> pair{r, segments_[s].parameter};
      if (std::find(found.begin(), found.end(), pair) == found.end())
        found.push_back(pair);
    }
  }
  return found;
}

std::vector<size_t> Reducer::overflowed() const {
  std::vector<size_t> found;
  if (finished_backwards_ == 0 || has_no_means_ ||
      control().overflow_backward.load(std::memory_order_relaxed) !=
          finished_backwards_)
    return found;
  const SegmentStats* table = stats(finished_backwards_);
  for (const uint32_t s : segments_in_order_) {
    const uint32_t parameter = segments_[s].parameter;
    if (table[s].has_overflowed != 0 &&
        (found.empty() || found.back() != parameter))
      found.push_back(parameter);
  }
  return found;
}

double Reducer::squared_norm() const {
  if (has_no_means_) return std::numeric_limits<double>::quiet_NaN();
  if (finished_backwards_ == 0) return 0;
  const DefaultFloats default_floats;
  return sum_squared_norms(stats(finished_backwards_));
}

// Not inlined: see DefaultFloats.
[[gnu::noinline]] double Reducer::sum_squared_norms(
    const SegmentStats* table) const {
  double sum = 0;
  for (const uint32_t s : segments_in_order_) sum += table[s].squared_norm;
  return sum;
}

}  // namespace paceline

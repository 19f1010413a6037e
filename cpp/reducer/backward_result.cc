// Queries after a finished backward; see reducer.h.
#include <array>
#include <bit>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/default_floats.h"
#include "reducer/reducer.h"

namespace paceline {

BackwardResult Reducer::result() const {
  BackwardResult result;
  result.outcome = outcome_;
  result.is_void = has_no_means_;
  result.overlapping = overlapping_;
  result.first_bucket_ns = first_bucket_ns_;
  result.ranks.reserve(static_cast<size_t>(session_.world()));
  for (int r = 0; r < session_.world(); ++r) {
    const BackwardHeader& theirs = header(r, finished_backwards_);
    result.ranks.push_back({theirs.status, theirs.note});
  }
  constexpr uint32_t kLeftOut =
      kBackwardUnused | kBackwardGloballyUnused | kBackwardFinished;
  if ((outcome_ & kLeftOut) != 0) find_unused(result);
  constexpr uint32_t kBad = kBackwardNonFinite | kBackwardOverflow;
  if ((outcome_ & kBad) != 0) find_nonfinite(result);
  return result;
}

void Reducer::find_unused(BackwardResult& result) const {
  result.unused.resize(result.ranks.size());
  for (int r = 0; r < session_.world(); ++r) {
    const uint64_t* bits = unused_bits(r, finished_backwards_);
    auto& found = result.unused[static_cast<size_t>(r)];
    for (size_t word = 0; word < unused_words_; ++word) {
      for (uint64_t rest = bits[word]; rest != 0; rest &= rest - 1)
        found.push_back(word * 64 +
                        static_cast<size_t>(std::countr_zero(rest)));
    }
  }
  result.globally_unused = result.unused_by_all(parameters_.size());
}

void Reducer::find_nonfinite(BackwardResult& result) const {
  const SegmentStats* table = stats(finished_backwards_);
  const auto saw = [&](uint32_t flag) { return (outcome_ & flag) != 0; };
  for (size_t p = 0; p < parameters_.size(); ++p) {
    std::array<uint64_t, 2> ranks{};
    bool has_overflowed = false;
    for (uint32_t i = parameters_[p].first_segment;
         i < parameters_[p].end_segment; ++i) {
      const SegmentStats& each = table[segments_in_order_[i]];
      ranks[0] |= each.nonfinite_ranks[0];
      ranks[1] |= each.nonfinite_ranks[1];
      has_overflowed = has_overflowed || each.has_overflowed != 0;
    }
    for (int r = 0; saw(kBackwardNonFinite) && r < session_.world(); ++r) {
      if ((ranks[static_cast<size_t>(r / 64)] >> (r % 64) & 1) != 0)
        result.nonfinite.emplace_back(r, p);
    }
    if (saw(kBackwardOverflow) && has_overflowed)
      result.overflowed.push_back(p);
  }
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

#include "reducer/backward_reports.h"

#include <algorithm>
#include <limits>

#include "reducer/reducer.h"

namespace paceline {

BackwardReports::BackwardReports(size_t world)
    : weights_(world, 1.0), waited_for_ns_(world), worked_(world) {
  arrivals_.worked_ns.resize(world);
  arrivals_.times_last.resize(world);
  arrivals_.held_up_ns.resize(world);
}

void BackwardReports::end_backward(int64_t now_ns) {
  own_us_ = 0;
  if (over_ns_ == 0) return;
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  own_us_ = static_cast<uint32_t>(
      std::clamp<int64_t>((now_ns - over_ns_ + 500) / 1000, 1, kMost));
}

int BackwardReports::end_averaging(int64_t now_ns, int64_t waited_ns) {
  over_ns_ = now_ns;
  const size_t world = reports_.size();
  size_t last = 0;
  int64_t sum_us = 0;
  bool is_known = own_us_ != 0 && world == worked_.size();
  for (size_t r = 0; r < world; ++r) {
    const uint32_t worked_us = reports_[r].worked_us;
    is_known = is_known && worked_us != 0;
    sum_us += worked_us;
    if (worked_us > reports_[last].worked_us) last = r;
  }
  if (!is_known) return -1;  // in the first backward nobody knows
  const size_t place = arrivals_.backwards % kWorkedBackwards;
  for (size_t r = 0; r < world; ++r) {
    const int64_t worked_ns = int64_t{reports_[r].worked_us} * 1000;
    worked_[r][place] = worked_ns;
    arrivals_.worked_ns[r] += worked_ns;
  }
  const int64_t longest_us = reports_[last].worked_us;
  const int64_t late_us = (static_cast<int64_t>(world) * longest_us - sum_us) /
                          std::max<int64_t>(1, static_cast<int64_t>(world) - 1);
  ++arrivals_.backwards;
  ++arrivals_.times_last[last];
  arrivals_.held_up_ns[last] += late_us * 1000;
  const int64_t behind_ns = (longest_us - int64_t{own_us_}) * 1000;
  waited_for_ns_[last] += std::max<int64_t>(0, std::min(behind_ns, waited_ns));
  return static_cast<int>(last);
}

std::vector<size_t> BackwardReports::unknown_peers(uint32_t identity) const {
  std::vector<size_t> found;
  for (size_t r = 0; r < reports_.size(); ++r) {
    if (reports_[r].identity != identity) found.push_back(r);
  }
  return found;
}

bool BackwardReports::counts_any() const {
  return std::ranges::any_of(reports_, [](const RankReport& each) {
    return (each.unused | each.nonfinite | each.overflowed) != 0;
  });
}

bool BackwardReports::counts_nonfinite() const {
  return std::ranges::any_of(
      reports_, [](const RankReport& each) { return each.nonfinite != 0; });
}

bool BackwardReports::refuses_unused() const {
  return std::ranges::any_of(reports_, [](const RankReport& each) {
    return each.refuses_unused != 0;
  });
}

uint32_t BackwardReports::outcome() const {
  uint32_t outcome = 0;
  uint32_t note = 0;
  uint32_t difference = BackwardStatus::kNone;
  const RankReport* first = nullptr;  // with data
  for (const RankReport& each : reports_) {
    if (each.unused != 0) outcome |= kBackwardUnused;
    if (note != 0 && each.note != 0 && each.note != note)
      outcome |= kBackwardNotesDiffer;
    if (each.note != 0) note = each.note;
    const BackwardStatus status = BackwardStatus::unpack(each.word);
    if (status.finished) {
      outcome |= kBackwardFinished;
      continue;
    }
    if (!status.is_plain()) outcome |= kBackwardTold;
    if (first == nullptr) first = &each;
    difference |= status.interrupted
                      ? BackwardStatus::kInBoth
                      : BackwardStatus::difference(first->word, each.word);
  }
  if (difference == BackwardStatus::kInBoth) outcome |= kBackwardForwardsDiffer;
  return outcome;
}

double BackwardReports::largest_weight() const {
  double largest = 0;
  for (const RankReport& each : reports_)
    largest = std::max(largest, each.weight);
  return largest;
}

bool BackwardReports::take_new_weights() {
  bool are_new = weights_.size() != reports_.size();
  weights_.resize(reports_.size());
  for (size_t r = 0; r < reports_.size(); ++r) {
    are_new = are_new || weights_[r] != reports_[r].weight;
    weights_[r] = reports_[r].weight;
  }
  return are_new;
}

std::vector<std::vector<int64_t>> BackwardReports::worked_ns() const {
  const size_t count = std::min<size_t>(arrivals_.backwards, kWorkedBackwards);
  std::vector<std::vector<int64_t>> found;
  for (const auto& row : worked_)
    found.emplace_back(row.begin(),
                       row.begin() + static_cast<ptrdiff_t>(count));
  return found;
}

}  // namespace paceline

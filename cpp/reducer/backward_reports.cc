#include "reducer/backward_reports.h"

#include <algorithm>
#include <limits>

#include "reducer/reducer.h"

namespace paceline {

BackwardReports::BackwardReports(size_t world)
    : weights_(world, 1.0), times_(world) {}

void BackwardReports::end_backward(int64_t now_ns) {
  own_us_ = 0;
  if (over_ns_ == 0) return;
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  own_us_ = static_cast<uint32_t>(
      std::clamp<int64_t>((now_ns - over_ns_ + 500) / 1000, 1, kMost));
}

int BackwardReports::end_averaging(int64_t now_ns, int64_t waited_ns) {
  over_ns_ = now_ns;
  times_.waited_ns += waited_ns;
  const size_t world = reports_.size();
  std::vector<int64_t> worked_ns;
  worked_ns.reserve(world);
  size_t last = 0;
  int64_t sum_ns = 0;
  bool is_known = own_us_ != 0 && world == times_.worked_ns.size();
  for (const RankReport& each : reports_) {
    is_known = is_known && each.worked_us != 0;
    sum_ns += worked_ns.emplace_back(int64_t{each.worked_us} * 1000);
    if (worked_ns.back() > worked_ns[last]) last = worked_ns.size() - 1;
  }
  if (!is_known) return -1;  // unknown in the first backward
  const int64_t longest_ns = worked_ns[last];
  times_.note(worked_ns, last,
              static_cast<int64_t>(world) * longest_ns - sum_ns);
  const int64_t behind_ns = longest_ns - int64_t{own_us_} * 1000;
  times_.waited_for_ns[last] +=
      std::max<int64_t>(0, std::min(behind_ns, waited_ns));
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
  const RankReport* first = nullptr;  // first rank with data
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
    if (!status.is_plain()) outcome |= kBackwardReported;
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

BackwardResult BackwardReports::result(std::vector<std::vector<size_t>> unused,
                                       size_t parameters) const {
  BackwardResult result;
  result.outcome = outcome();
  for (const RankReport& each : reports_)
    result.ranks.push_back({each.word, each.note});
  result.unused = std::move(unused);
  if ((result.outcome & (kBackwardUnused | kBackwardFinished)) != 0)
    result.globally_unused = result.unused_by_all(parameters);
  return result;
}

}  // namespace paceline

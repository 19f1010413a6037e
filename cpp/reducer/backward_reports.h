// What the ranks report to each other at the end of a backward if no memory is
// shared by all ranks, and the conclusions from all reports, which are the same
// on every rank.
//
// Each rank packs its own report. The caller exchanges them and passes in those
// of all ranks, and the outcome is a function of these. Ranks that share memory
// do the same there (end_of_backward.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "reducer/backward_result.h"
#include "reducer/backward_status.h"
#include "reducer/backward_times.h"

namespace paceline {

/// One rank's report of its backward, as sent to the other ranks.
struct RankReport {
  double weight = 1;  ///< of its gradients
  uint64_t word = 0;  ///< BackwardStatus::pack()
  /// Digest of the calls that it has made; see CallOrder.
  uint32_t identity = 0;
  /// Number of parameters that it left without a gradient.
  uint32_t unused = 0;
  /// Number of gradients that it found to be not finite.
  uint32_t nonfinite = 0;
  /// Number of parameters whose sum it found to be not finite.
  uint32_t overflowed = 0;
  uint32_t note = 0;  ///< its note, compared between ranks; 0: none
  /// Whether it left any without a gradient against its settings.
  uint32_t refuses_unused = 0;
  /// How long it has worked since the previous backward; 0: there was none.
  uint32_t worked_us = 0;
  uint32_t padding = 0;
};

class BackwardReports {
 public:
  explicit BackwardReports(size_t world);

  /// Call when this rank has all its gradients.
  void end_backward(int64_t now_ns);
  /// Completes this rank's report.
  void finish(RankReport& own) const { own.worked_us = own_us_; }
  /// Takes the reports of all ranks, by rank.
  void read(std::vector<RankReport> reports) { reports_ = std::move(reports); }
  /// Call when all ranks have reported. Returns the rank that arrived last, or
  /// -1 if that is unknown because a rank does not report how long it has
  /// worked. `waited_ns`: how long this rank has waited for the others.
  ///
  /// Example: of two ranks, this one has worked for 3 ms and then waited for 8,
  /// and the other one has worked for 10. This rank has waited for the other
  /// one for 7 ms, and for the network for 1 ms.
  int end_averaging(int64_t now_ns, int64_t waited_ns);

  /// Empty before the first backward.
  const std::vector<RankReport>& all() const { return reports_; }
  /// The ranks that have made other calls.
  std::vector<size_t> unknown_peers(uint32_t identity) const;
  /// Whether a rank counts parameters that are unused or not finite.
  bool counts_any() const;
  /// Whether a rank counts gradients that are not finite.
  bool counts_nonfinite() const;
  /// Whether a rank left parameters without a gradient and did not allow that.
  /// The settings of this rank do not matter: a rank without data has none to
  /// apply.
  bool refuses_unused() const;
  /// The kBackward... flags that follow from the statuses, the notes and the
  /// counts of unused parameters.
  uint32_t outcome() const;
  double largest_weight() const;
  /// Whether the ranks' weights differ from those at the last call; before the
  /// first call, all are 1.
  bool take_new_weights();

  /// The times of all backwards so far.
  BackwardTimes& times() { return times_; }
  /// The result of the backward according to the reports. `unused`: for each
  /// rank, the indices that it did not mark among `parameters` parameters.
  BackwardResult result(std::vector<std::vector<size_t>> unused,
                        size_t parameters) const;

 private:
  std::vector<RankReport> reports_;
  std::vector<double> weights_;  ///< at the last take_new_weights()
  uint32_t own_us_ = 0;
  int64_t over_ns_ = 0;
  BackwardTimes times_;
};

}  // namespace paceline

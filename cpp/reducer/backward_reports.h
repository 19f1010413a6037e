// What the ranks report to each other at the end of a backward that no memory
// of all ranks carries, and what follows from all reports: the same on every
// rank.
//
// A rank packs its own report, whoever moves the bytes hands in those of all
// ranks, and the verdict is a function of these. Ranks that share memory do the
// same there (ending.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "reducer/backward_result.h"
#include "reducer/backward_status.h"
#include "reducer/backward_times.h"

namespace paceline {

/// What one rank says of its backward, as it travels.
struct RankReport {
  double weight = 1;            ///< of its gradients
  uint64_t word = 0;            ///< BackwardStatus::pack()
  uint32_t identity = 0;        ///< what it has called; see CallOrder
  uint32_t unused = 0;          ///< parameters that it left without a gradient
  uint32_t nonfinite = 0;       ///< gradients that it found to be not finite
  uint32_t overflowed = 0;      ///< parameters whose sum it found to be so
  uint32_t note = 0;            ///< what it tells of itself; 0: nothing
  uint32_t refuses_unused = 0;  ///< whether it left any and did not allow it
  /// How long it has worked since the backward before; 0: there was none.
  uint32_t worked_us = 0;
  uint32_t padding = 0;
};

class BackwardReports {
 public:
  explicit BackwardReports(size_t world);

  /// This rank has all its gradients now.
  void end_backward(int64_t now_ns);
  /// Completes this rank's report.
  void finish(RankReport& own) const { own.worked_us = own_us_; }
  /// Takes the reports of all ranks, by rank.
  void read(std::vector<RankReport> reports) { reports_ = std::move(reports); }
  /// All ranks have reported. Returns the rank that came last, or -1: that is
  /// not known, because some rank does not say how long it has worked.
  /// `waited_ns`: how long this rank has waited for the others.
  ///
  /// Of two ranks this one has worked for 3 ms and then waited for 8, and the
  /// other one has worked for 10: it has waited for 7 ms for that one, and for
  /// 1 ms for the network.
  int end_averaging(int64_t now_ns, int64_t waited_ns);

  /// None before the first backward.
  const std::vector<RankReport>& all() const { return reports_; }
  /// Ranks that have called something else.
  std::vector<size_t> unknown_peers(uint32_t identity) const;
  /// Whether some rank counts parameters that are unused or not finite.
  bool counts_any() const;
  /// Whether some rank counts gradients that are not finite.
  bool counts_nonfinite() const;
  /// Whether some rank left parameters without a gradient, and did not allow
  /// it. Not by what this rank allows: one without data has nothing to allow.
  bool refuses_unused() const;
  /// kBackward...: what the statuses, the notes and the counts of unused
  /// parameters come to.
  uint32_t outcome() const;
  double largest_weight() const;
  /// Whether the ranks weigh other than when this was asked last; 1 each before
  /// that.
  bool take_new_weights();

  /// Of the backward passes so far.
  BackwardTimes& times() { return times_; }
  /// What the backward has come to, by what the reports tell. `unused`: the
  /// parameters, of so many, that each rank did not mark.
  BackwardResult result(std::vector<std::vector<size_t>> unused,
                        size_t parameters) const;

 private:
  std::vector<RankReport> reports_;
  std::vector<double> weights_;  ///< when they were asked for last
  uint32_t own_us_ = 0;
  int64_t over_ns_ = 0;
  BackwardTimes times_;
};

}  // namespace paceline

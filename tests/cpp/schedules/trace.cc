// The trace that is printed with a finding.
#include <algorithm>
#include <cstdio>
#include <fstream>

#include "scheduler.h"

namespace paceline::schedules {
namespace {

std::string source_line(const std::source_location& where) {
  std::ifstream file(where.file_name());
  std::string line;
  for (unsigned i = 0; i < where.line() && std::getline(file, line); ++i) {
  }
  const size_t begin = line.find_first_not_of(' ');
  return begin == std::string::npos ? "" : line.substr(begin);
}

}  // namespace

std::string Scheduler::stand() const {
  std::string all;
  for (const auto& fiber : fibers_) {
    if (fiber->state == Fiber::State::kEnded) continue;
    all += (all.empty() ? "" : ", ") + fiber->name +
           (fiber->is_killed    ? " is dead"
            : fiber->is_stopped ? " is stopped"
            : fiber->state == Fiber::State::kBlocked
                ? std::string(" waits for ") + fiber->waits_for
                : " runs");
  }
  return all;
}

void Scheduler::print_trace(size_t most) const {
  const size_t count = std::min({most, num_recorded_, kTraceSteps});
  for (size_t i = num_recorded_ - count; i < num_recorded_; ++i) {
    const Step& step = trace_[i % kTraceSteps];
    const std::string file =
        step.has_place ? step.where.file_name() : std::string();
    std::printf("%7zu  %-14s %-10s %#6llx", i, step.fiber->name.c_str(),
                step.what, static_cast<unsigned long long>(step.value));
    if (step.has_place) {
      std::printf("  %s:%u  %s", file.substr(file.rfind('/') + 1).c_str(),
                  step.where.line(), source_line(step.where).c_str());
    }
    std::printf("\n");
  }
}

}  // namespace paceline::schedules

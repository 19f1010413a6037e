// Events that come from outside of the ranks: deaths, stops, and how they end.
#include <algorithm>

#include "kernel.h"
#include "memory.h"
#include "scheduler.h"

namespace paceline::schedules {

void Scheduler::plan_events() {
  const LastingMemory lasting;
  for (int i = 0; i + 1 < kDepth; ++i)
    change_points_.push_back(1 + random_.below(expected_steps_));
  std::sort(change_points_.begin(), change_points_.end());
  for (int i = 0; i < events_.deaths + events_.stops; ++i)
    strikes_.push_back(
        {1 + random_.below(expected_steps_), i < events_.deaths});
  std::sort(
      strikes_.begin(), strikes_.end(),
      [](const Strike& a, const Strike& b) { return a.at_step < b.at_step; });
}

void Scheduler::strike(bool kills) {
  std::vector<int> left;
  for (const auto& fiber : fibers_) {
    if (fiber->is_main && !fiber->is_killed && !fiber->is_stopped &&
        fiber->state != Fiber::State::kEnded)
      left.push_back(fiber->rank);
  }
  if (left.size() < 2) return;  // a rank must remain to see it
  const int victim = left[random_.below(left.size())];
  kills ? kill(victim) : stop(victim);
}

void Scheduler::kill(int victim) {
  record({current_,
          "is interrupted: killed is rank",
          nullptr,
          static_cast<uint64_t>(victim),
          {},
          false});
  died_ |= 1u << victim;
  for (const auto& fiber : fibers_)
    if (fiber->rank == victim && !fiber->is_event) fiber->is_killed = true;
  wake_who_is_done();
  // The kernel takes some time until it marks the threads' words.
  spawn("end of rank " + std::to_string(victim), victim, [victim] {
    end_threads_of(victim);
  }).is_event = true;
}

void Scheduler::stop(int victim) {
  record({current_,
          "is interrupted: stopped is rank",
          nullptr,
          static_cast<uint64_t>(victim),
          {},
          false});
  stopped_ |= 1u << victim;
  for (const auto& fiber : fibers_)
    if (fiber->rank == victim && !fiber->is_event) fiber->is_stopped = true;
  if (continues_late_ < 0 && random_.one_in(2)) {
    continues_late_ = victim;
    return;
  }
  spawn("who continues rank " + std::to_string(victim), victim, [this, victim] {
    step("is awake", 0);
    let_continue(victim);
  }).is_event = true;
}

void Scheduler::let_continue(int victim) {
  record({current_,
          "sees continued rank",
          nullptr,
          static_cast<uint64_t>(victim),
          {},
          false});
  for (const auto& fiber : fibers_)
    if (fiber->rank == victim) fiber->is_stopped = false;
}

}  // namespace paceline::schedules

#include "world.h"

#include <stdlib.h>

namespace paceline::schedules {

std::vector<Program> all_programs() {
  std::vector<Program> programs;
  add_reducer_programs(programs);
  add_collective_programs(programs);
  add_host_programs(programs);
  return programs;
}

void warm_up() {
  // Signals are not simulated.
  setenv("PACELINE_CRASH_HANDLERS", "0", 1);
  World world(1);
  scheduler().run(
      1,
      [&](int rank) {
        HostGroup group(world.region(), rank, kNonce, {});
        group.session.join();
      },
      {}, 1);
  keep_memory();
}

std::string no_rank_raises(const Run& run) {
  for (size_t r = 0; r < run.outcomes.size(); ++r) {
    if (!run.outcomes[r].has_raised) continue;
    return "rank " + std::to_string(r) + " raised reason " +
           std::to_string(static_cast<int>(run.outcomes[r].reason));
  }
  return "";
}

std::string all_agree(const Run& run) {
  for (size_t r = 0; r < run.outcomes.size(); ++r) {
    // One is allowed: it looked just before the end of the group.
    if (run.outcomes[r].late_claims > 1) {
      return "rank " + std::to_string(r) + " claimed " +
             std::to_string(run.outcomes[r].late_claims) +
             " chunks after the end of the group";
    }
  }
  std::string backwards;
  int least = INT32_MAX;
  int most = 0;
  for (size_t r = 0; r < run.outcomes.size(); ++r) {
    if (scheduler().has_died(static_cast<int>(r))) continue;
    const int good = run.outcomes[r].good_backwards;
    least = std::min(least, good);
    most = std::max(most, good);
    backwards += (backwards.empty() ? "rank " : ", rank ") + std::to_string(r) +
                 " " + std::to_string(good);
  }
  return least == most
             ? ""
             : "survivors disagree how many backwards were good: " + backwards;
}

}  // namespace paceline::schedules

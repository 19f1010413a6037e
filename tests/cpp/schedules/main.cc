// schedules [COUNT [FIRST_SEED [PROGRAM]]]: runs COUNT schedules, shared among
// the programs whose name contains PROGRAM, and prints a table. A finding ends
// its program, with the last steps that led to it.
//
// schedules --replay SEED EXPECTED_STEPS PROGRAM: the schedule of a finding
// again, with all its steps.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "world.h"

namespace paceline::schedules {
namespace {

constexpr size_t kStepsShown = 40;

std::string run_once(const Program& program, World& world, uint64_t seed) {
  world.renew();
  Run run{world, seed,
          std::vector<Outcome>(static_cast<size_t>(program.ranks))};
  scheduler().at_point = [&](Point point) {
    const auto rank = static_cast<size_t>(scheduler().rank());
    if (point == Point::kChunkClaimed && world.is_over())
      ++run.outcomes[rank].late_claims;
  };
  std::string finding = scheduler().run(
      program.ranks,
      [&](int rank) {
        Outcome& outcome = run.outcomes[static_cast<size_t>(rank)];
        try {
          program.body(run, rank);
          outcome.returned = true;
        } catch (const Failure& failure) {
          outcome.has_raised = true;
          outcome.reason = failure.reason;
        }
      },
      program.events, seed);
  return finding.empty() ? program.judge(run) : finding;
}

struct Result {
  uint64_t schedules = 0;
  double steps = 0;
  double seconds = 0;
  bool found = false;
};

Result explore(const Program& program, uint64_t count, uint64_t first_seed) {
  World world(program.ranks);
  Result result;
  const auto start = std::chrono::steady_clock::now();
  double expected = 500;
  for (uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    scheduler().expect_steps(static_cast<size_t>(expected) + 1);
    const std::string finding = run_once(program, world, seed);
    ++result.schedules;
    const auto steps = static_cast<double>(scheduler().steps());
    result.steps += steps;
    expected += (steps - expected) / 32;
    if (finding.empty()) continue;
    result.found = true;
    std::printf("%s, seed %llu, expected steps %zu: %s\n", program.name,
                static_cast<unsigned long long>(seed),
                scheduler().expected_steps(), finding.c_str());
    scheduler().print_trace(kStepsShown);
    break;
  }
  result.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
          .count();
  return result;
}

int explore_all(uint64_t count, uint64_t first_seed, const std::string& name) {
  std::vector<Program> programs = all_programs();
  std::erase_if(programs, [&](const Program& program) {
    return std::string(program.name).find(name) == std::string::npos;
  });
  bool found = programs.empty();
  std::printf("%-50s %9s %8s %8s  %s\n", "program", "schedules", "steps",
              "seconds", "findings");
  for (const Program& program : programs) {
    const Result result = explore(
        program, std::max<uint64_t>(1, count / programs.size()), first_seed);
    std::printf("%-50s %9llu %8.0f %8.1f  %s\n", program.name,
                static_cast<unsigned long long>(result.schedules),
                result.steps / static_cast<double>(result.schedules),
                result.seconds, result.found ? "1" : "none");
    std::fflush(stdout);
    found = found || result.found;
  }
  return found ? 1 : 0;
}

// As a finding is printed: its seed, and how many steps were expected.
int replay(uint64_t seed, uint64_t expected_steps, const std::string& name) {
  for (const Program& program : all_programs()) {
    if (name != program.name) continue;
    World world(program.ranks);
    scheduler().expect_steps(expected_steps);
    const std::string finding = run_once(program, world, seed);
    scheduler().print_trace(SIZE_MAX);
    std::printf("%s\n",
                finding.empty() ? "nothing was found" : finding.c_str());
    return finding.empty() ? 0 : 1;
  }
  std::printf("no program \"%s\"\n", name.c_str());
  return 2;
}

}  // namespace
}  // namespace paceline::schedules

int main(int count, char** arguments) {
  using namespace paceline::schedules;
  const auto number = [&](int index, uint64_t otherwise) {
    return index < count ? std::strtoull(arguments[index], nullptr, 10)
                         : otherwise;
  };
  warm_up();
  if (count == 5 && std::string(arguments[1]) == "--replay")
    return replay(number(2, 0), number(3, 0), arguments[4]);
  return explore_all(number(1, 10'000), number(2, 1),
                     count > 3 ? arguments[3] : "");
}

// Backwards that a rank does not survive: deaths at every step, and the errors
// of the others.

#include <math.h>
#include <sched.h>

#include <atomic>
#include <random>

#include "check.h"
#include "core/faults.h"
#include "group_world.h"
#include "reducer/reducer.h"
#include "reducer_model.h"

namespace paceline {
namespace {

using testing::failure_of;
using testing::kParameters;
using testing::Model;
using testing::run_group;

TEST(a_death_at_every_step_of_a_backward) {
  constexpr Point kPoints[] = {Point::kMarkReady,    Point::kBeforePost,
                               Point::kAfterPost,    Point::kChunkClaimed,
                               Point::kChunkReduced, Point::kBeforeEnd,
                               Point::kAfterEnd};
  for (const Point point : kPoints) {
    // The kernel announces the death, which ThreadSanitizer does not see:
    // without this the victim's last chunk and the survivor's next backward
    // look like a race.
    std::atomic<bool> is_dying{false};
    run_group(2, [&](HostGroup& group) {
      Model model(group, 50'000);
      const auto backward = [&](int step) {
        for (size_t p = 0; p < kParameters; ++p) model.mark(p, step);
        model.reducer().finish(1, false);
      };
      backward(0);
      if (group.rank() == 1) {
        arm_fault(point, FaultAction::kRaise, 1);
        // Timing decides which rank gets a chunk: this one gets its first when
        // the other has no others left.
        const Failure injected = failure_of([&] {
          for (int step = 1;; ++step) backward(step);
        });
        disarm_fault();
        CHECK_EQ(injected.reason, Reason::kInjected);
        is_dying.store(true, std::memory_order_release);
        return group.session.die_for_test();
      }
      const Failure failure = failure_of([&] {
        for (int step = 1;; ++step) backward(step);
      });
      CHECK(is_dying.load(std::memory_order_acquire));
      CHECK_EQ(failure.reason, Reason::kDied);
      CHECK_EQ(failure.culprit, 1);
      CHECK_EQ(failure_of([&] { backward(99); }).reason, Reason::kDied);
    });
  }
}

// The last chunk and the end of the group come at any distance from each other:
// if one rank raises, all raise, and if one finds the backward good, all do.
TEST(survivors_agree_on_the_last_good_backward) {
  constexpr int kRanks = 3;
  for (unsigned round = 0; round < 60; ++round) {
    std::atomic<int> good[kRanks] = {};
    run_group(kRanks,
              [&](HostGroup& group) {
                Model model(group, 50'000);
                std::mt19937 own(round * kRanks +
                                 static_cast<unsigned>(group.rank()));
                const auto backward = [&](int step) {
                  for (size_t p = 0; p < kParameters; ++p) {
                    for (unsigned i = own() % 200; i > 0; --i) cpu_relax();
                    model.mark(p, step);
                  }
                  model.reducer().finish(1, false);
                  ++good[group.rank()];
                };
                // Rank 2 ends the group at some moment of the others'
                // backwards.
                if (group.rank() == 2) {
                  for (int step = 0; step < 3; ++step) backward(step);
                  constexpr Point kPoints[] = {
                      Point::kAfterPost, Point::kBeforeEnd, Point::kAfterEnd};
                  arm_fault(kPoints[round % 3], FaultAction::kRaise,
                            1 + round % 4);
                  failure_of([&] {
                    for (int step = 3;; ++step) backward(step);
                  });
                  disarm_fault();
                  for (unsigned i = own() % 3000; i > 0; --i) cpu_relax();
                  group.session.abort("so it ends");
                  return;
                }
                const Failure failure = failure_of([&] {
                  for (int step = 0;; ++step) backward(step);
                });
                CHECK_EQ(failure.reason, Reason::kRaised);
              },
              {.timeout_s = 30, .spin_us = round % 2 == 0 ? -1.0 : 0.0});
    CHECK_EQ(good[0].load(), good[1].load());
  }
}

struct AlwaysInterrupted : WaitHooks {
  bool interrupted(bool /*by_signal*/) override { return true; }
};

// Nothing is missing any more when the other rank comes, and no abort word
// shows that anything was: only the count does.
TEST(a_backward_that_one_rank_gave_up_is_good_for_no_rank) {
  std::atomic<bool> has_given_up{false};
  run_group(2,
            [&](HostGroup& group) {
              Model model(group, 50'000);
              const auto backward = [&] {
                for (size_t p = 0; p < kParameters; ++p) model.mark(p, 0);
                model.reducer().finish(1, false);
              };
              backward();
              if (group.rank() == 1) {
                AlwaysInterrupted hooks;
                current_hooks = &hooks;
                CHECK_EQ(failure_of(backward).reason, Reason::kInterrupted);
                current_hooks = nullptr;
                has_given_up = true;
                while (has_given_up.load()) sched_yield();
                return;
              }
              while (!has_given_up.load()) sched_yield();
              CHECK_EQ(failure_of(backward).reason, Reason::kDeadline);
              CHECK(isnan(model.reducer().squared_norm()));
              has_given_up = false;
            },
            {.timeout_s = 4});
}

TEST(a_rank_that_keeps_its_chunk_is_named_at_the_deadline) {
  run_group(2,
            [](HostGroup& group) {
              static std::atomic<bool> is_over{false};
              Model model(group, 50'000);
              const auto backward = [&] {
                for (size_t p = 0; p < kParameters; ++p) model.mark(p, 0);
                model.reducer().finish(1, false);
              };
              if (group.rank() == 1) {
                arm_fault(Point::kChunkClaimed, FaultAction::kRaise, 1);
                const Failure injected = failure_of([&] {
                  while (true) backward();
                });
                disarm_fault();
                CHECK_EQ(injected.reason, Reason::kInjected);
                while (!is_over.load())
                  sched_yield();  // alive, but does not continue
                return;
              }
              const Failure failure = failure_of([&] {
                while (true) backward();
              });
              is_over = true;
              CHECK_EQ(failure.reason, Reason::kDeadline);
              CHECK(testing::is_late(failure, 1));
            },
            {.timeout_s = 0.5});
}

}  // namespace
}  // namespace paceline

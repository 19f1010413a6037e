// The errors that survivors see: of calls that differ, deaths, departures,
// deadlines and ranks that raise, in every kind of wait.

#include <string.h>

#include <string>
#include <vector>

#include "check.h"
#include "collectives/all_gather.h"
#include "collectives/all_reduce.h"
#include "collectives/all_to_all.h"
#include "collectives/barrier.h"
#include "collectives/broadcast.h"
#include "core/faults.h"
#include "core/shared_text.h"
#include "core/wait.h"
#include "group_world.h"

namespace paceline {
namespace {

using testing::failure_of;
using testing::is_late;
using testing::run_group;

void sum(HostGroup& group, size_t count) {
  std::vector<float> array(count, 1);
  all_reduce(group.calls, array.data(), count, DType::kFloat32, ReduceOp::kSum,
             1, -1);
  for (const float each : array)
    CHECK_EQ(each, static_cast<float>(group.world()));
}

TEST(calls_that_differ_fail_everywhere_and_the_group_stays) {
  run_group(3, [](HostGroup& group) {
    const bool odd = group.rank() == 1;
    uint8_t bytes[64] = {};
    float floats[64] = {};
    const std::vector<std::function<void()>> disagreements = {
        [&] { broadcast(group.calls, bytes, odd ? 8 : 9, 0, -1); },
        [&] { broadcast(group.calls, bytes, 8, odd ? 1 : 0, -1); },
        [&] {
          odd ? barrier(group.calls, -1)
              : paceline::broadcast(group.calls, bytes, 8, 0, -1);
        },
        [&] {
          all_reduce(group.calls, floats, 4,
                     odd ? DType::kInt32 : DType::kFloat32, ReduceOp::kSum, 1,
                     -1);
        },
        [&] {
          all_reduce(group.calls, floats, 4, DType::kFloat32,
                     odd ? ReduceOp::kMax : ReduceOp::kSum, 1, -1);
        },
        [&] {
          odd ? (void)group.heap.allocate(4, -1) : barrier(group.calls, -1);
        },
        [&] {
          odd ? (void)group.heap.allocate(4, -1)
              : (void)group.heap.allocate(5, -1);
        },
        [&] {
          std::vector<uint8_t> large(2 * kPieceBytes);
          odd ? broadcast(group.calls, large.data(), large.size(), 0, -1)
              : all_gather(group.calls, bytes, large.data(), 8, -1);
        },
    };
    for (const auto& disagree : disagreements) {
      CHECK_EQ(failure_of(disagree).reason, Reason::kMismatch);
      sum(group, 10);
      sum(group, kPieceBytes);
    }
  });
}

TEST(different_sizes_of_all_to_all_are_reported) {
  run_group(3, [](HostGroup& group) {
    std::vector<uint8_t> in(64), out(64);
    std::vector<uint64_t> sends(3, 8), expects(3, 8);
    if (group.rank() == 2) expects[1] = 9;
    const Failure failure = failure_of([&] {
      all_to_all(group.calls, in.data(), sends, out.data(), expects, -1);
    });
    CHECK_EQ(failure.reason, Reason::kMismatch);
    CHECK(failure.message ==
          "all_to_all: rank 1 sends 8 bytes to rank 2, which expects 9");
    sum(group, 3);
  });
}

/// Rank 1 stops at `point` of `call`, as a SIGKILL would stop it; the others
/// must notice in the same call or the next.
void check_death(Point point, uint32_t nth,
                 const std::function<void(HostGroup&)>& call) {
  run_group(3, [&](HostGroup& group) {
    barrier(group.calls, -1);
    if (group.rank() == 1) {
      arm_fault(point, FaultAction::kRaise, nth);
      const Failure injected = failure_of([&] { call(group); });
      disarm_fault();
      CHECK_EQ(injected.reason, Reason::kInjected);
      group.session.die_for_test();
      return;
    }
    const Failure failure = failure_of([&] {
      call(group);
      barrier(group.calls, -1);
    });
    CHECK_EQ(failure.reason, Reason::kDied);
    CHECK_EQ(failure.culprit, 1);
    CHECK(is_late(failure, 1));
    // The group is over, and reports that.
    CHECK_EQ(failure_of([&] { barrier(group.calls, -1); }).reason,
             Reason::kDied);
  });
}

TEST(a_death_at_every_step_of_a_collective) {
  const auto sum_of = [](size_t count) {
    return [count](HostGroup& group) { sum(group, count); };
  };
  for (const Point point :
       {Point::kCallBegin, Point::kBeforeArrive, Point::kAfterArrive})
    for (const size_t count : {size_t{4}, kPieceBytes})
      check_death(point, 1, sum_of(count));
  check_death(Point::kBeforeReduce, 1, sum_of(4));
  check_death(Point::kBeforeReduce, 3, sum_of(kPieceBytes));
  check_death(Point::kAfterReduce, 2, sum_of(kPieceBytes));
  check_death(Point::kCopyOut, 1, sum_of(kPieceBytes));
  check_death(Point::kAllocate, 1,
              [](HostGroup& group) { group.heap.allocate(5000, -1); });
}

TEST(a_death_in_a_message) {
  for (const Point point : {Point::kSend, Point::kReceive}) {
    check_death(point, 2, [&](HostGroup& group) {
      std::vector<uint8_t> data(4 * kOutboxBytes);
      const bool sends = (group.rank() == 1) == (point == Point::kSend);
      if (group.rank() == 2) return;
      const int peer = 1 - group.rank();
      group.point_to_point.wait(sends ? group.point_to_point.start_send(
                                            data.data(), data.size(), peer, 0)
                                      : group.point_to_point.start_receive(
                                            data.data(), data.size(), peer, 0),
                                -1);
    });
  }
}

TEST(a_death_without_futex_waitv) {
  disable_futex_waitv(true);
  check_death(Point::kBeforeArrive, 1,
              [](HostGroup& group) { sum(group, 10); });
  disable_futex_waitv(false);
}

TEST(several_deaths_at_once_are_all_named) {
  run_group(5, [](HostGroup& group) {
    barrier(group.calls, -1);
    if (group.rank() % 2 == 1) return group.session.die_for_test();
    while (!has_died(group.session.line(1)) || !has_died(group.session.line(3)))
      sched_yield();
    const Failure failure = failure_of([&] { barrier(group.calls, -1); });
    CHECK_EQ(failure.reason, Reason::kDied);
    CHECK(is_late(failure, 1) && is_late(failure, 3));
    CHECK(!is_late(failure, 0) && !is_late(failure, 2));
  });
}

TEST(a_rank_that_raises_is_quoted) {
  run_group(3, [](HostGroup& group) {
    if (group.rank() == 2) {
      group.session.abort("ValueError: no such file");
      group.session.abort("a second thought");
      return;
    }
    const Failure failure = failure_of([&] { barrier(group.calls, -1); });
    CHECK_EQ(failure.reason, Reason::kRaised);
    CHECK_EQ(failure.culprit, 2);
    CHECK(failure.message == "ValueError: no such file");
  });
}

TEST(a_rank_that_leaves_while_others_wait_for_it) {
  run_group(3, [](HostGroup& group) {
    barrier(group.calls, -1);
    if (group.rank() == 0) return group.session.close();
    const Failure failure = failure_of([&] { barrier(group.calls, -1); });
    CHECK_EQ(failure.reason, Reason::kLeft);
    CHECK_EQ(failure.culprit, 0);
  });
}

TEST(a_rank_that_is_late_is_named_everywhere) {
  run_group(4,
            [](HostGroup& group) {
              // The latch is outside of the group: rank 2 is alive and idle.
              static std::atomic<int> raised{0};
              if (group.rank() == 2) {
                while (raised.load() < 3) sched_yield();
                raised = 0;
                CHECK_EQ(failure_of([&] { barrier(group.calls, -1); }).reason,
                         Reason::kDeadline);
                return;
              }
              const Failure failure =
                  failure_of([&] { barrier(group.calls, 0.3); });
              CHECK_EQ(failure.reason, Reason::kDeadline);
              CHECK(is_late(failure, 2));
              CHECK(failure.waited_s >= 0.3);
              raised.fetch_add(1);
            },
            {.timeout_s = 60});
}

bool is_waiting(const Failure& failure, int rank) {
  return (failure.waiting[0] >> rank & 1) != 0;
}

TEST(who_waits_for_a_late_rank_is_not_late_itself) {
  run_group(3,
            [](HostGroup& group) {
              static std::atomic<int> raised{0};
              if (group.rank() == 2) {
                while (raised.load() < 2) sched_yield();
                raised = 0;
                return;
              }
              // Rank 0 waits for rank 1 alone, which waits for rank 2.
              const Failure failure = failure_of([&] {
                uint8_t byte = 0;
                const int other = group.rank() == 0 ? 1 : 2;
                const double timeout_s = group.rank() == 0 ? 0.3 : 60;
                group.point_to_point.wait(
                    group.point_to_point.start_receive(&byte, 1, other, 0),
                    timeout_s);
              });
              CHECK_EQ(failure.reason, Reason::kDeadline);
              CHECK_EQ(failure.culprit, 2);
              CHECK(is_late(failure, 2) && !is_late(failure, 1));
              CHECK(is_waiting(failure, 1) && !is_waiting(failure, 2));
              raised.fetch_add(1);
            },
            {.timeout_s = 60});
}

TEST(at_a_deadline_no_rank_is_blamed_that_does_not_look_late) {
  run_group(2, [](HostGroup& group) {
    if (group.rank() == 1) {
      while (!group.session.is_over()) sched_yield();
      return;
    }
    Atomic<uint32_t> word{0}, sleepers{0};
    const Failure failure = failure_of([&] {
      group.session.wait_until(
          wait_place(WaitKind::kCall, 0), word, sleepers, 1000000,
          [] { return false; }, [](int) { return false; });
    });
    CHECK_EQ(failure.reason, Reason::kDeadline);
    CHECK_EQ(failure.culprit, -1);
    CHECK_EQ(failure.late[0], uint64_t{0});
  });
}

TEST(ranks_that_wait_for_each_other_see_where) {
  run_group(2,
            [](HostGroup& group) {
              const Failure failure = failure_of([&] {
                if (group.rank() == 0) return barrier(group.calls, 60);
                uint8_t byte = 0;
                group.point_to_point.wait(
                    group.point_to_point.start_receive(&byte, 1, 0, 0), 0.3);
              });
              CHECK_EQ(failure.reason, Reason::kDeadline);
              for (int r = 0; r < 2; ++r) {
                CHECK(is_waiting(failure, r));
                // It stays when the wait is over, because others have yet to
                // read it.
                const RankLine& line = group.session.line(r);
                CHECK(kind_of(line.waits_at.load()) ==
                      (r == 0 ? WaitKind::kCall : WaitKind::kMessage));
              }
            },
            {.timeout_s = 60});
}

// A rank that is stopped in a wait still shows that it waits, long after the
// wait is over.
TEST(a_rank_that_is_stopped_in_a_wait_is_late) {
  for (const bool is_of_a_call : {false, true}) {
    run_group(2,
              [&](HostGroup& group) {
                static std::atomic<bool> has_raised{false};
                barrier(group.calls, -1);  // phase 0
                if (group.rank() == 1) {
                  RankLine& own = group.session.mapping().own_line();
                  own.looked_ns = is_of_a_call ? now_ns() : 1;
                  own.waits_for[0] = 1;
                  own.waits_at = is_of_a_call
                                     ? wait_place(WaitKind::kCall, 0)
                                     : wait_place(WaitKind::kBackward, 1);
                  while (!has_raised.load()) sched_yield();
                  has_raised = false;
                  return;
                }
                const Failure failure =
                    failure_of([&] { barrier(group.calls, 0.3); });
                CHECK_EQ(failure.reason, Reason::kDeadline);
                CHECK(is_late(failure, 1) && !is_waiting(failure, 1));
                has_raised = true;
              },
              {.timeout_s = 60});
  }
}

TEST(a_wait_that_is_over_leaves_nothing) {
  run_group(2, [](HostGroup& group) {
    barrier(group.calls, -1);
    barrier(group.calls, -1);
    CHECK_EQ(group.session.line(group.rank()).waits_at.load(), uint64_t{0});
    barrier(group.calls, -1);
  });
}

TEST(a_wait_is_reported_once_after_the_warning_time) {
  struct Counting : WaitHooks {
    void slow(const Failure& so_far) override {
      ++count;
      named = is_late(so_far, 1);
    }
    int count = 0;
    bool named = false;
  };
  run_group(2,
            [](HostGroup& group) {
              static std::atomic<bool> was_warned{false};
              if (group.rank() == 1) {
                while (!was_warned.load()) sched_yield();
                barrier(group.calls, -1);
                return;
              }
              Counting hooks;
              struct Watching : WaitHooks {
                explicit Watching(Counting& c) : counting(c) {}
                void slow(const Failure& so_far) override {
                  counting.slow(so_far);
                  was_warned = true;
                }
                Counting& counting;
              } watching(hooks);
              current_hooks = &watching;
              barrier(group.calls, -1);
              current_hooks = nullptr;
              CHECK_EQ(hooks.count, 1);
              CHECK(hooks.named);
            },
            {.timeout_s = 60, .warn_after_s = 0.05});
}

TEST(a_closed_group_refuses_and_wakes_its_own_waits) {
  run_group(2, [](HostGroup& group) {
    static std::atomic<bool> is_over{false};
    if (group.rank() == 1) {
      while (!is_over.load()) sched_yield();
    } else {
      // Another thread of this rank waits when it closes.
      std::thread waiting([&] {
        CHECK_EQ(failure_of([&] { barrier(group.calls, -1); }).reason,
                 Reason::kClosed);
      });
      while (group.session.line(0).call_number.load() == 0) sched_yield();
      group.session.close();
      waiting.join();
      CHECK_EQ(failure_of([&] { barrier(group.calls, -1); }).reason,
               Reason::kClosed);
      group.session.close();
      is_over = true;
    }
  });
}

TEST(an_activity_changes_while_others_read_it) {
  run_group(2, [](HostGroup& group) {
    const std::string texts[] = {std::string(200, 'a'), "bb"};
    for (int i = 0; i < 2000; ++i) {
      if (group.rank() == 0) {
        group.session.set_activity(texts[i % 2].c_str());
        continue;
      }
      const std::string seen = read_text(group.session.line(0).activity);
      CHECK(seen.size() < sizeof(RankLine::activity));
      CHECK(seen.find_first_not_of("ab") == std::string::npos);
    }
    barrier(group.calls, -1);
    CHECK_EQ(read_text(group.session.line(0).activity) == texts[1], true);
  });
}

}  // namespace
}  // namespace paceline

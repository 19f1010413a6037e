// Ranks as fibers of one thread, and a scheduler that decides at each step
// which of them goes on: the same seed gives the same schedule, in every
// detail.
//
// Words
//   step      an operation on a shared word, a system call, or a labelled point
//             of the protocol (core/faults.h); before it, another fiber may run
//   schedule  which fiber runs at each step, who dies or stops where
//   finding   what a schedule must not do: a deadlock, a wrong value
// Strategies
//   priorities  PCT (Burckhardt et al., ASPLOS 2010): each fiber has a random
//               priority, the highest runs, and at depth - 1 random steps the
//               one that runs falls below all others. A bug that needs `depth`
//               orderings among n fibers and k steps is found with probability
//               1 / (n * k^(depth - 1)) at least, however long the program is.
//   random walk every step is anybody's.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "clocks.h"
#include "core/faults.h"
#include "scheduled_atomic.h"

struct robust_list_head;

namespace paceline::schedules {

/// A small generator that is the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 + 1) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  /// 0 <= result < limit.
  uint64_t below(uint64_t limit) { return next() % limit; }
  bool one_in(uint64_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

/// The events that may affect the ranks of a schedule.
struct Events {
  int deaths = 0;  ///< ranks that are killed, each at a random step
  int stops = 0;   ///< ranks that are stopped and continued
  /// Deadlines pass when nothing else can happen. Without it, a sleep that only
  /// its time-out would end is a deadlock.
  bool time_passes = false;
  /// Plain memory is watched. Off where ranks give up: then one may write where
  /// another no longer looks.
  bool watches_races = true;
  int cores = 64;  ///< that the ranks believe to have
};

struct Fiber {
  static constexpr size_t kMostWords = 128;  // as many as futex_waitv takes
  enum class State { kRunnable, kBlocked, kEnded };
  int index = 0;
  int rank = 0;
  bool is_main = false;    ///< runs the rank's program
  bool is_worker = false;  ///< was started by it
  bool is_event = false;   ///< stands for the world outside, not for a thread
  std::string name;
  std::function<void()> body;
  State state = State::kRunnable;
  bool is_killed = false;   ///< never runs again; may still be in futex queues
  bool is_done = false;     ///< in wait_for_others()
  bool is_stopped = false;  ///< until the rank is continued
  uint64_t priority = 0;
  const char* waits_for = "";
  // State that belongs to a thread and not to the process.
  bool has_started = false;
  jmp_buf context;
  std::byte* stack = nullptr;
  void* exceptions[2] = {};  ///< __cxa_eh_globals
  robust_list_head* robust_list = nullptr;
  // The sleep under way.
  const void* words[kMostWords];
  size_t num_words = 0;
  int64_t wakes_at_ns = INT64_MAX;
  bool timed_out = false;
};

class Scheduler {
 public:
  static Scheduler& get();
  /// Whether a fiber runs: outside, all functions behave as usual.
  bool is_running() const { return current_ != nullptr; }

  /// Runs one schedule of `program` on `num_ranks` ranks. Returns the finding,
  /// or nothing.
  std::string run(int num_ranks, const std::function<void(int)>& program,
                  const Events& events, uint64_t seed);
  size_t steps() const { return steps_; }
  /// How many steps this program takes, from the start() of its ranks on.
  void expect_steps(size_t steps) { expected_steps_ = steps; }
  size_t expected_steps() const { return expected_steps_; }

  // --- for the programs ---
  /// The ranks' preparations are over, and schedules differ from here on.
  void start();
  /// Whether all ranks have called start().
  bool has_begun() const { return is_exploring_; }
  /// Ends the schedule: this must not happen.
  [[noreturn]] void fail(const std::string& what);
  /// Waits until every other rank calls it, has returned or is dead.
  void wait_for_others();
  Random& random() { return random_; }
  int rank() const { return current_->rank; }
  bool has_died(int rank) const { return died_ >> rank & 1; }
  bool was_stopped(int rank) const { return stopped_ >> rank & 1; }
  /// Called at each labelled point that a rank passes.
  std::function<void(Point)> at_point;

  // --- for the simulated kernel ---
  void step(const char* what, uint64_t value);
  void before(const void* word);
  void after(const void* word, Operation operation, std::memory_order order,
             uint64_t value, const std::source_location& where);
  Fiber& current() { return *current_; }
  const std::vector<std::unique_ptr<Fiber>>& fibers() const { return fibers_; }
  Fiber& spawn(std::string name, int rank, std::function<void()> body);
  /// Sleeps until wake(), or until `wakes_at_ns`; then `timed_out` is set.
  void block(const char* what, int64_t wakes_at_ns = INT64_MAX);
  void wake(Fiber& fiber);
  int64_t now_ns() const { return now_ns_; }
  const Events& events() const { return events_; }
  Clocks& clocks() { return clocks_; }

  /// The last steps, or all that are remembered, with their source lines.
  void print_trace(size_t most) const;

 private:
  struct Step {
    const Fiber* fiber;
    const char* what;
    const void* word;
    uint64_t value;
    std::source_location where;
    bool has_place;
  };
  enum class Strategy { kPriorities, kRandomWalk };
  struct Strike {
    size_t at_step;
    bool kills;
  };

  void plan_events();
  void strike(bool kills);
  bool is_over(const Fiber& fiber) const {
    return fiber.is_done || fiber.is_killed ||
           fiber.state == Fiber::State::kEnded;
  }
  void wake_who_is_done();
  void kill(int victim);
  void stop(int victim);
  void let_continue(int victim);
  void consider_switch();
  Fiber* pick();
  void switch_to(Fiber& next);
  void leave();
  [[noreturn]] void enter(Fiber& fiber);
  static void trampoline();
  Fiber* idle();
  bool is_over() const;
  bool can_run(const Fiber& fiber) const {
    return fiber.state == Fiber::State::kRunnable && !fiber.is_killed &&
           !fiber.is_stopped;
  }
  void record(const Step& step) {
    trace_[num_recorded_++ % kTraceSteps] = step;
  }
  std::string stand() const;

  static constexpr size_t kTraceSteps = 1 << 14;
  static constexpr size_t kMostSteps = 200'000;
  static constexpr int kMostTimeouts = 400;
  static constexpr int kDepth = 3;

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<std::byte*> stacks_;
  Fiber* current_ = nullptr;
  jmp_buf main_context_;
  Events events_;
  Random random_{0};
  Strategy strategy_ = Strategy::kPriorities;
  std::vector<size_t> change_points_;
  std::vector<Strike> strikes_;
  size_t expected_steps_ = 1000;
  uint64_t lowest_priority_ = 0;
  int num_ranks_ = 0;
  int num_started_ = 0;
  bool is_exploring_ = false;
  size_t steps_ = 0;
  int timeouts_ = 0;
  int64_t now_ns_ = 0;
  uint32_t died_ = 0;
  uint32_t stopped_ = 0;
  int continues_late_ = -1;  ///< a rank that is continued when all else is over
  std::string finding_;
  std::vector<Step> trace_{kTraceSteps};
  size_t num_recorded_ = 0;
  Clocks clocks_;
};

}  // namespace paceline::schedules

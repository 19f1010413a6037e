#include "scheduler.h"

#include <cxxabi.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "kernel.h"
#include "memory.h"

namespace paceline::schedules {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr int64_t kStartNs = 1'000'000'000;

std::byte* make_stack() {
  void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) abort();
  mprotect(stack, 4096, PROT_NONE);
  return static_cast<std::byte*>(stack);
}

}  // namespace

void before_step(const void* word) {
  Scheduler& scheduler = Scheduler::get();
  if (scheduler.is_running() && !is_static(word)) scheduler.before(word);
}

void after_step(const void* word, Operation operation, std::memory_order order,
                uint64_t value, const std::source_location& where) {
  Scheduler& scheduler = Scheduler::get();
  if (scheduler.is_running() && !is_static(word))
    scheduler.after(word, operation, order, value, where);
}

bool fails_spuriously() {
  Scheduler& scheduler = Scheduler::get();
  return scheduler.is_running() && scheduler.random().one_in(8);
}

Scheduler& Scheduler::get() {
  // On the heap: it outlives the words that renew_statics() restores.
  static Scheduler& scheduler = *new Scheduler;
  return scheduler;
}

std::string Scheduler::run(int num_ranks,
                           const std::function<void(int)>& program,
                           const Events& events, uint64_t seed) {
  events_ = events;
  random_ = Random(seed);
  // Each finds bugs that the other one misses; see the head of scheduler.h.
  strategy_ = seed % 2 == 0 ? Strategy::kPriorities : Strategy::kRandomWalk;
  while (stacks_.size() < Clocks::kMostFibers) stacks_.push_back(make_stack());
  fibers_.clear();
  forget_memory();
  forget_mutexes();
  num_ranks_ = num_ranks;
  num_started_ = 0;
  is_exploring_ = false;
  steps_ = 0;
  timeouts_ = 0;
  now_ns_ = kStartNs;
  lowest_priority_ = kDepth;
  died_ = stopped_ = 0;
  continues_late_ = -1;
  finding_.clear();
  num_recorded_ = 0;
  change_points_.clear();
  strikes_.clear();
  clocks_.reset();
  for (int r = 0; r < num_ranks; ++r) {
    spawn("rank " + std::to_string(r), r, [program, r] {
      program(r);
    }).is_main = true;
  }
  use_own_memory(true);
  if (_setjmp(main_context_) == 0) enter(*fibers_.front());
  use_own_memory(false);
  current_ = nullptr;
  return finding_;
}

Fiber& Scheduler::spawn(std::string name, int rank,
                        std::function<void()> body) {
  const LastingMemory lasting;
  auto fiber = std::make_unique<Fiber>();
  fiber->index = static_cast<int>(fibers_.size());
  fiber->rank = rank;
  fiber->name = std::move(name);
  fiber->body = std::move(body);
  // Almost certainly distinct, and above the priorities of all change points.
  fiber->priority = (random_.next() >> 1) + (uint64_t{1} << 62);
  const auto index = static_cast<size_t>(fiber->index);
  if (index >= static_cast<size_t>(Clocks::kMostFibers))
    fail("too many threads");
  fiber->stack = stacks_[index];
  fibers_.push_back(std::move(fiber));
  return *fibers_.back();
}

void Scheduler::start() {
  Fiber& self = *current_;
  if (++num_started_ < num_ranks_) {
    block("the start of the others");
    return;
  }
  for (const auto& fiber : fibers_)
    if (fiber->is_main && fiber.get() != &self) wake(*fiber);
  steps_ = 0;
  plan_events();
  is_exploring_ = true;
  consider_switch();
}

void Scheduler::wait_for_others() {
  current_->is_done = true;
  wake_who_is_done();
  const auto is_late = [&](const auto& fiber) {
    return fiber->is_main && !is_over(*fiber);
  };
  while (std::any_of(fibers_.begin(), fibers_.end(), is_late))
    block("the end of the others");
  current_->is_done = false;
}

void Scheduler::wake_who_is_done() {
  for (const auto& fiber : fibers_)
    if (fiber->is_done && fiber->num_words == 0) wake(*fiber);
}

void Scheduler::fail(const std::string& what) {
  {
    const LastingMemory lasting;
    finding_ = std::string(what.data(), what.size());
  }
  _longjmp(main_context_, 1);
}

void Scheduler::step(const char* what, uint64_t value) {
  before(nullptr);
  record({current_, what, nullptr, value, {}, false});
}

void Scheduler::before(const void* /*word*/) {
  ++steps_;
  if (!is_exploring_) return;
  if (steps_ > kMostSteps)
    fail("no end after " + std::to_string(steps_) + " steps");
  while (!strikes_.empty() && steps_ >= strikes_.front().at_step) {
    const bool kills = strikes_.front().kills;
    strikes_.erase(strikes_.begin());
    strike(kills);
  }
  consider_switch();
}

void Scheduler::after(const void* word, Operation operation,
                      std::memory_order order, uint64_t value,
                      const std::source_location& where) {
  static constexpr const char* kNames[] = {"reads", "writes", "changes to"};
  record({current_, kNames[static_cast<int>(operation)], word, value, where,
          true});
  clocks_.operation(current_->index, word, operation, order);
}

void Scheduler::consider_switch() {
  if (!change_points_.empty() && steps_ >= change_points_.front()) {
    change_points_.erase(change_points_.begin());
    current_->priority = --lowest_priority_;
  }
  Fiber* next = pick();
  if (next == nullptr) next = idle();
  if (next != current_) switch_to(*next);
}

Fiber* Scheduler::pick() {
  if (!is_exploring_) {
    if (can_run(*current_)) return current_;
    for (const auto& fiber : fibers_)
      if (can_run(*fiber)) return fiber.get();
    return nullptr;
  }
  Fiber* best = nullptr;
  uint64_t num_seen = 0;
  for (const auto& fiber : fibers_) {
    if (!can_run(*fiber)) continue;
    if (strategy_ == Strategy::kRandomWalk
            ? random_.one_in(++num_seen)
            : best == nullptr || fiber->priority > best->priority)
      best = fiber.get();
  }
  return best;
}

void Scheduler::switch_to(Fiber& next) {
  Fiber& self = *current_;
  // Exceptions in flight belong to a thread: a destructor may be a step.
  void* const globals = abi::__cxa_get_globals();
  memcpy(self.exceptions, globals, sizeof(self.exceptions));
  if (_setjmp(self.context) == 0) enter(next);
  memcpy(globals, self.exceptions, sizeof(self.exceptions));
}

void Scheduler::enter(Fiber& fiber) {
  current_ = &fiber;
  if (fiber.has_started) _longjmp(fiber.context, 1);
  fiber.has_started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, trampoline, 0);
  setcontext(&context);
  abort();
}

void Scheduler::trampoline() {
  Scheduler& scheduler = get();
  memset(abi::__cxa_get_globals(), 0, sizeof(Fiber::exceptions));
  scheduler.current_->body();
  scheduler.leave();
}

void Scheduler::leave() {
  current_->state = Fiber::State::kEnded;
  wake_who_is_done();
  if (is_over()) _longjmp(main_context_, 1);
  Fiber* next = pick();
  if (next == nullptr) next = idle();
  enter(*next);
}

bool Scheduler::is_over() const {
  return std::all_of(fibers_.begin(), fibers_.end(), [](const auto& fiber) {
    return (!fiber->is_main && !fiber->is_event) || fiber->is_killed ||
           fiber->state == Fiber::State::kEnded;
  });
}

void Scheduler::block(const char* what, int64_t wakes_at_ns) {
  Fiber& self = *current_;
  self.state = Fiber::State::kBlocked;
  self.waits_for = what;
  self.wakes_at_ns = wakes_at_ns;
  self.timed_out = false;
  record({&self, "sleeps on", nullptr, 0, {}, false});
  consider_switch();
}

void Scheduler::wake(Fiber& fiber) {
  fiber.num_words = 0;
  if (fiber.state != Fiber::State::kBlocked) return;
  fiber.state = Fiber::State::kRunnable;
}

// No fiber can run. A rank that is stopped for good may continue now; otherwise
// time may pass; otherwise this is a deadlock.
Fiber* Scheduler::idle() {
  const bool others_are_over =
      std::all_of(fibers_.begin(), fibers_.end(), [&](const auto& fiber) {
        return !fiber->is_main || fiber->is_stopped || is_over(*fiber);
      });
  if (continues_late_ >= 0 && (others_are_over || !events_.time_passes)) {
    let_continue(continues_late_);
    continues_late_ = -1;
    if (Fiber* next = pick()) return next;
  }
  if (!events_.time_passes) fail("deadlock: " + stand());
  if (++timeouts_ > kMostTimeouts) fail("nothing but time passes: " + stand());
  Fiber* first = nullptr;
  for (const auto& fiber : fibers_) {
    if (fiber->state != Fiber::State::kBlocked || fiber->is_killed ||
        fiber->is_stopped)
      continue;
    if (first == nullptr || fiber->wakes_at_ns < first->wakes_at_ns)
      first = fiber.get();
  }
  if (first == nullptr || first->wakes_at_ns == INT64_MAX)
    fail("deadlock: " + stand());
  now_ns_ = std::max(now_ns_, first->wakes_at_ns);
  first->timed_out = true;
  wake(*first);
  return first;
}

}  // namespace paceline::schedules

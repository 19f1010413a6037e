#include "kernel.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <span>
#include <string>

#include "core/futex.h"
#include "scheduler.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

namespace paceline::schedules {
namespace {

Scheduler& scheduler() { return Scheduler::get(); }
bool is_simulated() { return scheduler().is_running(); }

int fail_with(int error) {
  errno = error;
  return -1;
}

// --- futexes ---

struct Expected {
  const uint32_t* word;
  uint32_t value;
};

long futex_wait(std::span<const Expected> waits, int64_t wakes_at_ns) {
  scheduler().step("futex_wait", waits.size());
  Fiber& self = scheduler().current();
  for (const Expected& wait : waits) {
    if (*wait.word != wait.value) return fail_with(EAGAIN);
  }
  self.num_words = 0;
  for (const Expected& wait : waits) self.words[self.num_words++] = wait.word;
  scheduler().block("a futex", wakes_at_ns);
  return self.timed_out ? fail_with(ETIMEDOUT) : 0;
}

// A rank that is dying but not yet dead still takes a wake-up, and so does a
// stopped one.
long futex_wake(const void* word, int count) {
  Fiber* asleep[Clocks::kMostFibers];
  size_t num_asleep = 0;
  for (const auto& fiber : scheduler().fibers()) {
    const auto words = std::span(fiber->words).first(fiber->num_words);
    if (fiber->state == Fiber::State::kBlocked &&
        std::find(words.begin(), words.end(), word) != words.end())
      asleep[num_asleep++] = fiber.get();
  }
  long woken = 0;
  for (; woken < count && num_asleep > 0; ++woken) {
    const size_t chosen = scheduler().random().below(num_asleep);
    scheduler().wake(*asleep[chosen]);
    asleep[chosen] = asleep[--num_asleep];
  }
  return woken;
}

int64_t to_ns(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

long system_futex(const uint32_t* word, long operation, long value,
                  const timespec* timeout) {
  if ((operation & FUTEX_CMD_MASK) == FUTEX_WAKE) {
    scheduler().step("futex_wake", static_cast<uint64_t>(value));
    return futex_wake(word, static_cast<int>(value));
  }
  const Expected wait[] = {{word, static_cast<uint32_t>(value)}};
  const int64_t wakes_at_ns =
      timeout == nullptr ? INT64_MAX : scheduler().now_ns() + to_ns(*timeout);
  return futex_wait(wait, wakes_at_ns);
}

struct KernelWait {  // the kernel's struct futex_waitv
  uint64_t value;
  uint64_t address;
  uint32_t flags;
  uint32_t reserved;
};

long system_futex_waitv(const KernelWait* waits, long count,
                        const timespec* deadline) {
  if (count == 0) return fail_with(EINVAL);
  Expected expected[Fiber::kMostWords];
  for (long i = 0; i < count; ++i)
    expected[i] = {reinterpret_cast<const uint32_t*>(waits[i].address),
                   static_cast<uint32_t>(waits[i].value)};
  return futex_wait({expected, static_cast<size_t>(count)}, to_ns(*deadline));
}

// --- threads and their robust lists ---

uint32_t thread_id(const Fiber& fiber) {
  return 1000 + static_cast<uint32_t>(fiber.index);
}

void mark_dead(Fiber& fiber, void* node, long futex_offset) {
  auto* word =
      reinterpret_cast<uint32_t*>(static_cast<std::byte*>(node) + futex_offset);
  scheduler().step("the kernel marks a word of thread", thread_id(fiber));
  const uint32_t value = *word;
  if ((value & FUTEX_TID_MASK) != thread_id(fiber)) return;
  *word = (value & FUTEX_WAITERS) | FUTEX_OWNER_DIED;
  for (const auto& other : scheduler().fibers()) {
    if (other->rank == fiber.rank && other->is_killed)
      scheduler().clocks().publish(other->index, word);
  }
  scheduler().clocks().publish(fiber.index, word);
  if ((value & FUTEX_WAITERS) != 0) futex_wake(word, 1);
}

// As exit_robust_list() of the kernel does.
void end_thread(Fiber& fiber) {
  fiber.num_words = 0;
  fiber.state = Fiber::State::kEnded;
  robust_list_head* head = fiber.robust_list;
  fiber.robust_list = nullptr;
  if (head != nullptr) {
    void* const pending = head->list_op_pending;
    for (robust_list* node = head->list.next; node != &head->list;) {
      robust_list* const next = node->next;
      if (node != pending) mark_dead(fiber, node, head->futex_offset);
      node = next;
    }
    if (pending != nullptr) mark_dead(fiber, pending, head->futex_offset);
  }
  for (const auto& other : scheduler().fibers())
    if (other->num_words == 1 && other->words[0] == &fiber)
      scheduler().wake(*other);
}

// --- mutexes: held by a fiber ---

struct Held {
  const void* mutex;
  Fiber* by;
};
Held held[64];
size_t num_held = 0;

Held* find_held(const void* mutex) {
  for (size_t i = 0; i < num_held; ++i)
    if (held[i].mutex == mutex) return &held[i];
  return nullptr;
}

void lock_mutex(const void* mutex) {
  while (Held* by = find_held(mutex)) {
    if (by->by == &scheduler().current())
      scheduler().fail("a thread locks a mutex that it holds");
    Fiber& self = scheduler().current();
    self.words[0] = mutex;
    self.num_words = 1;
    scheduler().block("a mutex");
  }
  held[num_held++] = {mutex, &scheduler().current()};
}

void unlock_mutex(const void* mutex) {
  Held* by = find_held(mutex);
  if (by == nullptr) return;
  *by = held[--num_held];
  futex_wake(mutex, 1);
}

}  // namespace

void end_threads_of(int rank) {
  for (size_t i = 0; i < scheduler().fibers().size(); ++i) {
    Fiber& fiber = *scheduler().fibers()[i];
    if (fiber.rank != rank || !fiber.is_killed) continue;
    scheduler().step("the kernel ends thread", thread_id(fiber));
    if (fiber.state != Fiber::State::kEnded) end_thread(fiber);
  }
}

void forget_mutexes() { num_held = 0; }

}  // namespace paceline::schedules

// The functions below replace those of the C library and two functions of the
// core that a schedule must see.
using namespace paceline::schedules;

extern "C" {

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long a[6];
  for (long& argument : a) argument = va_arg(list, long);
  va_end(list);
  if (!is_simulated())
    return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  switch (number) {
    case SYS_futex:
      return system_futex(reinterpret_cast<const uint32_t*>(a[0]), a[1], a[2],
                          reinterpret_cast<const timespec*>(a[3]));
    case SYS_futex_waitv:
      return system_futex_waitv(reinterpret_cast<const KernelWait*>(a[0]), a[1],
                                reinterpret_cast<const timespec*>(a[3]));
    case SYS_set_robust_list:
      scheduler().current().robust_list =
          reinterpret_cast<robust_list_head*>(a[0]);
      return 0;
    case SYS_gettid:
      return thread_id(scheduler().current());
    default:
      scheduler().fail("system call " + std::to_string(number) +
                       ", which kernel.cc does not know");
  }
}

int __real_clock_gettime(clockid_t clock, timespec* time);
int __wrap_clock_gettime(clockid_t clock, timespec* time) {
  if (!is_simulated()) return __real_clock_gettime(clock, time);
  const int64_t now = scheduler().now_ns();
  *time = {.tv_sec = now / 1'000'000'000, .tv_nsec = now % 1'000'000'000};
  return 0;
}

int __real_sched_yield();
int __wrap_sched_yield() {
  if (!is_simulated()) return __real_sched_yield();
  scheduler().step("yields", 0);
  return 0;
}

int __wrap_sched_getaffinity(pid_t, size_t bytes, cpu_set_t* set) {
  memset(set, 0, bytes);
  for (int core = 0; core < scheduler().events().cores; ++core)
    CPU_SET(core, set);
  return 0;
}

int __real_posix_fallocate(int file, off_t offset, off_t bytes);
int __wrap_posix_fallocate(int file, off_t offset, off_t bytes) {
  return is_simulated() ? 0 : __real_posix_fallocate(file, offset, bytes);
}

int __real_pthread_mutex_lock(pthread_mutex_t* mutex);
int __wrap_pthread_mutex_lock(pthread_mutex_t* mutex) {
  if (!is_simulated()) return __real_pthread_mutex_lock(mutex);
  lock_mutex(mutex);
  return 0;
}

int __real_pthread_mutex_unlock(pthread_mutex_t* mutex);
int __wrap_pthread_mutex_unlock(pthread_mutex_t* mutex) {
  if (!is_simulated()) return __real_pthread_mutex_unlock(mutex);
  unlock_mutex(mutex);
  return 0;
}

int __wrap_pthread_sigmask(int, const sigset_t*, sigset_t*) { return 0; }

// Limits of the machine are read from files: here there are none.
int __real_open(const char* path, int flags, ...);
int __wrap_open(const char* path, int flags, ...) {
  return is_simulated() ? fail_with(ENOENT) : __real_open(path, flags);
}

// The C++ library calls these, where the linker's option has no effect; a
// program's own definitions take precedence.
int pthread_create(pthread_t* thread, const pthread_attr_t*,
                   void* (*run)(void*), void* argument) {
  Fiber& parent = scheduler().current();
  // Liveness threads are started before the schedule begins.
  const bool is_worker = scheduler().has_begun();
  Fiber& child = scheduler().spawn(
      (is_worker ? "worker of " : "liveness of ") + std::to_string(parent.rank),
      parent.rank, [run, argument] {
        run(argument);
        end_thread(scheduler().current());
      });
  child.is_worker = is_worker;
  scheduler().clocks().order(parent.index, child.index);
  *thread = static_cast<pthread_t>(child.index) + 1;
  return 0;
}

int pthread_join(pthread_t thread, void**) {
  Fiber& child = *scheduler().fibers()[thread - 1];
  Fiber& self = scheduler().current();
  while (child.state != Fiber::State::kEnded) {
    self.words[0] = &child;
    self.num_words = 1;
    scheduler().block("the end of a thread");
  }
  scheduler().clocks().order(child.index, self.index);
  return 0;
}

int pthread_detach(pthread_t) { return 0; }

pthread_t __real_pthread_self();
pthread_t __wrap_pthread_self() {
  if (!is_simulated()) return __real_pthread_self();
  return static_cast<pthread_t>(scheduler().current().index) + 1;
}

}  // extern "C"

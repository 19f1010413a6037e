#include "core/crash.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include "core/futex.h"
#include "core/model_memory.h"
#include "core/region.h"

namespace paceline {
namespace {

constexpr std::array kSignals = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};

SignalSafeList<CrashWatch::Group> groups;

/// How many times our handler can be installed on top of another one that is
/// itself on top of ours.
constexpr int kLevels = 4;

/// The handlers of one of kSignals. Each level has its own handler function, to
/// tell a handler above that restores the one below from one that does not:
/// otherwise two handlers that call each other would do so for ever.
struct Place {
  int level = -1;  ///< of our topmost handler; -1: none
  /// What each level replaced.
  std::array<struct sigaction, kLevels> previous = {};
};
std::array<Place, kSignals.size()> places;
int num_users = 0;

/// Held while the places change. Not a std::mutex: if a thread of the parent
/// held it at a fork, that thread does not exist in the child, which must be
/// able to take it.
class PlacesLock {
 public:
  PlacesLock() {
    const uint32_t own = fork_generation() + 1;
    uint32_t holder = word_.load(std::memory_order_relaxed);
    while (true) {
      if (holder == own) {
        sched_yield();
        holder = word_.load(std::memory_order_relaxed);
        // Acquire: pairs with the release below.
      } else if (word_.compare_exchange_weak(holder, own,
                                             std::memory_order_acquire)) {
        return;
      }
    }
  }
  // Release: the places are consistent again; pairs with the acquire above.
  ~PlacesLock() { word_.store(0, std::memory_order_release); }

 private:
  static Atomic<uint32_t> word_;
};
Atomic<uint32_t> PlacesLock::word_{0};

Place& place_of(int signal) {
  size_t i = 0;
  while (kSignals[i] != signal) ++i;
  return places[i];
}

/// Calls `visit` for each group that this process joined itself.
template <class Visit>
void for_own_groups(Visit visit) {
  const pid_t pid = getpid();
  const uint32_t generation = fork_generation();
  groups.visit([&](const CrashWatch::Group& group) {
    if (group.pid == pid && group.fork_generation == generation) visit(group);
  });
}

void explain_region_of_parent(const siginfo_t& info) {
  // si_code <= 0: a process sent the signal, and there is no address.
  if ((info.si_signo != SIGSEGV && info.si_signo != SIGBUS) ||
      info.si_code <= 0 || !lies_in_region_of_parent(info.si_addr))
    return;
  constexpr char kText[] =
      "paceline: this forked child used memory that only its parent shares "
      "with the other ranks: a gradient under gradient_as_bucket_view=True, or "
      "an array of Group.allocate(). Copy it before the fork (clone(), "
      "copy()), or use it in the parent alone.\n";
  static Atomic<pid_t> explained_in{0};  // another level of our handler may run
  if (explained_in.exchange(getpid()) == getpid()) return;
  [[maybe_unused]] const ssize_t written =
      write(STDERR_FILENO, kText, sizeof(kText) - 1);
}

using Handler = void (*)(int, siginfo_t*, void*);
extern const std::array<Handler, kLevels> handlers;

/// The level of our handler; -1: it is not ours.
int level_of(const struct sigaction& action) {
  if ((action.sa_flags & SA_SIGINFO) == 0) return -1;
  const auto found =
      std::find(handlers.begin(), handlers.end(), action.sa_sigaction);
  return found == handlers.end() ? -1
                                 : static_cast<int>(found - handlers.begin());
}

bool is_default(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL;
}

bool is_handler(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 ||
         (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

void set_default(int signal) {
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
}

void call(const struct sigaction& action, int signal, siginfo_t* info,
          void* context) {
  if ((action.sa_flags & SA_SIGINFO) != 0)
    action.sa_sigaction(signal, info, context);
  else
    action.sa_handler(signal);
}

/// Runs another library's handler. Returns whether the process survives: the
/// handler has returned, and has not restored the default action. If it has
/// restored our handler of a lower level, that one handles what follows.
bool survives(const struct sigaction& handler, int signal, siginfo_t* info,
              void* context) {
  static Atomic<uint32_t> count{0};
  const uint32_t number = count.fetch_add(1, std::memory_order_relaxed);
  const uint32_t word =
      static_cast<uint32_t>(signal) | (number << 8 & kCrashCount);
  for_own_groups([&](const CrashWatch::Group& group) {
    // Release; pairs with the acquire of LivenessThread::look_at().
    group.line->crash.store(word, std::memory_order_release);
  });
  // The signal stays blocked: a handler that restores the default and raises
  // the signal again does not end the process before it has returned here.
  call(handler, signal, info, context);
  struct sigaction now;
  if (sigaction(signal, nullptr, &now) == 0 && is_default(now)) return false;
  for_own_groups([&](const CrashWatch::Group& group) {
    end_crash(group.line->crash, word);
  });
  return true;
}

void end_own_groups(int signal) {
  for_own_groups([&](const CrashWatch::Group& group) {
    // Release: a rank that sees this one as dead also sees what it wrote
    // before; pairs with has_died().
    group.line->crash.store(static_cast<uint32_t>(signal) | kCrashIsFatal,
                            std::memory_order_release);
    abort_group(*group.header, Reason::kDied, group.rank, group.rank);
  });
}

template <int kLevel>
void on_crash(int signal, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  if (signal == SIGSEGV && info->si_code == SEGV_ACCERR &&
      allow_stray_write(info->si_addr)) {
    errno = saved_errno;
    return;
  }
  explain_region_of_parent(*info);
  const struct sigaction previous = place_of(signal).previous[kLevel];
  if (is_handler(previous) && (previous.sa_flags & SA_RESETHAND) != 0) {
    // SA_RESETHAND: the default action is in force while this handler runs.
    end_own_groups(signal);
    set_default(signal);
    sigset_t only;
    sigemptyset(&only);
    sigaddset(&only, signal);
    if ((previous.sa_flags & SA_NODEFER) != 0)
      pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
    call(previous, signal, info, context);
    errno = saved_errno;
    return;
  }
  if (is_handler(previous) && survives(previous, signal, info, context)) {
    errno = saved_errno;
    return;
  }
  end_own_groups(signal);
  // Do what would have happened without our handler: deliver the same signal
  // again, with the same cause, as soon as this handler returns.
  set_default(signal);
  const auto thread = static_cast<pid_t>(syscall(SYS_gettid));
  if (syscall(SYS_rt_tgsigqueueinfo, getpid(), thread, signal, info) != 0)
    syscall(SYS_tgkill, getpid(), thread, signal);
  errno = saved_errno;
}

const std::array<Handler, kLevels> handlers = {on_crash<0>, on_crash<1>,
                                               on_crash<2>, on_crash<3>};

/// Gives an alternate signal stack to the first thread that joins a group: a
/// handler needs one when the thread's own stack has overflown. It is large
/// enough for other libraries' handlers that write a report, such as Paddle's:
/// they run on it because ours does, and would silently overflow a smaller one,
/// such as faulthandler's 10 KiB on the heap. Other threads have an alternate
/// stack only if other code gave them one.
void give_alternate_stack() {
  constexpr size_t kBytes = 256 * 1024;
  static Atomic<bool> is_made{false};
  thread_local void* ours = nullptr;  // of the thread that it was made for
  stack_t current;
  if (sigaltstack(nullptr, &current) != 0) return;
  const bool has_one = (current.ss_flags & SS_DISABLE) == 0;
  if (has_one && current.ss_size >= kBytes) return;
  if (ours == nullptr) {
    if (is_made.exchange(true)) return;
    // Never freed: the thread may end, or install another stack, at any time.
    void* const mapped =
        mmap(nullptr, page_bytes() + kBytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return;
    mprotect(mapped, page_bytes(), PROT_NONE);  // a guard page below the stack
    ours = static_cast<char*>(mapped) + page_bytes();
  }
  const stack_t stack = {.ss_sp = ours, .ss_flags = 0, .ss_size = kBytes};
  // The owner of a smaller stack sees that it is not in use when it frees it
  // (faulthandler does). The call fails within a handler that runs on that
  // stack.
  sigaltstack(&stack, nullptr);
}

bool is_wanted() {
  const char* choice = getenv("PACELINE_CRASH_HANDLERS");
  return choice == nullptr || strcmp(choice, "0") != 0;
}

void put_in_place(int signal) {
  Place& place = place_of(signal);
  struct sigaction current;
  if (sigaction(signal, nullptr, &current) != 0 || level_of(current) >= 0)
    return;
  if (!is_default(current) && !is_handler(current)) return;  // ignored
  // Below another library's handler there may be ours, or that library may have
  // dropped it: only the default action is certain.
  const int level = is_default(current) ? 0 : place.level + 1;
  if (level == kLevels) return;
  place.previous[static_cast<size_t>(level)] = current;
  struct sigaction ours = current;  // keeps its signal mask
  ours.sa_sigaction = handlers[static_cast<size_t>(level)];
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | (current.sa_flags & SA_RESTART);
  if (sigaction(signal, &ours, nullptr) == 0) place.level = level;
}

void put_away(int signal) {
  Place& place = place_of(signal);
  struct sigaction current;
  if (sigaction(signal, nullptr, &current) != 0) return;
  const int level = level_of(current);
  if (level < 0) return;  // ours may be below the current one
  if (sigaction(signal, &place.previous[static_cast<size_t>(level)], nullptr) ==
      0)
    place.level = level - 1;
}

}  // namespace

void abort_group(Header& header, Reason reason, int by, int culprit) {
  uint32_t none = 0;
  // Release: publishes the message, the late ranks and the waiting time of rank
  // `by`; pairs with Session::fail_from_abort().
  header.abort.compare_exchange_strong(none, pack_abort(reason, by, culprit),
                                       std::memory_order_acq_rel);
  futex_wake(header.abort, kWakeAll);
}

CrashHandlers::CrashHandlers() : fork_generation_(fork_generation()) {
  static const int refused = pthread_atfork(nullptr, nullptr, [] {
    groups.forget_walkers();
    forget_walkers_of_models();
  });
  if (refused != 0) {
    throw Failure{.reason = Reason::kNoMemory,
                  .message = "registering a handler for fork: " +
                             std::string(strerror(refused))};
  }
  const PlacesLock lock;
  ++num_users;
  if (!is_wanted()) return;
  give_alternate_stack();
  for (const int signal : kSignals) put_in_place(signal);
}

CrashHandlers::~CrashHandlers() {
  if (fork_generation_ != fork_generation()) return;
  const PlacesLock lock;
  if (--num_users > 0) return;
  for (const int signal : kSignals) put_away(signal);
}

CrashWatch::CrashWatch(Header& header, RankLine& line, int rank)
    : fork_generation_(fork_generation()),
      entry_(groups.put({&header, &line, rank, getpid(), fork_generation_})) {}

CrashWatch::~CrashWatch() {
  if (fork_generation_ == fork_generation()) groups.take_out(entry_);
}

}  // namespace paceline

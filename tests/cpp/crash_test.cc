// Crashes: reported to the others before the process is gone, and passed on to
// other handlers.

#include "core/crash.h"

#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <new>
#include <optional>
#include <string>

#include "check.h"
#include "core/clock.h"
#include "core/futex.h"
#include "core/liveness_thread.h"

namespace paceline {
namespace {

constexpr size_t kPage = size_t{64} << 10;
constexpr uint32_t kCrashed = pack_abort(Reason::kDied, 1, 1);

void* map(int protection, int flags) {
  void* mapped = mmap(nullptr, kPage, protection, flags | MAP_ANONYMOUS, -1, 0);
  CHECK(mapped != MAP_FAILED);
  return mapped;
}

/// The words of a group of two, which processes share. Only rank 1 is in it, so
/// no other rank can have set the abort word.
struct Shared {
  Header header;
  RankLine lines[2];
};

struct Ended {
  int status;
  uint32_t abort_word;
  uint32_t crash;
  std::string errors;  ///< what it wrote to stderr
};

/// How a forked process ends that runs `program` as rank 1.
Ended run_rank(const std::function<void(Shared&)>& program) {
  static_assert(sizeof(Shared) < kPage);
  auto* shared = new (map(PROT_READ | PROT_WRITE, MAP_SHARED)) Shared{};
  int pipe_ends[2];
  CHECK_EQ(pipe(pipe_ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(pipe_ends[1], STDERR_FILENO);
    close(pipe_ends[0]);
    close(pipe_ends[1]);
    // Sanitizers have their own handlers.
    for (const int each : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT})
      ::signal(each, SIG_DFL);
    program(*shared);
    _exit(0);
  }
  close(pipe_ends[1]);
  std::string errors;
  char text[512];
  for (ssize_t n; (n = read(pipe_ends[0], text, sizeof(text))) > 0;)
    errors.append(text, static_cast<size_t>(n));
  close(pipe_ends[0]);
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  const Ended ended{
      WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status),
      shared->header.abort.load(), shared->lines[1].crash.load(), errors};
  munmap(shared, kPage);
  return ended;
}

void* no_access = nullptr;

/// Reads memory that may not be read; continues if a handler has made it
/// readable.
void touch_forbidden_memory() {
  no_access = map(PROT_NONE, MAP_PRIVATE);
  [[maybe_unused]] const char byte = *static_cast<volatile char*>(no_access);
}

void set_handler(int signal, void (*handler)(int, siginfo_t*, void*),
                 int flags = 0) {
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | flags;
  sigaction(signal, &action, nullptr);
}

TEST(a_crash_is_reported_before_the_process_is_gone) {
  const Ended fault = run_rank([](Shared& shared) {
    LivenessThread liveness(shared.header, shared.lines, 1);
    touch_forbidden_memory();
  });
  CHECK_EQ(fault.status, -SIGSEGV);
  CHECK_EQ(fault.abort_word, kCrashed);
  CHECK_EQ(fault.crash, kCrashIsFatal | SIGSEGV);
  CHECK(fault.errors.empty());
  const Ended aborted = run_rank([](Shared& shared) {
    LivenessThread liveness(shared.header, shared.lines, 1);
    abort();
  });
  CHECK_EQ(aborted.status, -SIGABRT);
  CHECK_EQ(aborted.abort_word, kCrashed);
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) {
    const Ended sent = run_rank([&](Shared& shared) {
      LivenessThread liveness(shared.header, shared.lines, 1);
      kill(getpid(), signal);
      pause();
    });
    CHECK_EQ(sent.status, -signal);
    CHECK_EQ(sent.abort_word, kCrashed);
  }
}

/// Like Paddle's, whose report takes more stack than faulthandler allocates.
__attribute__((no_sanitize_address)) void report(int, siginfo_t*, void*) {
  volatile char text[64 << 10];
  for (size_t i = 0; i < sizeof(text); i += 512) text[i] = 1;
  _exit(text[0] == 1 ? 7 : 8);
}

TEST(a_handler_that_needs_much_stack_has_it) {
  const Ended ended = run_rank([](Shared& shared) {
    // Like faulthandler's, but with a page below that reveals an overflow.
    constexpr size_t kSmall = 12 << 10;
    char* const below = static_cast<char*>(map(PROT_NONE, MAP_PRIVATE));
    char* const small = below + kPage - (16 << 10);
    CHECK_EQ(mprotect(small, 16 << 10, PROT_READ | PROT_WRITE), 0);
    const stack_t stack = {.ss_sp = small, .ss_flags = 0, .ss_size = kSmall};
    CHECK_EQ(sigaltstack(&stack, nullptr), 0);
    set_handler(SIGSEGV, report);  // does not ask for the alternate stack
    LivenessThread liveness(shared.header, shared.lines, 1);
    CHECK_EQ(sigaltstack(&stack, nullptr), 0);  // as another library
    LivenessThread again(shared.header, shared.lines, 1);
    touch_forbidden_memory();
  });
  CHECK_EQ(ended.status, 7);
}

// AddressSanitizer would put the array elsewhere.
__attribute__((no_sanitize_address)) int overflow(int calls,
                                                  volatile char* above) {
  volatile char here[4096];
  here[0] = above != nullptr ? above[0] : 0;
  return calls == 0 ? 0 : overflow(calls - 1, here) + here[0];
}

TEST(an_overflow_of_the_first_threads_stack_is_reported) {
  const Ended ended = run_rank([](Shared& shared) {
    // As in a program to which no sanitizer has given a stack.
    const stack_t none = {
        .ss_sp = nullptr, .ss_flags = SS_DISABLE, .ss_size = 0};
    sigaltstack(&none, nullptr);
    LivenessThread liveness(shared.header, shared.lines, 1);
    const rlimit limit = {size_t{8} << 20, size_t{8} << 20};
    setrlimit(RLIMIT_STACK, &limit);
    overflow(1 << 20, nullptr);
  });
  CHECK_EQ(ended.status, -SIGSEGV);
  CHECK_EQ(ended.abort_word, kCrashed);
}

TEST(a_signal_that_is_ignored_stays_ignored) {
  const Ended ended = run_rank([](Shared& shared) {
    ::signal(SIGABRT, SIG_IGN);
    LivenessThread liveness(shared.header, shared.lines, 1);
    kill(getpid(), SIGABRT);
  });
  CHECK_EQ(ended.status, 0);
  CHECK_EQ(ended.abort_word, 0u);
}

TEST(a_handler_that_makes_it_good_is_no_crash) {
  const Ended ended = run_rank([](Shared& shared) {
    set_handler(SIGSEGV, [](int, siginfo_t* info, void*) {
      CHECK(info->si_addr == no_access);
      mprotect(no_access, kPage, PROT_READ);
    });
    LivenessThread liveness(shared.header, shared.lines, 1);
    for (int i = 0; i < 3; ++i) touch_forbidden_memory();
  });
  CHECK_EQ(ended.status, 0);
  CHECK_EQ(ended.abort_word, 0u);
  CHECK_EQ(ended.crash, 0u);
}

void report_and_die(int signal, siginfo_t*, void*) {
  [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, "report\n", 7);
  ::signal(signal, SIG_DFL);
  raise(signal);
}

TEST(a_handler_that_jumps_out_is_no_crash) {
  static sigjmp_buf away;
  const Ended ended = run_rank([](Shared& shared) {
    set_handler(SIGSEGV, [](int, siginfo_t*, void*) { siglongjmp(away, 1); });
    LivenessThread liveness(shared.header, shared.lines, 1);
    LivenessThread peer(shared.header, shared.lines, 0);
    if (sigsetjmp(away, 1) == 0) touch_forbidden_memory();
    const int64_t until = now_ns() + kSilenceNs + 2'000'000'000;
    while (now_ns() < until && shared.header.abort.load() == 0) {
      const FutexWait wait[] = {{&shared.header.abort, 0}};
      futex_wait_any(wait, until);
    }
  });
  CHECK_EQ(ended.status, 0);
  CHECK_EQ(ended.abort_word, 0u);
}

TEST(a_handler_that_was_there_reports_and_dies) {
  for (const unsigned flags :
       {0u, unsigned{SA_NODEFER}, unsigned{SA_NODEFER} | SA_RESETHAND}) {
    const Ended ended = run_rank([&](Shared& shared) {
      set_handler(SIGSEGV, report_and_die, static_cast<int>(flags));
      LivenessThread liveness(shared.header, shared.lines, 1);
      touch_forbidden_memory();
    });
    CHECK(ended.errors == "report\n");
    CHECK_EQ(ended.status, -SIGSEGV);
    CHECK_EQ(ended.abort_word, kCrashed);
  }
}

struct sigaction below = {};

void report_and_restore(int signal, siginfo_t*, void*) {
  [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, "report\n", 7);
  sigaction(signal, &below, nullptr);
  raise(signal);
}

TEST(a_handler_that_comes_later_restores_ours) {
  for (const int num_groups : {1, 2}) {
    const Ended ended = run_rank([&](Shared& shared) {
      LivenessThread liveness(shared.header, shared.lines, 1);
      sigaction(SIGSEGV, nullptr, &below);
      set_handler(SIGSEGV, report_and_restore);
      // With the other one, our handler is on top again, and must not be called
      // forever.
      std::optional<CrashWatch> other;
      if (num_groups == 2) other.emplace(shared.header, shared.lines[1], 1);
      touch_forbidden_memory();
    });
    CHECK(ended.errors == "report\n");
    CHECK_EQ(ended.status, -SIGSEGV);
    CHECK_EQ(ended.abort_word, kCrashed);
  }
}

TEST(all_of_several_handlers_report) {
  const Ended ended = run_rank([](Shared& shared) {
    set_handler(SIGSEGV, report_and_die);
    LivenessThread liveness(shared.header, shared.lines, 1);
    sigaction(SIGSEGV, nullptr, &below);
    set_handler(SIGSEGV, report_and_restore);
    const CrashWatch other(shared.header, shared.lines[1], 1);
    touch_forbidden_memory();
  });
  CHECK(ended.errors == "report\nreport\n");
  CHECK_EQ(ended.status, -SIGSEGV);
  CHECK_EQ(ended.abort_word, kCrashed);
}

TEST(a_handler_that_comes_later_calls_ours) {
  const Ended ended = run_rank([](Shared& shared) {
    LivenessThread liveness(shared.header, shared.lines, 1);
    sigaction(SIGSEGV, nullptr, &below);
    set_handler(SIGSEGV, [](int signal, siginfo_t* info, void* context) {
      below.sa_sigaction(signal, info, context);
    });
    const CrashWatch other(shared.header, shared.lines[1], 1);
    touch_forbidden_memory();
  });
  CHECK_EQ(ended.status, -SIGSEGV);
  CHECK_EQ(ended.abort_word, kCrashed);
}

TEST(a_handler_that_comes_later_and_forgets_ours) {
  const Ended ended = run_rank([](Shared& shared) {
    LivenessThread liveness(shared.header, shared.lines, 1);
    set_handler(SIGSEGV, report_and_die);
    // As a group that is joined after Paddle was imported.
    const CrashWatch other(shared.header, shared.lines[1], 1);
    touch_forbidden_memory();
  });
  CHECK(ended.errors == "report\n");
  CHECK_EQ(ended.status, -SIGSEGV);
  CHECK_EQ(ended.abort_word, kCrashed);
}

TEST(groups_that_come_and_go_below_a_handler_do_not_pile_up) {
  const Ended ended = run_rank([](Shared& shared) {
    std::optional<CrashWatch> first;
    first.emplace(shared.header, shared.lines[1], 1);
    sigaction(SIGSEGV, nullptr, &below);
    set_handler(SIGSEGV, report_and_restore);
    first.reset();
    for (int i = 0; i < 20; ++i) {
      const CrashWatch again(shared.header, shared.lines[1], 1);
      struct sigaction now;
      sigaction(SIGSEGV, nullptr, &now);
      CHECK(now.sa_sigaction != report_and_restore);
    }
    struct sigaction now;
    sigaction(SIGSEGV, nullptr, &now);
    CHECK(now.sa_sigaction == report_and_restore);
  });
  CHECK_EQ(ended.status, 0);
}

TEST(a_forked_child_ends_no_group) {
  const Ended ended = run_rank([](Shared& shared) {
    LivenessThread liveness(shared.header, shared.lines, 1);
    const pid_t child = fork();
    if (child == 0) {
      touch_forbidden_memory();
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    _exit(WIFSIGNALED(status) ? WTERMSIG(status) : 0);
  });
  CHECK_EQ(ended.status, SIGSEGV);
  CHECK(ended.abort_word != kCrashed);
  CHECK_EQ(ended.crash, 0u);
}

TEST(handlers_go_with_the_last_group) {
  const Ended ended = run_rank([](Shared& shared) {
    set_handler(SIGBUS, report_and_die);
    struct sigaction before[2];
    sigaction(SIGSEGV, nullptr, &before[0]);
    sigaction(SIGBUS, nullptr, &before[1]);
    struct sigaction now;
    for (int round = 0; round < 2; ++round) {
      {
        LivenessThread liveness(shared.header, shared.lines, 1);
        sigaction(SIGSEGV, nullptr, &now);
        CHECK(now.sa_sigaction != before[0].sa_sigaction);
      }
      sigaction(SIGSEGV, nullptr, &now);
      CHECK(now.sa_handler == SIG_DFL);
      sigaction(SIGBUS, nullptr, &now);
      CHECK(now.sa_sigaction == report_and_die);
    }
    {
      LivenessThread liveness(shared.header, shared.lines, 1);
      set_handler(SIGSEGV, report_and_die);
    }
    sigaction(SIGSEGV, nullptr, &now);
    CHECK(now.sa_sigaction == report_and_die);
  });
  CHECK(ended.errors.empty());
  CHECK_EQ(ended.status, 0);
}

TEST(they_can_be_done_without) {
  const Ended ended = run_rank([](Shared& shared) {
    setenv("PACELINE_CRASH_HANDLERS", "0", 1);
    LivenessThread liveness(shared.header, shared.lines, 1);
    touch_forbidden_memory();
  });
  CHECK_EQ(ended.status, -SIGSEGV);
  CHECK_EQ(ended.crash, 0u);
}

TEST(a_crash_that_ends_in_another_librarys_handler_counts_as_a_death) {
  auto* shared = new (map(PROT_READ | PROT_WRITE, MAP_SHARED)) Shared{};
  {
    LivenessThread liveness(shared->header, shared->lines, 0);
    RankLine& line = shared->lines[1];
    line.life = 7 | FUTEX_WAITERS;
    const int64_t start = now_ns();
    line.crash = 5 << 8 | SIGSEGV;
    const auto is_over = [&] { return shared->header.abort.load() != 0; };
    while (!is_over() && now_ns() - start < 60'000'000'000) {
      const FutexWait wait[] = {{&shared->header.abort, 0}};
      futex_wait_any(wait, now_ns() + 100'000'000);
    }
    CHECK_EQ(shared->header.abort.load(), pack_abort(Reason::kDied, 0, 1));
    CHECK(now_ns() - start >= kSilenceNs);
    CHECK(has_died(line));
  }
  munmap(shared, kPage);
}

}  // namespace
}  // namespace paceline

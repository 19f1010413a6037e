// The one copy of a model's values: two mappings, writes that take effect
// entirely or not at all, and writes that were not announced.

#include "core/model_memory.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "core/failure.h"
#include "core/region.h"

namespace paceline {
namespace {

/// Two ranks of a host, as this process sees both.
struct Pair {
  explicit Pair(size_t bytes) {
    const int fd = ModelMemory::create(bytes);
    first = std::make_unique<ModelMemory>(fd);
    second = std::make_unique<ModelMemory>(fd);
    close(fd);
    first->reserve_share(0, 2);
    second->reserve_share(1, 2);
  }
  std::unique_ptr<ModelMemory> first, second;
};

TEST(writable_and_values_are_the_same_memory_on_all_ranks) {
  const Pair pair(3 * page_bytes() - 1);
  CHECK_EQ(pair.first->size(), 3 * page_bytes());
  pair.first->writable()[page_bytes()] = std::byte{7};
  CHECK(pair.first->values()[page_bytes()] == std::byte{7});
  CHECK(pair.second->values()[page_bytes()] == std::byte{7});
}

TEST(each_rank_puts_memory_behind_its_share_alone) {
  constexpr size_t kPages = 11, kRanks = 4;
  const int fd = ModelMemory::create(kPages * page_bytes());
  ModelMemory memory(fd);
  const auto pages_with_memory = [fd] {
    struct stat status;
    CHECK_EQ(fstat(fd, &status), 0);
    return static_cast<size_t>(status.st_blocks) * 512 / page_bytes();
  };
  CHECK_EQ(pages_with_memory(), size_t{0});
  size_t before = 0;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    memory.reserve_share(rank, kRanks);
    const size_t own = pages_with_memory() - before;
    CHECK(own == kPages / kRanks || own == kPages / kRanks + 1);
    memory.reserve_share(rank, kRanks);  // no other rank's
    before = pages_with_memory();
    memory.writable()[(before - 1) * page_bytes()] = std::byte{1};
    CHECK_EQ(pages_with_memory(), before);  // they lie one after the other
  }
  CHECK_EQ(before, kPages);
  close(fd);

  const int small = ModelMemory::create(1);  // fewer pages than ranks
  ModelMemory page(small);
  for (size_t rank = 0; rank < kRanks; ++rank) page.reserve_share(rank, kRanks);
  struct stat status;
  CHECK_EQ(fstat(small, &status), 0);
  CHECK_EQ(static_cast<size_t>(status.st_blocks) * 512, page_bytes());
  close(small);
}

TEST(announced_writes_are_seen_when_they_are_published) {
  const Pair pair(4 * page_bytes());
  pair.first->begin_writing();
  pair.first->values()[0] = std::byte{1};
  pair.first->values()[2 * page_bytes()] = std::byte{2};
  pair.first->values()[3 * page_bytes()] = std::byte{3};
  CHECK(pair.second->values()[0] == std::byte{0});
  const std::vector<ModelMemory::Run> changes = pair.first->changes();
  CHECK_EQ(changes.size(), size_t{2});
  CHECK_EQ(changes[1].begin, 2 * page_bytes());
  CHECK_EQ(changes[1].bytes, 2 * page_bytes());
  pair.first->publish(changes);
  pair.first->end_writing();
  for (ModelMemory* memory : {pair.first.get(), pair.second.get()}) {
    CHECK(memory->values()[0] == std::byte{1});
    CHECK(memory->values()[3 * page_bytes()] == std::byte{3});
  }
}

TEST(announced_writes_that_are_not_published_are_gone) {
  const Pair pair(page_bytes());
  pair.second->begin_writing();
  pair.second->values()[5] = std::byte{1};
  pair.second->end_writing();
  CHECK(pair.second->values()[5] == std::byte{0});
  CHECK(pair.second->changes().empty());
}

/// Runs in a forked process, without the handlers of sanitizers.
int exit_status_of(int (*program)()) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL);
    _exit(program());
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

volatile int num_strays = 0;  // set by a signal handler

TEST(stray_write_goes_on_alone_and_is_undone) {
  CHECK_EQ(exit_status_of([] {
             const Pair pair(2 * page_bytes());
             set_stray_write_listener([] { num_strays = num_strays + 1; });
             auto* values =
                 const_cast<volatile std::byte*>(pair.first->values());
             values[page_bytes() + 9] = std::byte{4};
             values[3] = std::byte{4};
             if (num_strays != 1 || values[page_bytes() + 9] != std::byte{4})
               return 1;
             if (pair.second->values()[page_bytes() + 9] != std::byte{0})
               return 2;
             if (pair.first->take_stray_write() !=
                 static_cast<int64_t>(page_bytes()) + 9)
               return 3;
             if (values[page_bytes() + 9] != std::byte{0}) return 4;
             return pair.first->take_stray_write() == -1 ? 0 : 5;
           }),
           0);
}

TEST(stray_write_without_a_listener_is_a_crash) {
  CHECK_EQ(exit_status_of([] {
             const Pair pair(page_bytes());
             set_stray_write_listener(nullptr);
             *const_cast<volatile std::byte*>(pair.first->values()) =
                 std::byte{1};
             return 0;
           }),
           128 + SIGSEGV);
}

TEST(forked_child_reads_the_values) {
  static Pair* pair = new Pair(page_bytes());
  pair->first->writable()[1] = std::byte{9};
  CHECK_EQ(exit_status_of([] {
             return pair->second->values()[1] == std::byte{9} ? 0 : 1;
           }),
           0);
  delete pair;
}

TEST(too_little_memory_is_reported_before_any_is_taken) {
  bool has_thrown = false;
  try {
    ModelMemory::create(size_t{1} << 50);
  } catch (const Failure& failure) {
    has_thrown = failure.reason == Reason::kNoMemory &&
                 failure.message.find("are needed") != std::string::npos;
  }
  CHECK(has_thrown);
}

}  // namespace
}  // namespace paceline

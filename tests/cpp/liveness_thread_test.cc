// Sleeping on words, and noticing deaths.

#include "core/liveness_thread.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "core/clock.h"
#include "core/futex.h"
#include "core/region.h"
#include "group_world.h"
#include "ranks.h"

namespace paceline {
namespace {

constexpr int64_t kMs = 1'000'000;

TEST(a_sleep_ends_at_its_deadline) {
  for (const bool disabled : {false, true}) {
    disable_futex_waitv(disabled);
    CHECK(!disabled || !has_futex_waitv());
    std::atomic<uint32_t> word{5};
    const int64_t start = now_ns();
    const FutexWait wait[] = {{&word, 5}};
    // Without futex_waitv a sleep is cut into slices.
    while (futex_wait_any(wait, start + 50 * kMs) != FutexResult::kTimedOut) {
    }
    CHECK(now_ns() - start >= 50 * kMs);
    CHECK(futex_wait_any(wait, 0) == FutexResult::kTimedOut);
    const FutexWait differs[] = {{&word, 4}};
    CHECK(futex_wait_any(differs, now_ns() + 60'000 * kMs) ==
          FutexResult::kWoken);
  }
  disable_futex_waitv(false);
}

TEST(any_of_the_words_ends_a_sleep) {
  std::vector<std::atomic<uint32_t>> words(kMaxFutexWaits);
  for (const int woken : {0, 1, kMaxFutexWaits - 1}) {
    // The fallback sleeps on the first word alone and polls the others.
    for (const bool disabled : {false, true}) {
      disable_futex_waitv(disabled);
      for (auto& word : words) word = 0;
      testing::run_ranks(2, [&](int rank) {
        std::atomic<uint32_t>& word = words[static_cast<size_t>(woken)];
        if (rank == 0) {
          word.store(1, std::memory_order_seq_cst);
          futex_wake(word, kWakeAll);
          return;
        }
        std::vector<FutexWait> waits;
        for (auto& each : words) waits.push_back({&each, 0});
        while (word.load(std::memory_order_acquire) == 0)
          futex_wait_any(waits, now_ns() + 60'000 * kMs);
      });
    }
  }
  disable_futex_waitv(false);
}

/// The words of a group, in ordinary memory: its ranks are threads.
struct Words {
  explicit Words(size_t ranks)
      : header(new Header{}), lines(new RankLine[ranks]{}), count(ranks) {}
  std::span<RankLine> span() { return {lines.get(), count}; }
  uint32_t abort_word() { return header->abort.load(); }

  std::unique_ptr<Header> header;
  std::unique_ptr<RankLine[]> lines;
  size_t count;
};

int64_t wait_for_abort(Words& words) {
  const int64_t start = now_ns();
  while (words.abort_word() == 0 && now_ns() - start < 20'000 * kMs) {
    const FutexWait wait[] = {{&words.header->abort, 0}};
    futex_wait_any(wait, now_ns() + 20 * kMs);
  }
  return now_ns() - start;
}

TEST(a_rank_that_leaves_is_no_death) {
  Words words(2);
  LivenessThread survivor(*words.header, words.span(), 0);
  {
    LivenessThread leaving(*words.header, words.span(), 1);
    CHECK((words.lines[1].life.load() & FUTEX_WAITERS) != 0);
    CHECK(!has_died(words.lines[1]));
  }
  CHECK_EQ(words.lines[1].life.load(), kLifeLeft);
  CHECK_EQ(words.header->departures.load(), 1u);
  CHECK_EQ(words.abort_word(), 0u);
}

TEST(a_death_ends_the_group) {
  for (const bool disabled : {false, true}) {
    disable_futex_waitv(disabled);
    Words words(3);
    LivenessThread first(*words.header, words.span(), 0);
    LivenessThread second(*words.header, words.span(), 1);
    LivenessThread third(*words.header, words.span(), 2);
    second.die();
    CHECK(wait_for_abort(words) < 5'000 * kMs);
    CHECK(has_died(words.lines[1]));
    const uint32_t word = words.abort_word();
    CHECK_EQ(word >> 16, static_cast<uint32_t>(Reason::kDied));
    CHECK_EQ(word & 0xff, 1u);
  }
  disable_futex_waitv(false);
}

TEST(the_kernel_marks_what_a_dead_thread_held) {
  CHECK(has_robust_list());
  disable_robust_list(true);
  CHECK(!has_robust_list());
  disable_robust_list(false);
}

/// The line of /proc/self/maps with this address; empty: nothing is mapped
/// there.
std::string mapping_at(const void* address) {
  FILE* maps = fopen("/proc/self/maps", "re");
  CHECK(maps != nullptr);
  const auto at = reinterpret_cast<uintptr_t>(address);
  char line[1024];
  std::string found;
  while (found.empty() && fgets(line, sizeof(line), maps) != nullptr) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    CHECK_EQ(sscanf(line, "%" SCNxPTR "-%" SCNxPTR, &begin, &end), 2);
    if (begin <= at && at < end) found = line;
  }
  fclose(maps);
  return found;
}

// The out-of-memory killer takes away the private memory of a dying process
// before its threads end. Shared memory stays, and the kernel still finds the
// words that it must mark.
TEST(what_the_kernel_reads_at_a_death_lies_in_shared_memory) {
  testing::run_group(2, [](HostGroup& group) {
    const Session& session = group.session;
    const uint32_t thread = session.line(session.rank()).life & FUTEX_TID_MASK;
    const robust_list_head* head = nullptr;
    size_t bytes = 0;
    CHECK_EQ(syscall(SYS_get_robust_list, thread, &head, &bytes), 0);
    const void* const node = head->list.next;
    CHECK(node != head);
    const void* const word =
        reinterpret_cast<const std::byte*>(node) + head->futex_offset;
    CHECK_EQ(word, &session.line(session.rank()).life);
    for (const void* each : {static_cast<const void*>(head), node, word}) {
      const std::string mapping = mapping_at(each);
      CHECK(mapping.find(" rw-s ") != std::string::npos);
      CHECK(mapping.find("memfd:paceline") != std::string::npos);
    }
  });
}

/// A region for the file locks alone; the words lie elsewhere.
Region locks() {
  const int fd = Region::create(1 << 20);
  struct Closing {
    int fd;
    ~Closing() { close(fd); }
  } closing{fd};
  return Region(fd);
}

TEST(a_death_is_seen_where_the_kernel_does_not_mark_it) {
  const Region region = locks();
  Words words(3);
  LivenessThread first(*words.header, words.span(), 0, &region);
  disable_robust_list(true);
  LivenessThread second(*words.header, words.span(), 1, &region);
  {
    LivenessThread third(*words.header, words.span(), 2, &region);
    CHECK(words.lines[0].check.load() == LivenessCheck::kKernel);
    CHECK(words.lines[1].check.load() == LivenessCheck::kFileLock);
    CHECK(words.lines[2].check.load() == LivenessCheck::kFileLock);
  }
  disable_robust_list(false);
  CHECK_EQ(words.lines[2].life.load(), kLifeLeft);
  CHECK_EQ(words.abort_word(), 0u);
  second.die();
  CHECK(wait_for_abort(words) < 5'000 * kMs);
  CHECK(has_died(words.lines[1]));
  CHECK_EQ(words.abort_word(), pack_abort(Reason::kDied, 0, 1));
}

TEST(without_any_check_a_death_is_not_seen_and_no_rank_is_blamed) {
  disable_robust_list(true);
  Words words(2);
  LivenessThread first(*words.header, words.span(), 0);
  LivenessThread second(*words.header, words.span(), 1);
  disable_robust_list(false);
  CHECK(words.lines[1].check.load() == LivenessCheck::kNone);
  second.die();
  CHECK_EQ(words.abort_word(), 0u);
}

TEST(deaths_of_all_but_one_reach_the_last) {
  constexpr size_t kRanks = 16;
  for (int repeat = 0; repeat < 20; ++repeat) {
    Words words(kRanks);
    std::vector<std::unique_ptr<LivenessThread>> threads;
    for (size_t r = 0; r < kRanks; ++r)
      threads.push_back(std::make_unique<LivenessThread>(
          *words.header, words.span(), static_cast<int>(r)));
    testing::run_ranks(kRanks - 1, [&](int rank) {
      threads[static_cast<size_t>(rank) + 1]->die();
    });
    wait_for_abort(words);
    CHECK_EQ(words.abort_word() >> 16, static_cast<uint32_t>(Reason::kDied));
  }
}

TEST(the_first_reason_stays) {
  Words words(2);
  abort_group(*words.header, Reason::kDeadline, 1, 0);
  abort_group(*words.header, Reason::kDied, 0, 1);
  CHECK_EQ(words.abort_word(), pack_abort(Reason::kDeadline, 1, 0));
}

}  // namespace
}  // namespace paceline

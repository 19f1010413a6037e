// Allocation: the same offset everywhere, zeroed, freed in any order.

#include <string.h>

#include <random>
#include <vector>

#include "check.h"
#include "collectives/all_reduce.h"
#include "collectives/barrier.h"
#include "group_world.h"

namespace paceline {
namespace {

using testing::failure_of;
using testing::run_group;

TEST(blocks_are_alike_on_all_ranks_and_freed_in_any_order) {
  run_group(3, [](HostGroup& group) {
    std::mt19937 shared(5);
    std::mt19937 own(50 + static_cast<unsigned>(group.rank()));
    std::vector<std::pair<size_t, size_t>> blocks;
    for (int call = 0; call < 150; ++call) {
      if (shared() % 3 != 0 || blocks.size() < 3) {
        const size_t bytes = shared() % 20000 + 1;
        const size_t offset = group.heap.allocate(bytes, -1);
        uint64_t word = offset;  // the same everywhere
        all_reduce(group.calls, &word, 1, DType::kInt64, ReduceOp::kMax, 1, -1);
        CHECK_EQ(word, offset);
        std::byte* memory = group.session.slab(group.rank()) + offset;
        for (size_t i = 0; i < bytes; i += 97)
          CHECK_EQ(static_cast<int>(memory[i]), 0);
        memset(memory, 1 + group.rank(), bytes);
        blocks.emplace_back(offset, bytes);
      } else {
        // Ranks agree on the three arrays that they free, not on their order.
        std::vector<size_t> victims(blocks.size());
        for (size_t i = 0; i < victims.size(); ++i) victims[i] = i;
        std::shuffle(victims.begin(), victims.end(), shared);
        victims.resize(3);
        std::vector<size_t> mine = victims;
        std::shuffle(mine.begin(), mine.end(), own);
        for (const size_t each : mine) {
          const auto [offset, bytes] = blocks[each];
          const std::byte* memory = group.session.slab(group.rank()) + offset;
          CHECK_EQ(static_cast<int>(memory[bytes - 1]), 1 + group.rank());
          group.heap.free(offset);
        }
        std::sort(victims.rbegin(), victims.rend());
        for (const size_t each : victims)
          blocks.erase(blocks.begin() + static_cast<ptrdiff_t>(each));
      }
    }
  });
}

TEST(memory_that_others_still_read_stays) {
  run_group(2, [](HostGroup& group) {
    const size_t offset = group.heap.allocate(100, -1);
    auto* word = reinterpret_cast<std::atomic<uint32_t>*>(
        group.session.slab(0) + offset);
    if (group.rank() == 0) {
      word->store(7);
      group.heap.free(offset, true);
      barrier(group.calls, -1);
    } else {
      barrier(group.calls, -1);
      CHECK_EQ(word->load(), 7u);
      group.heap.free(offset, true);
    }
    barrier(group.calls, -1);
    // Used again, it is zeroed.
    CHECK_EQ(group.heap.allocate(100, -1), offset);
    CHECK_EQ(word->load(), 0u);
  });
}

TEST(what_there_is_no_room_for_is_refused_everywhere) {
  run_group(3, [](HostGroup& group) {
    const size_t sizes[] = {size_t{1} << 30, size_t{1} << 60, SIZE_MAX};
    for (const size_t bytes : sizes) {
      const Failure failure =
          failure_of([&] { group.heap.allocate(bytes, -1); });
      CHECK_EQ(failure.reason, Reason::kNoMemory);
    }
    group.heap.free(group.heap.allocate(1, -1));
  });
}

}  // namespace
}  // namespace paceline

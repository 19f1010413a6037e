// The kernels in place, on every instruction set, by several threads at once.
// What they compute is compared with an oracle in tests/unit/test_kernels.py;
// here the sanitizers watch how.

#include "kernels/kernels.h"

#include <vector>

#include "check.h"
#include "ranks.h"

namespace paceline {
namespace {

constexpr Isa kIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512};
// Odd lengths leave a tail behind every vector width.
constexpr size_t kCounts[] = {0, 1, 15, 64, 1003};

/// Element i of rank r is r + i % 7; the sum over `world_size` ranks is small
/// and exact.
std::vector<float> input_of(int rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>(rank + i % 7);
  return values;
}

float sum_at(int world_size, size_t i) {
  return static_cast<float>(world_size * (world_size - 1) / 2 +
                            world_size * static_cast<int>(i % 7));
}

TEST(sums_in_place_on_every_instruction_set) {
  for (const Isa isa : kIsas) {
    if (!set_isa(isa)) continue;
    for (const size_t count : kCounts) {
      std::vector<std::vector<float>> arrays = {
          input_of(0, count), input_of(1, count), input_of(2, count)};
      const void* inputs[] = {arrays[0].data(), arrays[1].data(),
                              arrays[2].data()};
      void* outputs[] = {arrays[0].data(), arrays[1].data(), arrays[2].data()};
      reduce(DType::kFloat32, ReduceOp::kSum, inputs, 3, outputs, 3, count,
             nullptr, nullptr);
      for (const auto& array : arrays)
        for (size_t i = 0; i < count; ++i) CHECK_EQ(array[i], sum_at(3, i));
    }
  }
  set_isa(best_isa());
}

TEST(each_rank_reduces_its_chunk_of_everybodys_array) {
  constexpr int kRanks = 4;
  constexpr size_t kChunk = 1003;
  std::vector<std::vector<float>> arrays;
  for (int rank = 0; rank < kRanks; ++rank)
    arrays.push_back(input_of(rank, kRanks * kChunk));
  testing::run_ranks(kRanks, [&](int rank) {
    const void* inputs[kRanks];
    void* outputs[kRanks];
    for (int peer = 0; peer < kRanks; ++peer)
      inputs[peer] = outputs[peer] = arrays[peer].data() + rank * kChunk;
    ReduceStats stats;
    reduce(DType::kFloat32, ReduceOp::kSum, inputs, kRanks, outputs, kRanks,
           kChunk, nullptr, &stats);
    CHECK_EQ(stats.nonfinite_ranks[0], 0u);
  });
  for (const auto& array : arrays)
    for (size_t i = 0; i < array.size(); ++i)
      CHECK_EQ(array[i], sum_at(kRanks, i));
}

}  // namespace
}  // namespace paceline

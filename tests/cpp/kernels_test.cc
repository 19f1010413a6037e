// The kernels in place, on every instruction set, by several threads at once.
// Their results are compared with an oracle in tests/unit/test_kernels.py; here
// the sanitizers check the memory accesses.

#include "kernels/kernels.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "core/isa.h"
#include "hash/xxh64.h"
#include "ranks.h"
#include "strange_floats.h"

namespace paceline {
namespace {

constexpr Isa kIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kNeon};
// Odd lengths leave a tail after every vector width.
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

TEST(each_rank_reduces_its_chunk_of_all_arrays) {
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

/// The bits of weighted means, with statistics, and of such means scaled: of
/// subnormal elements, and of others, whose sums must be rounded.
std::vector<unsigned char> delicate_means() {
  constexpr size_t kCount = 103;
  std::vector<unsigned char> bits;
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    const size_t width = dtype_bytes(dtype);
    std::vector<unsigned char> first(kCount * width);
    std::vector<unsigned char> second(kCount * width);
    for (size_t i = 0; i < first.size(); ++i) {
      const bool is_highest = i % width == width - 1;
      const bool is_normal = i / width % 2 == 0;
      first[i] = is_highest ? 0 : static_cast<unsigned char>(37 * i + 1);
      second[i] = is_highest ? (is_normal ? 0x3b : 0)
                             : static_cast<unsigned char>(91 * i + 5);
    }
    std::vector<unsigned char> mean(first.size());
    const double weights[] = {0.1, 0.7, 0.2};  // their sum must be rounded, too
    const void* inputs[] = {first.data(), second.data(), first.data()};
    void* outputs[] = {mean.data()};
    ReduceStats stats;
    reduce(dtype, ReduceOp::kMean, inputs, 3, outputs, 1, kCount, weights,
           &stats);
    const auto* norm = reinterpret_cast<unsigned char*>(&stats.squared_norm);
    bits.insert(bits.end(), mean.begin(), mean.end());
    bits.insert(bits.end(), norm, norm + sizeof(stats.squared_norm));
    scale(dtype, mean.data(), kCount, 2.0 / 3);
    bits.insert(bits.end(), mean.begin(), mean.end());
  }
  return bits;
}

TEST(the_callers_floating_point_environment_changes_no_bit_and_stays) {
  for (const Isa isa : kIsas) {
    if (!set_isa(isa)) continue;
    const std::vector<unsigned char> expected = delicate_means();
    for (const testing::StrangeFloats& floats : testing::strange_floats()) {
      std::vector<unsigned char> got;
      const bool kept =
          testing::with_floats(floats, [&] { got = delicate_means(); });
      if (got != expected) std::cerr << floats.name << ": other bits\n";
      CHECK(got == expected);
      CHECK(kept);
    }
  }
  set_isa(best_isa());
}

TEST(a_weighted_mean_in_one_step_has_the_bits_of_two) {
  constexpr size_t kCount = 1003;
  constexpr int kRanks = 5;
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    const size_t nbytes = kCount * dtype_bytes(dtype);
    std::mt19937 random(3);  // infinities, NaNs and subnormals, too
    std::vector<std::vector<unsigned char>> arrays(kRanks);
    std::vector<const void*> inputs;
    for (auto& array : arrays) {
      for (size_t i = 0; i < nbytes; ++i)
        array.push_back(static_cast<unsigned char>(random()));
      inputs.push_back(array.data());
    }
    const double some[kRanks] = {0.1, 0, 3, 0x1p-60, 17};
    const double none[kRanks] = {};
    const std::pair<const double*, double> weighed[] = {
        {nullptr, kRanks}, {some, 20.1}, {some, 8}, {none, 0}};
    for (const auto& [weights, total] : weighed) {
      std::vector<unsigned char> sums(kCount * dtype_bytes(sum_type(dtype)));
      std::vector<unsigned char> expected(nbytes);
      std::vector<unsigned char> got(nbytes);
      ReduceStats seen[2];
      sum_weighted(dtype, inputs.data(), kRanks, sums.data(), kCount, weights,
                   nullptr);
      const void* sum = sums.data();
      void* outputs[] = {expected.data()};
      mean_of_sums(dtype, &sum, 1, outputs, 1, kCount, total, &seen[0]);
      outputs[0] = got.data();
      CHECK_EQ(weighted_mean(dtype, inputs.data(), kRanks, outputs, 1, kCount,
                             weights, total, false, &seen[1]),
               kCount);
      CHECK(got == expected);
      CHECK_EQ(seen[1].has_nonfinite, seen[0].has_nonfinite);
    }
  }
}

TEST(a_weighted_mean_in_place_stops_before_the_block_that_is_not_finite) {
  constexpr size_t kCount = 9000;  // several blocks
  constexpr size_t kBad = 5000;
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    const size_t width = dtype_bytes(dtype);
    // Near 1 in each type; its highest byte alone as 0x7f, and the next one as
    // 0xff, are a NaN.
    std::vector<unsigned char> own(kCount * width);
    for (size_t i = 0; i < own.size(); ++i)
      own[i] = i % width == width - 1 ? 0x3c : static_cast<unsigned char>(i);
    std::vector<unsigned char> other = own;
    other[(kBad + 1) * width - 1] = 0x7f;
    other[(kBad + 1) * width - 2] = 0xff;
    const std::vector<unsigned char> before = own;
    const void* inputs[] = {own.data(), other.data()};
    std::vector<unsigned char> expected(own.size());
    void* outputs[] = {expected.data()};
    ReduceStats seen;
    reduce(dtype, ReduceOp::kMean, inputs, 2, outputs, 1, kCount, nullptr,
           nullptr);
    outputs[0] = own.data();
    const size_t done = weighted_mean(dtype, inputs, 2, outputs, 1, kCount,
                                      nullptr, 2, true, &seen);
    CHECK(done > 0 && done <= kBad);
    CHECK(seen.has_nonfinite);
    CHECK_EQ(seen.nonfinite_ranks[0], 2u);
    const auto end = static_cast<ptrdiff_t>(done * width);
    CHECK(std::equal(own.begin(), own.begin() + end, expected.begin()));
    CHECK(std::equal(own.begin() + end, own.end(), before.begin() + end));
  }
}

/// A hash of all results of one type: every op, over 1 to 9 ranks, weighted and
/// not, with the statistics of the reductions. The inputs are random bits, so
/// that there are infinities, NaNs and subnormals among them.
uint64_t hash_of_results(DType dtype) {
  constexpr size_t kCount = 1003;
  constexpr int kRanks = 9;
  const size_t nbytes = kCount * dtype_bytes(dtype);
  uint64_t state = 1;
  const auto random_byte = [&state] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<unsigned char>(state >> 56);
  };
  std::vector<std::vector<unsigned char>> arrays(kRanks);
  std::vector<const void*> inputs;
  for (auto& array : arrays) {
    for (size_t i = 0; i < nbytes; ++i) array.push_back(random_byte());
    inputs.push_back(array.data());
  }
  const double weights[kRanks] = {0.1, 0.7, 0.2, 1, 3, 0, 0x1p-60, 17, 1e9};

  std::vector<unsigned char> results;
  const auto add = [&results](const void* data, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    results.insert(results.end(), bytes, bytes + size);
  };
  std::vector<unsigned char> result(nbytes);
  void* outputs[] = {result.data()};
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin,
                            ReduceOp::kMax, ReduceOp::kProduct}) {
    for (int ranks = 1; ranks <= kRanks; ++ranks) {
      for (const bool is_weighted : {false, true}) {
        if (is_weighted && op != ReduceOp::kMean) continue;
        ReduceStats stats;
        reduce(dtype, op, inputs.data(), ranks, outputs, 1, kCount,
               is_weighted ? weights : nullptr, &stats);
        add(result.data(), nbytes);
        add(&stats.squared_norm, sizeof(stats.squared_norm));
        add(stats.nonfinite_ranks, sizeof(stats.nonfinite_ranks));
      }
    }
  }
  scale(dtype, result.data(), kCount, 2.0 / 3);
  add(result.data(), nbytes);
  return xxh64(results.data(), results.size());
}

// From an x86-64 processor with AVX2: each architecture must give these, or
// jobs on both of them would train different models.
constexpr std::pair<DType, uint64_t> kHashes[] = {
    {DType::kFloat32, 0xf8dc0ed2e1977f65},
    {DType::kFloat64, 0xda2cc322de6b00fe},
    {DType::kFloat16, 0x2ac4dddcf77c28d3},
    {DType::kBFloat16, 0x9f1fc80618010297},
};

TEST(the_same_bits_on_every_instruction_set_of_every_architecture) {
  for (const Isa isa : kIsas) {
    if (!set_isa(isa)) continue;
    for (const auto& [dtype, expected] : kHashes) {
      const uint64_t got = hash_of_results(dtype);
      if (got != expected)
        std::cerr << name_of(isa) << ", " << name_of(dtype) << ": 0x"
                  << std::hex << got << std::dec << '\n';
      CHECK(got == expected);
    }
  }
  set_isa(best_isa());
}

}  // namespace
}  // namespace paceline

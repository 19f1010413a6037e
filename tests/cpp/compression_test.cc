// The codes of gradients on every instruction set, in buffers of exactly their
// size. Their values are compared with an oracle in
// tests/unit/test_compression.py; here the sanitizers check the memory
// accesses.

#include "compression/compression.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "check.h"
#include "core/isa.h"
#include "hash/xxh64.h"
#include "kernels/kernels.h"
#include "ranks.h"
#include "strange_floats.h"

namespace paceline {
namespace {

constexpr Isa kIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kNeon};
constexpr Encoding kEncodings[] = {Encoding::kFloat16, Encoding::kBFloat16,
                                   Encoding::kEightBit, Encoding::kTopK};
constexpr size_t kCounts[] = {0, 1, 15, 255, 256, 257, 1003};

std::vector<float> values_of(int rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i)
    values[i] = std::sin(static_cast<float>(i) + 0.1f * rank);
  return values;
}

TEST(means_and_errors_add_up_on_every_instruction_set) {
  for (const Isa isa : kIsas) {
    if (!set_isa(isa)) continue;
    for (const Encoding encoding : kEncodings) {
      for (const size_t count : kCounts) {
        const std::vector<float> values = values_of(0, count);
        std::vector<unsigned char> codes(encoded_bytes(encoding, count));
        std::vector<float> error(count);
        std::vector<float> mean(count);
        encode(encoding, values.data(), error.data(), error.data(), 1.0f, count,
               codes.data());
        const void* const both[] = {codes.data(), codes.data()};
        const float weights[] = {1.0f, 1.0f};
        decode_mean(encoding, both, weights, 2, count, mean.data());
        for (size_t i = 0; i < count; ++i) {
          CHECK_EQ(mean[i] + error[i], values[i]);
          if (encoding != Encoding::kTopK)
            CHECK(std::fabs(error[i]) <= 0.0040f);  // half of 1 / 127
        }
      }
    }
  }
  set_isa(best_isa());
}

TEST(extremes_of_float32_stay_finite) {
  constexpr float kMax = std::numeric_limits<float>::max();
  constexpr float kDenormal = std::numeric_limits<float>::denorm_min();
  const std::vector<float> values = {kMax, -kMax, kDenormal, 0.0f, 1.0f};
  for (const Isa isa : kIsas) {
    if (!set_isa(isa)) continue;
    for (const Encoding encoding : kEncodings) {
      std::vector<unsigned char> codes(encoded_bytes(encoding, values.size()));
      std::vector<float> error = {kMax, -kMax, 0.0f, 0.0f, 0.0f};
      std::vector<float> mean(values.size());
      encode(encoding, values.data(), error.data(), error.data(), 1.0f,
             values.size(), codes.data());
      const void* const alone[] = {codes.data()};
      const float weight = 1.0f;
      decode_mean(encoding, alone, &weight, 1, values.size(), mean.data());
      for (size_t i = 0; i < values.size(); ++i)
        CHECK(std::isfinite(mean[i]) && std::isfinite(error[i]));
    }
  }
  set_isa(best_isa());
}

/// Codes, error and mean, one after the other.
std::vector<float> all_results_of(Encoding encoding,
                                  const std::vector<float>& values) {
  const size_t count = values.size();
  std::vector<float> results(3 * count);
  float* const codes = results.data();
  float* const error = codes + count;
  float* const mean = error + count;
  encode(encoding, values.data(), error, error, 0.3f, count, codes);
  const void* const parts[] = {codes, codes, codes};
  const float weights[] = {0.1f, 0.7f, 0x1p-120f};
  decode_mean(encoding, parts, weights, 3, count, mean);
  return results;
}

TEST(the_callers_floating_point_environment_changes_no_bit_and_stays) {
  std::vector<float> values = values_of(0, 257);
  for (size_t i = 0; i < values.size(); i += 3)
    values[i] *= 0x1p-140f;  // subnormal
  for (const Isa isa : kIsas) {
    if (!set_isa(isa)) continue;
    for (const Encoding encoding : kEncodings) {
      const std::vector<float> expected = all_results_of(encoding, values);
      for (const testing::StrangeFloats& floats : testing::strange_floats()) {
        std::vector<float> got;
        const bool kept = testing::with_floats(
            floats, [&] { got = all_results_of(encoding, values); });
        const bool same = std::memcmp(got.data(), expected.data(),
                                      got.size() * sizeof(float)) == 0;
        if (!same) std::cerr << floats.name << ": other bits\n";
        CHECK(same);
        CHECK(kept);
      }
    }
  }
  set_isa(best_isa());
}

// As in kernels_test.cc.
constexpr std::pair<Encoding, uint64_t> kHashes[] = {
    {Encoding::kFloat16, 0xe8ca0344e85da1e6},
    {Encoding::kBFloat16, 0x7866599f392da0c3},
    {Encoding::kEightBit, 0xa30e685e7c2001cf},
};

TEST(the_same_bits_on_every_instruction_set_of_every_architecture) {
  std::vector<float> values(1003);
  uint64_t state = 1;
  for (float& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto bits = static_cast<uint32_t>(state >> 32);
    std::memcpy(&value, &bits, sizeof(value));
  }
  for (const Isa isa : kIsas) {
    if (!set_isa(isa)) continue;
    for (const auto& [encoding, expected] : kHashes) {
      const std::vector<float> results = all_results_of(encoding, values);
      const uint64_t got =
          xxh64(results.data(), results.size() * sizeof(float));
      if (got != expected)
        std::cerr << name_of(isa) << ", encoding " << static_cast<int>(encoding)
                  << ": 0x" << std::hex << got << std::dec << '\n';
      CHECK(got == expected);
    }
  }
  set_isa(best_isa());
}

TEST(ranks_encode_side_by_side_and_decode_each_others_codes) {
  constexpr int kRanks = 4;
  constexpr size_t kCount = 1003;
  for (const Encoding encoding : kEncodings) {
    std::vector<std::vector<unsigned char>> codes(
        kRanks, std::vector<unsigned char>(encoded_bytes(encoding, kCount)));
    testing::run_ranks(kRanks, [&](int rank) {
      const std::vector<float> values = values_of(rank, kCount);
      encode(encoding, values.data(), nullptr, nullptr, 1.0f, kCount,
             codes[rank].data());
    });
    std::vector<std::vector<float>> means(kRanks, std::vector<float>(kCount));
    testing::run_ranks(kRanks, [&](int rank) {
      const void* parts[kRanks];
      for (int peer = 0; peer < kRanks; ++peer)
        parts[peer] = codes[peer].data();
      const float weights[kRanks] = {1.0f, 1.0f, 1.0f, 1.0f};
      decode_mean(encoding, parts, weights, kRanks, kCount, means[rank].data());
    });
    for (int rank = 1; rank < kRanks; ++rank) CHECK(means[rank] == means[0]);
  }
}

}  // namespace
}  // namespace paceline

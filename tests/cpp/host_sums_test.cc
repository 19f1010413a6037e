// Two hosts of two ranks between threads: each host's ranks share a group, and
// the threads exchange the hosts' data directly. The means must have the bits
// of reduce() over all four.

#include "reducer/host_sums.h"

#include <math.h>

#include <barrier>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "group_world.h"
#include "kernels/kernels.h"

namespace paceline {
namespace {

using testing::failure_of;
using testing::run_group;

constexpr int kHosts = 2;
constexpr int kLocal = 2;
constexpr int kRanks = kHosts * kLocal;
constexpr size_t kCount = 1000;
constexpr size_t kFirstShare = 512;

/// The gradient of rank `rank` of all in backward `backward`.
std::vector<float> values(int rank, int backward) {
  std::mt19937 random(static_cast<unsigned>(100 * backward + rank));
  std::normal_distribution<float> normal;
  std::vector<float> found(kCount);
  for (float& each : found) each = normal(random);
  return found;
}

std::vector<float> mean_of_all(int backward,
                               const std::vector<double>& weights) {
  std::vector<std::vector<float>> inputs;
  for (int r = 0; r < kRanks; ++r) inputs.push_back(values(r, backward));
  std::vector<float> out(kCount);
  const void* in[kRanks];
  for (int r = 0; r < kRanks; ++r)
    in[r] = inputs[static_cast<size_t>(r)].data();
  void* const outputs[] = {out.data()};
  reduce(DType::kFloat32, ReduceOp::kMean, in, kRanks, outputs, 1, kCount,
         weights.data(), nullptr);
  return out;
}

std::vector<SummedBucket> one_bucket() {
  return {{0, kCount * sizeof(float), DType::kFloat32}};
}

size_t first_of(int local) { return local == 0 ? 0 : kFirstShare; }
size_t count_of(int local) {
  return local == 0 ? kFirstShare : kCount - kFirstShare;
}

TEST(two_hosts_have_the_bits_of_one) {
  const std::vector<double> weights = {1.0, 2.5, 0.0, 3.0};
  // By host and place; written before the barrier, read after it.
  std::vector<float> sums[kHosts][kLocal];
  double totals[kHosts][kLocal];
  std::barrier barrier(kRanks);
  std::vector<std::thread> hosts;
  for (int host = 0; host < kHosts; ++host) {
    hosts.emplace_back([&, host] {
      run_group(kLocal, [&](HostGroup& group) {
        const int local = group.rank();
        const int rank = host * kLocal + local;
        HostSums core(group.heap, kCount * sizeof(float), one_bucket(), kRanks,
                      sizeof(int));
        for (int backward = 1; backward <= 20; ++backward) {
          const std::vector<float> own = values(rank, backward);
          std::copy(own.begin(), own.end(),
                    reinterpret_cast<float*>(core.gradient_buffer()));
          core.begin_backward(weights[static_cast<size_t>(rank)]);
          core.post(0);
          core.wait_complete(0);
          CHECK(core.is_complete(0));
          std::vector<float>& sum = sums[host][local];
          sum.resize(count_of(local));
          ReduceStats stats;
          core.sum(0, first_of(local), count_of(local), core.everybody(),
                   sum.data(), &stats);
          totals[host][local] = core.total_weight(core.everybody());
          *reinterpret_cast<int*>(core.slot(static_cast<size_t>(rank))) =
              100 * backward + rank;
          barrier.arrive_and_wait();
          // Another thread of the rank publishes, as in Python.
          std::thread([&] {
            const int peer = (1 - host) * kLocal + local;
            *reinterpret_cast<int*>(core.slot(static_cast<size_t>(peer))) =
                100 * backward + peer;
            const double total = totals[0][local] + totals[1][local];
            CHECK(core.publish(0, first_of(local), count_of(local),
                               {sums[0][local].data(), sums[1][local].data()},
                               total));
            core.count_share();
          }).join();
          core.wait_published(-1);
          const std::vector<float> expected = mean_of_all(backward, weights);
          const auto* mean =
              reinterpret_cast<const float*>(core.gradient_buffer());
          CHECK(std::equal(expected.begin(), expected.end(), mean));
          for (int r = 0; r < kRanks; ++r) {
            CHECK_EQ(*reinterpret_cast<int*>(core.slot(static_cast<size_t>(r))),
                     100 * backward + r);
          }
          CHECK(!core.has_overflow());
          barrier.arrive_and_wait();  // before the sums are written anew
        }
      });
    });
  }
  for (std::thread& host : hosts) host.join();
}

TEST(sums_over_some_ranks_of_a_host) {
  const std::vector<double> weights = {0.5, 1.0, 3.0};
  run_group(3, [&](HostGroup& group) {
    const int rank = group.rank();
    HostSums core(group.heap, kCount * sizeof(float), one_bucket(), 3, 8);
    auto* own = reinterpret_cast<float*>(core.gradient_buffer());
    std::fill_n(own, kCount, static_cast<float>(rank + 1));
    if (rank == 0) own[3] = NAN;
    core.begin_backward(weights[static_cast<size_t>(rank)]);
    core.post(0);
    core.wait_complete(0);
    CHECK_EQ(core.total_weight({1, 3}), 4.0);
    CHECK_EQ(core.total_weight({0, 1}), 0.5);
    CHECK_EQ(core.total_weight(core.everybody()), 4.5);
    std::vector<float> sum(kCount);
    ReduceStats stats;
    core.sum(0, 0, kCount, {1, 3}, sum.data(), &stats);
    CHECK_EQ(stats.nonfinite_ranks[0], uint64_t{0});
    CHECK_EQ(sum[3], 2.0F + 3.0F * 3.0F);
    core.sum(0, 0, kCount, {0, 1}, sum.data(), &stats);
    CHECK_EQ(stats.nonfinite_ranks[0], uint64_t{1});
    CHECK_EQ(sum[4], 0.5F);
    core.count_share();
    core.wait_published(-1);
  });
}

TEST(what_is_not_finite_is_found) {
  run_group(2, [](HostGroup& group) {
    HostSums core(group.heap, kCount * sizeof(float), one_bucket(), 2, 8);
    auto* own = reinterpret_cast<float*>(core.gradient_buffer());
    std::fill_n(own, kCount, 1.0F);
    if (group.rank() == 1) own[700] = NAN;
    core.begin_backward(1);
    core.post(0);
    core.wait_complete(0);
    // Each in its own shard: the other rank may already write means to its own.
    const size_t first = group.rank() == 0 ? 0 : 500;
    uint64_t ranks[2];
    core.find_nonfinite(0, first, 200, ranks);
    CHECK_EQ(ranks[0], uint64_t{0});
    core.find_nonfinite(0, first + 200, 1, ranks);
    CHECK_EQ(ranks[0], uint64_t(group.rank() == 0 ? 0 : 2));
    std::vector<float> sum(500);
    ReduceStats stats;
    core.sum(0, first, 500, core.everybody(), sum.data(), &stats);
    CHECK_EQ(stats.nonfinite_ranks[0], uint64_t(group.rank() == 0 ? 0 : 2));
    const bool is_finite = core.publish(0, first, 500, {sum.data()}, 2);
    CHECK_EQ(is_finite, group.rank() == 0);
    CHECK_EQ(core.is_nonfinite(0, first, 500), group.rank() == 1);
    if (group.rank() == 1) core.note_overflow();
    core.count_share();
    core.wait_published(-1);
    CHECK(core.has_overflow());
    CHECK_EQ(own[0], 1.0F);
  });
}

TEST(a_rank_that_does_not_post_is_named) {
  run_group(
      2,
      [](HostGroup& group) {
        HostSums core(group.heap, 4096, {{0, 4096, DType::kFloat64}}, 2, 8);
        if (group.rank() == 1) {
          // Comes after the other has given up.
          while (!group.session.is_over()) cpu_relax();
          return;
        }
        core.begin_backward(1);
        core.post(0);
        const Failure failure = failure_of([&] { core.wait_complete(0); });
        CHECK_EQ(failure.reason, Reason::kDeadline);
        CHECK(testing::is_late(failure, 1));
        core.keep_buffer();
      },
      {.timeout_s = 0.3});
}

TEST(a_backward_whose_shares_are_all_there_is_good_after_the_end_too) {
  std::barrier barrier(2);
  run_group(2, [&](HostGroup& group) {
    HostSums core(group.heap, kCount * sizeof(float), one_bucket(), 2, 8);
    core.begin_backward(1);
    core.post(0);
    core.wait_complete(0);
    std::vector<float> sum(500);
    const size_t first = group.rank() == 0 ? 0 : 500;
    core.sum(0, first, 500, core.everybody(), sum.data(), nullptr);
    core.publish(0, first, 500, {sum.data()}, 2);
    core.count_share();
    barrier.arrive_and_wait();
    if (group.rank() == 1) group.session.abort("too late for this backward");
    barrier.arrive_and_wait();
    core.wait_published(-1);
    CHECK_EQ(failure_of([&] { core.begin_backward(1); }).reason,
             Reason::kRaised);
  });
}

TEST(a_backward_that_one_rank_gave_up_is_good_for_no_rank) {
  std::barrier barrier(2);
  run_group(2, [&](HostGroup& group) {
    HostSums core(group.heap, kCount * sizeof(float), one_bucket(), 2, 8);
    core.begin_backward(1);
    core.post(0);
    core.wait_complete(0);
    if (group.rank() == 0) {
      core.count_share();
      const Failure gave_up = failure_of([&] { core.wait_published(0.05); });
      CHECK_EQ(gave_up.reason, Reason::kDeadline);
      CHECK(testing::is_late(gave_up, 1));
    }
    barrier.arrive_and_wait();
    if (group.rank() == 1) {
      CHECK_EQ(failure_of([&] { core.count_share(); }).reason,
               Reason::kDeadline);
      CHECK_EQ(failure_of([&] { core.wait_published(-1); }).reason,
               Reason::kDeadline);
    }
  });
}

TEST(wrong_uses_are_refused) {
  run_group(1, [](HostGroup& group) {
    const auto refused = [](auto call) {
      CHECK_EQ(failure_of(call).reason, Reason::kMisuse);
    };
    refused([&] { HostSums(group.heap, 64, {{0, 65, DType::kInt8}}, 1, 1); });
    refused(
        [&] { HostSums(group.heap, 64, {{0, 66, DType::kFloat32}}, 1, 1); });
    HostSums core(group.heap, 64, {{0, 64, DType::kFloat32}}, 1, 1);
    float sum[16];
    refused([&] { core.post(0); });
    core.begin_backward(1);
    refused([&] { core.begin_backward(1); });
    refused([&] { core.post(1); });
    core.post(0);
    refused([&] { core.post(0); });
    refused([&] { core.sum(0, 8, 9, {0, 1}, sum, nullptr); });
    for (const Neighbours wrong :
         {Neighbours{0, 2}, Neighbours{-1, 1}, Neighbours{1, 1}}) {
      refused([&] { core.sum(0, 0, 16, wrong, sum, nullptr); });
      refused([&] { core.total_weight(wrong); });
    }
    refused([&] { core.publish(0, 0, 16, {}, 1); });
    const std::vector<const void*> too_many(kMaxRanks + 1, sum);
    refused([&] { core.publish(0, 0, 16, too_many, 1); });
    refused([&] { core.add_sums(0, too_many, 16, sum); });
    refused([&] { core.slot(1); });
  });
}

TEST(gradients_of_hosts_of_one_rank_have_the_mean_of_reduce) {
  constexpr size_t kMany = 20000;  // several blocks, the last one short
  constexpr size_t kSkipped = 5;
  const std::vector<double> weights = {1.0, 2.5, 0.0};
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> inputs(weights.size());
  for (auto& input : inputs) {
    for (size_t i = 0; i < kMany; ++i) input.push_back(normal(random));
  }
  inputs[2][17] = INFINITY;  // of a host that does not count
  run_group(1, [&](HostGroup& group) {
    HostSums core(group.heap, (kMany + kSkipped) * sizeof(float),
                  {{0, (kMany + kSkipped) * sizeof(float), DType::kFloat32}}, 1,
                  1);
    float* const own =
        reinterpret_cast<float*>(core.gradient_buffer()) + kSkipped;
    const auto average = [&](bool stops) {
      return core.average(0, kSkipped, kMany,
                          {inputs[0].data(), own, inputs[2].data()}, weights,
                          3.5, stops);
    };
    std::vector<float> expected(kMany);
    const void* in[] = {inputs[0].data(), inputs[1].data(), inputs[2].data()};
    void* const out[] = {expected.data()};
    reduce(DType::kFloat32, ReduceOp::kMean, in, 3, out, 1, kMany,
           weights.data(), nullptr);
    std::copy(inputs[1].begin(), inputs[1].end(), own);
    HostSums::Averaged found = average(true);
    CHECK_EQ(found.count, kMany);
    CHECK(found.is_finite);
    CHECK(std::equal(expected.begin(), expected.end(), own));

    constexpr size_t kBad = 11000;
    inputs[0][kBad] = NAN;
    std::copy(inputs[1].begin(), inputs[1].end(), own);
    found = average(true);
    CHECK(found.is_finite);
    CHECK(found.count > 0 && found.count <= kBad);
    const auto done = static_cast<ptrdiff_t>(found.count);
    CHECK(std::equal(expected.begin(), expected.begin() + done, own));
    CHECK(std::equal(inputs[1].begin() + done, inputs[1].end(), own + done));
    std::copy(inputs[1].begin(), inputs[1].end(), own);
    found = average(false);
    CHECK_EQ(found.count, kMany);
    CHECK(!found.is_finite);
    CHECK(isnan(own[kBad]));
    own[kBad] = expected[kBad];
    CHECK(std::equal(expected.begin(), expected.end(), own));

    const auto refused = [](const auto& call) {
      CHECK_EQ(failure_of(call).reason, Reason::kMisuse);
    };
    refused([&] { core.average(0, 0, 1, {}, {}, 1, true); });
    refused([&] { core.average(0, 0, 1, {own}, {1.0, 1.0}, 1, true); });
    refused([&] { core.average(0, 0, kMany + 6, {own}, {1.0}, 1, true); });
  });
}

TEST(sums_of_16_bit_types_are_made_in_float32) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    CHECK_EQ(static_cast<int>(sum_type(dtype)),
             static_cast<int>(DType::kFloat32));
    std::mt19937 random(5);
    std::vector<std::vector<uint16_t>> inputs(kRanks);
    for (auto& input : inputs) {
      for (size_t i = 0; i < kCount; ++i) {
        // Around 1, of either sign, in both formats.
        const auto bits = static_cast<uint16_t>(random());
        input.push_back(static_cast<uint16_t>(0x3c00 | (bits & 0x83ff)));
      }
    }
    const void* in[kRanks];
    for (size_t r = 0; r < kRanks; ++r) in[r] = inputs[r].data();
    std::vector<uint16_t> expected(kCount);
    std::vector<uint16_t> found(kCount);
    void* const whole[] = {expected.data()};
    reduce(dtype, ReduceOp::kMean, in, kRanks, whole, 1, kCount, nullptr,
           nullptr);
    std::vector<float> sums[kHosts];
    const void* parts[kHosts];
    for (int host = 0; host < kHosts; ++host) {
      sums[host].resize(kCount);
      sum_weighted(dtype, in + static_cast<ptrdiff_t>(host) * kLocal, kLocal,
                   sums[host].data(), kCount, nullptr, nullptr);
      parts[host] = sums[host].data();
    }
    void* const outputs[] = {found.data()};
    mean_of_sums(dtype, parts, kHosts, outputs, 1, kCount, kRanks, nullptr);
    CHECK(found == expected);
  }
}

}  // namespace
}  // namespace paceline

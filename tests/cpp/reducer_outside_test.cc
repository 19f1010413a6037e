// Gradients that lie outside of the gradient buffer: read and replaced in
// place.

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "collectives/barrier.h"
#include "group_world.h"
#include "reducer/reducer.h"
#include "reducer_model.h"

namespace paceline {
namespace {

using testing::kParameters;
using testing::kSizes;
using testing::Model;
using testing::run_group;

TEST(gradients_elsewhere_get_the_mean_back) {
  run_group(2, [](HostGroup& group) {
    Model model(group, 50'000);
    std::vector<std::vector<float>> gradients;
    for (const size_t count : kSizes) gradients.emplace_back(count);
    for (int step = 0; step < 4; ++step) {
      model.reducer().set_weight(group.rank() == 0 ? 1 : 3);
      for (size_t p = 0; p < kParameters; ++p) {
        for (size_t i = 0; i < kSizes[p]; ++i)
          gradients[p][i] = Model::value(group.rank(), p, i, step);
        model.reducer().mark_ready(p, gradients[p].data());
      }
      CHECK_EQ(model.reducer().finish(1, false), 0u);
      for (size_t p = 0; p < kParameters; ++p)
        for (size_t i = 0; i < kSizes[p]; ++i)
          CHECK_EQ(gradients[p][i], (Model::value(0, p, i, step) +
                                     3 * Model::value(1, p, i, step)) /
                                        4);
    }
  });
}

// Autograd may still have to read that memory; both ways of assigning chunks.
TEST(gradients_elsewhere_stay_as_they_are_until_backward_ends) {
  for (const bool assigns_chunks : {false, true}) {
    run_group(2, [&](HostGroup& group) {
      constexpr size_t kCount = 300'000;
      constexpr size_t kBytes = kCount * sizeof(float);
      Reducer reducer(
          group.heap, 2 * kBytes,
          {{0, kCount, DType::kFloat32}, {kBytes, kCount, DType::kFloat32}},
          {{0, kBytes}, {kBytes, 2 * kBytes}}, assigns_chunks);
      for (int step = 0; step < 4; ++step) {
        std::vector<std::vector<float>> gradients(
            2, std::vector<float>(kCount, Model::value(group.rank(), 0, 0, 0)));
        const bool is_behind = group.rank() == step % 2;
        if (is_behind) barrier(group.calls, -1);
        for (size_t p = 0; p < 2; ++p)
          reducer.mark_ready(p, gradients[p].data());
        if (!is_behind) barrier(group.calls, -1);
        for (const auto& gradient : gradients)
          for (const float element : gradient)
            CHECK_EQ(element, Model::value(group.rank(), 0, 0, 0));
        CHECK_EQ(reducer.finish(1, false), 0u);
        CHECK(reducer.result().overlapping.empty());
        for (const auto& gradient : gradients)
          for (const float element : gradient)
            CHECK_EQ(element,
                     (Model::value(0, 0, 0, 0) + Model::value(1, 0, 0, 0)) / 2);
      }
    });
  }
}

// A rank that caught the exception may have cleared them since, in place.
TEST(
    gradients_elsewhere_stay_as_they_are_after_a_backward_that_was_broken_off) {
  for (const bool assigns_chunks : {false, true}) {
    run_group(2, [&](HostGroup& group) {
      constexpr size_t kCount = 300'000;
      constexpr size_t kBytes = kCount * sizeof(float);
      Reducer reducer(group.heap, kBytes, {{0, kCount, DType::kFloat32}},
                      {{0, kBytes}}, assigns_chunks);
      std::vector<float> gradient(kCount);
      const auto mark = [&] {
        std::fill(gradient.begin(), gradient.end(),
                  group.rank() == 0 ? 1.0f : 3.0f);
        reducer.mark_ready(0, gradient.data());
      };
      const auto check = [&](float expected) {
        for (const float element : gradient) CHECK_EQ(element, expected);
      };
      for (int step = 0; step < 4; ++step) {
        mark();
        CHECK_EQ(reducer.finish(1, false), 0u);
        check(2);
        mark();
        std::fill(gradient.begin(), gradient.end(), 0.0f);
        CHECK_EQ(reducer.finish(BackwardStatus::broken_off(), step % 2 == 0),
                 kBackwardForwardsDiffer | kBackwardReported);
        check(0);
      }
    });
  }
}

// On rank 0 the gradients of two reducers lie in one memory, and two of one
// reducer overlap by half.
TEST(gradients_that_overlap_are_moved_into_the_buffer) {
  for (const bool assigns_chunks : {false, true}) {
    run_group(2, [&](HostGroup& group) {
      constexpr size_t kCount = 300'000;
      constexpr size_t kBytes = kCount * sizeof(float);
      const auto make = [&] {
        return std::make_unique<Reducer>(
            group.heap, 3 * kBytes,
            std::vector<ParameterSpan>{{0, kCount, DType::kFloat32},
                                       {kBytes, kCount, DType::kFloat32},
                                       {2 * kBytes, kCount, DType::kFloat32}},
            std::vector<BucketSpan>{{0, 3 * kBytes}}, assigns_chunks);
      };
      const auto one = make();
      const auto two = make();
      std::vector<float> memory(6 * kCount);
      // The starts of the gradients: half of the first is that of the second,
      // and the third is another reducer's first.
      const size_t shared[] = {0,          kCount / 2, 2 * kCount,
                               2 * kCount, 3 * kCount, 4 * kCount};
      const size_t apart[] = {0,          kCount,     2 * kCount,
                              3 * kCount, 4 * kCount, 5 * kCount};
      const size_t* begin = group.rank() == 0 ? shared : apart;
      for (int step = 0; step < 3; ++step) {
        for (size_t i = 0; i < memory.size(); ++i)
          memory[i] = Model::value(group.rank(), i / kCount, i, step);
        const std::vector<float> before = memory;
        for (size_t p = 0; p < 3; ++p) {
          one->mark_ready(p, &memory[begin[p]]);
          two->mark_ready(p, &memory[begin[p + 3]]);
        }
        CHECK_EQ(one->finish(1, false), 0u);
        CHECK_EQ(two->finish(1, false), 0u);
        std::vector<size_t> moved = one->result().overlapping;
        std::sort(moved.begin(), moved.end());
        CHECK(moved == (group.rank() == 0 ? std::vector<size_t>{0, 1, 2}
                                          : std::vector<size_t>{}));
        CHECK(two->result().overlapping.empty());  // the other has finished
        for (size_t p = 0; p < 6; ++p) {
          const bool is_moved = group.rank() == 0 && p < 3;
          const std::byte* gradient_buffer =
              p < 3 ? one->gradient_buffer() : two->gradient_buffer();
          const auto* mean = is_moved ? reinterpret_cast<const float*>(
                                            gradient_buffer + p % 3 * kBytes)
                                      : &memory[begin[p]];
          for (size_t i = 0; i < kCount; ++i) {
            float sum = 0;
            for (int r = 0; r < 2; ++r) {
              const size_t at = (r == 0 ? shared : apart)[p] + i;
              sum += Model::value(r, at / kCount, at, step);
            }
            CHECK_EQ(mean[i], sum / 2);
          }
        }
        if (group.rank() == 0) {
          for (size_t i = 0; i < 2 * kCount; ++i)
            CHECK_EQ(memory[i], before[i]);  // no rank has written there
        }
      }
    });
  }
}

// Four chunks for each rank, so that they are assigned where there are cores.
TEST(assigned_chunks_with_random_readiness) {
  run_group(
      2,
      [](HostGroup& group) {
        constexpr size_t kLarge = 200'000;
        constexpr size_t kBytes = kLarge * sizeof(float);
        Reducer reducer(group.heap, 3 * kBytes,
                        {{0, kLarge, DType::kFloat32},
                         {kBytes, kLarge, DType::kFloat32},
                         {2 * kBytes, kLarge, DType::kFloat32}},
                        {{0, 2 * kBytes}, {2 * kBytes, 3 * kBytes}}, true);
        std::mt19937 own(5 + static_cast<unsigned>(group.rank()));
        std::vector<std::vector<float>> gradients(3,
                                                  std::vector<float>(kLarge));
        for (int step = 0; step < 12; ++step) {
          const bool is_void = step % 4 == 3;
          size_t order[] = {0, 1, 2};
          std::shuffle(order, order + 3, own);
          for (const size_t p : order) {
            if (is_void && p == 1 && group.rank() == 0) continue;
            for (size_t i = 0; i < kLarge; ++i)
              gradients[p][i] = Model::value(group.rank(), p, i, step);
            reducer.mark_ready(p, gradients[p].data());
          }
          CHECK_EQ(reducer.finish(1, false), is_void ? kBackwardUnused : 0u);
          for (size_t p = 0; p < 3 && !is_void; ++p)
            for (size_t i = 0; i < kLarge; ++i)
              CHECK_EQ(gradients[p][i], (Model::value(0, p, i, step) +
                                         Model::value(1, p, i, step)) /
                                            2);
        }
      },
      {.timeout_s = 60});
}

}  // namespace
}  // namespace paceline

// Backward passes between threads: random order of readiness, every verdict,
// deaths at every step, several reducers.

#include "reducer/reducer.h"

#include <math.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "group_world.h"

namespace paceline {
namespace {

using testing::failure_of;
using testing::run_group;

constexpr size_t kSizes[] = {10, 1, 40'000, 16'384, 0, 16'385, 700};
constexpr size_t kParameters = sizeof(kSizes) / sizeof(kSizes[0]);

/// One rank's reducer for parameters of kSizes floats.
class Model {
 public:
  Model(HostGroup& group, size_t cap_bytes) : group_(group) {
    std::vector<ParameterSpan> spans;
    std::vector<BucketSpan> buckets;
    size_t at = 0;
    size_t begin = 0;
    for (const size_t count : kSizes) {
      spans.push_back({at, count, DType::kFloat32});
      offsets_.push_back(at);
      const size_t end = at + (count * sizeof(float) + 63) / 64 * 64;
      for (size_t block = kBlockElements; block < count;
           block += kBlockElements)
        if (at + block * sizeof(float) - begin >= cap_bytes) {
          buckets.push_back({begin, at + block * sizeof(float)});
          begin = buckets.back().end;
        }
      if (end - begin >= cap_bytes) {
        buckets.push_back({begin, end});
        begin = end;
      }
      at = end;
    }
    if (begin < at) buckets.push_back({begin, at});
    reducer_ = std::make_unique<Reducer>(group, at, spans, buckets, false);
  }

  Reducer& reducer() { return *reducer_; }
  float* view(size_t parameter) {
    return reinterpret_cast<float*>(reducer_->arena() + offsets_[parameter]);
  }
  /// Multiples of 12: the mean over 1, 2, 3 or 4 ranks is exact.
  static float value(int rank, size_t parameter, size_t i, int step) {
    return 12.0f * static_cast<float>((rank + 1) * (step % 5 + 1) +
                                      static_cast<int>((parameter + i) % 9));
  }
  float mean(size_t parameter, size_t i, int step) const {
    float sum = 0;
    for (int r = 0; r < group_.world(); ++r)
      sum += value(r, parameter, i, step);
    return sum / static_cast<float>(group_.world());
  }
  void mark(size_t parameter, int step) {
    float* array = view(parameter);
    for (size_t i = 0; i < kSizes[parameter]; ++i)
      array[i] = value(group_.rank(), parameter, i, step);
    reducer_->mark_ready(parameter, nullptr);
  }
  void check(int step) {
    double norm = 0;
    for (size_t p = 0; p < kParameters; ++p)
      for (size_t i = 0; i < kSizes[p]; ++i) {
        CHECK_EQ(view(p)[i], mean(p, i, step));
        norm += static_cast<double>(view(p)[i]) * view(p)[i];
      }
    CHECK(fabs(reducer_->squared_norm() - norm) <= 1e-9 * norm);
  }

 private:
  HostGroup& group_;
  std::vector<size_t> offsets_;
  std::unique_ptr<Reducer> reducer_;
};

std::vector<size_t> random_order(std::mt19937& random) {
  std::vector<size_t> order(kParameters);
  for (size_t p = 0; p < kParameters; ++p) order[p] = p;
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

void run_passes(int ranks, size_t cap_bytes, int num_passes, double spin_us) {
  run_group(
      ranks,
      [&](HostGroup& group) {
        Model model(group, cap_bytes);
        std::mt19937 own(17 + static_cast<unsigned>(group.rank()));
        std::mt19937 shared(3);
        for (int step = 0; step < num_passes; ++step) {
          const unsigned kind = shared() % 6;  // 0: unused, 1: forwards differ
          const bool is_odd = group.rank() == step % group.world();
          std::vector<size_t> order = random_order(own);
          if (kind == 0 && is_odd) order.pop_back();
          for (const size_t parameter : order) {
            if (own() % 8 == 0)
              for (unsigned i = own() % 3000; i > 0; --i) cpu_relax();
            model.mark(parameter, step);
          }
          const bool differs = kind == 1 && is_odd && group.world() > 1;
          const uint32_t flags = model.reducer().finish(differs ? 2 : 1, false);
          const uint32_t expected = kind == 0 ? kPassUnused
                                    : kind == 1 && group.world() > 1
                                        ? kPassForwardsDiffer
                                        : 0;
          CHECK_EQ(flags, expected);
          if (flags == 0) model.check(step);
          if (kind == 0)
            CHECK_EQ(model.reducer().unused(step % group.world()).size(),
                     size_t{1});
        }
      },
      {.timeout_s = 60, .spin_us = spin_us});
}

TEST(passes_with_random_readiness) {
  run_passes(1, 100'000, 6, -1);
  run_passes(2, 50'000, 20, 20);
  run_passes(3, 1, 20, 0);
  run_passes(4, 1 << 30, 12, -1);
}

TEST(a_nonfinite_gradient_and_an_allowed_unused_parameter) {
  run_group(3, [](HostGroup& group) {
    Model model(group, 50'000);
    for (int step = 0; step < 6; ++step) {
      const bool is_bad = step % 2 == 1;
      for (size_t p = 0; p < kParameters; ++p) {
        if (group.rank() == 1 && p == 3) continue;
        if (is_bad && group.rank() == 2 && p == 2) {
          model.view(p)[kSizes[p] - 1] = NAN;
          model.reducer().mark_ready(p, nullptr);
        } else {
          model.mark(p, step);
        }
      }
      const uint32_t flags = model.reducer().finish(1, true);
      CHECK_EQ(flags, kPassUnused | (is_bad ? kPassNonFinite : 0));
      CHECK(model.reducer().unused(1) == std::vector<size_t>{3});
      CHECK(model.reducer().globally_unused().empty());
      const auto nonfinite = model.reducer().nonfinite();
      CHECK_EQ(nonfinite.size(), is_bad ? size_t{1} : size_t{0});
      if (is_bad) CHECK(nonfinite[0] == std::make_pair(2, size_t{2}));
      CHECK_EQ(model.view(0)[0], model.mean(0, 0, step));
    }
  });
}

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

// Autograd may still have to read what lies there; both ways of sharing chunks.
TEST(gradients_elsewhere_stay_as_they_are_until_backward_ends) {
  for (const bool assigns_chunks : {false, true}) {
    run_group(2, [&](HostGroup& group) {
      constexpr size_t kCount = 300'000;
      constexpr size_t kBytes = kCount * sizeof(float);
      Reducer reducer(
          group, 2 * kBytes,
          {{0, kCount, DType::kFloat32}, {kBytes, kCount, DType::kFloat32}},
          {{0, kBytes}, {kBytes, 2 * kBytes}}, assigns_chunks);
      for (int step = 0; step < 4; ++step) {
        std::vector<std::vector<float>> gradients(
            2, std::vector<float>(kCount, Model::value(group.rank(), 0, 0, 0)));
        const bool is_behind = group.rank() == step % 2;
        if (is_behind) group.barrier(-1);
        for (size_t p = 0; p < 2; ++p)
          reducer.mark_ready(p, gradients[p].data());
        if (!is_behind) group.barrier(-1);
        for (const auto& gradient : gradients)
          for (const float element : gradient)
            CHECK_EQ(element, Model::value(group.rank(), 0, 0, 0));
        CHECK_EQ(reducer.finish(1, false), 0u);
        CHECK(reducer.overlapping().empty());
        for (const auto& gradient : gradients)
          for (const float element : gradient)
            CHECK_EQ(element,
                     (Model::value(0, 0, 0, 0) + Model::value(1, 0, 0, 0)) / 2);
      }
    });
  }
}

// On rank 0 the gradients of two reducers lie in one memory, and two of one
// reducer overlap by half.
TEST(gradients_that_overlap_are_moved_into_the_arena) {
  for (const bool assigns_chunks : {false, true}) {
    run_group(2, [&](HostGroup& group) {
      constexpr size_t kCount = 300'000;
      constexpr size_t kBytes = kCount * sizeof(float);
      const auto make = [&] {
        return std::make_unique<Reducer>(
            group, 3 * kBytes,
            std::vector<ParameterSpan>{{0, kCount, DType::kFloat32},
                                       {kBytes, kCount, DType::kFloat32},
                                       {2 * kBytes, kCount, DType::kFloat32}},
            std::vector<BucketSpan>{{0, 3 * kBytes}}, assigns_chunks);
      };
      const auto one = make();
      const auto two = make();
      std::vector<float> memory(6 * kCount);
      // Where the gradients begin: half of the first is that of the second, and
      // the third is another reducer's first.
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
        std::vector<size_t> moved = one->overlapping();
        std::sort(moved.begin(), moved.end());
        CHECK(moved == (group.rank() == 0 ? std::vector<size_t>{0, 1, 2}
                                          : std::vector<size_t>{}));
        CHECK(two->overlapping().empty());  // the other one has let go
        for (size_t p = 0; p < 6; ++p) {
          const bool is_moved = group.rank() == 0 && p < 3;
          const std::byte* arena = p < 3 ? one->arena() : two->arena();
          const auto* mean =
              is_moved ? reinterpret_cast<const float*>(arena + p % 3 * kBytes)
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
            CHECK_EQ(memory[i], before[i]);  // nobody has written there
        }
      }
    });
  }
}

// Four chunks for each rank, so that they are assigned where there are cores.
TEST(assigned_chunks_with_random_readiness) {
  run_group(2,
            [](HostGroup& group) {
              constexpr size_t kLarge = 200'000;
              constexpr size_t kBytes = kLarge * sizeof(float);
              Reducer reducer(group, 3 * kBytes,
                              {{0, kLarge, DType::kFloat32},
                               {kBytes, kLarge, DType::kFloat32},
                               {2 * kBytes, kLarge, DType::kFloat32}},
                              {{0, 2 * kBytes}, {2 * kBytes, 3 * kBytes}},
                              true);
              std::mt19937 own(5 + static_cast<unsigned>(group.rank()));
              std::vector<std::vector<float>> gradients(
                  3, std::vector<float>(kLarge));
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
                CHECK_EQ(reducer.finish(1, false), is_void ? kPassUnused : 0u);
                for (size_t p = 0; p < 3 && !is_void; ++p)
                  for (size_t i = 0; i < kLarge; ++i)
                    CHECK_EQ(gradients[p][i], (Model::value(0, p, i, step) +
                                               Model::value(1, p, i, step)) /
                                                  2);
              }
            },
            {.timeout_s = 60});
}

TEST(reducers_come_and_go) {
  run_group(3, [](HostGroup& group) {
    Model lasting(group, 1 << 20);
    for (int step = 0; step < 8; ++step) {
      Model passing(group, 1 << 20);
      for (size_t p = 0; p < kParameters; ++p) passing.mark(p, step);
      for (size_t p = kParameters; p-- > 0;) lasting.mark(p, step + 1);
      CHECK_EQ(passing.reducer().finish(1, false), 0u);
      passing.check(step);
      CHECK_EQ(lasting.reducer().finish(1, false), 0u);
      lasting.check(step + 1);
    }
  });
}

TEST(a_death_at_every_step_of_a_pass) {
  constexpr Point kPoints[] = {Point::kMarkReady,    Point::kBeforePost,
                               Point::kAfterPost,    Point::kChunkClaimed,
                               Point::kChunkReduced, Point::kBeforeEnd,
                               Point::kAfterEnd};
  for (const Point point : kPoints) {
    // The kernel tells of the death, which ThreadSanitizer does not see:
    // without this the victim's last chunk and the survivor's next pass look
    // like a race.
    std::atomic<bool> is_dying{false};
    run_group(2, [&](HostGroup& group) {
      Model model(group, 50'000);
      const auto pass = [&](int step) {
        for (size_t p = 0; p < kParameters; ++p) model.mark(p, step);
        model.reducer().finish(1, false);
      };
      pass(0);
      if (group.rank() == 1) {
        arm_fault(point, FaultAction::kRaise, 1);
        // Which rank gets a chunk depends on time: this one gets its first when
        // the other has run out of others.
        const Failure injected = failure_of([&] {
          for (int step = 1;; ++step) pass(step);
        });
        disarm_fault();
        CHECK_EQ(injected.reason, Reason::kInjected);
        is_dying.store(true, std::memory_order_release);
        return group.die_for_test();
      }
      const Failure failure = failure_of([&] {
        for (int step = 1;; ++step) pass(step);
      });
      CHECK(is_dying.load(std::memory_order_acquire));
      CHECK_EQ(failure.reason, Reason::kDied);
      CHECK_EQ(failure.culprit, 1);
      CHECK_EQ(failure_of([&] { pass(99); }).reason, Reason::kDied);
    });
  }
}

TEST(a_rank_that_keeps_its_chunk_is_named_at_the_deadline) {
  run_group(2,
            [](HostGroup& group) {
              static std::atomic<bool> is_over{false};
              Model model(group, 50'000);
              const auto pass = [&] {
                for (size_t p = 0; p < kParameters; ++p) model.mark(p, 0);
                model.reducer().finish(1, false);
              };
              if (group.rank() == 1) {
                arm_fault(Point::kChunkClaimed, FaultAction::kRaise, 1);
                const Failure injected = failure_of([&] {
                  while (true) pass();
                });
                disarm_fault();
                CHECK_EQ(injected.reason, Reason::kInjected);
                while (!is_over.load())
                  sched_yield();  // alive, but does not go on
                return;
              }
              const Failure failure = failure_of([&] {
                while (true) pass();
              });
              is_over = true;
              CHECK_EQ(failure.reason, Reason::kDeadline);
              CHECK(testing::is_late(failure, 1));
            },
            {.timeout_s = 0.5});
}

}  // namespace
}  // namespace paceline

// Backwards between threads: random order of readiness, every verdict,
// statistics, several reducers.

#include "reducer/reducer.h"

#include <math.h>

#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "group_world.h"
#include "reducer_model.h"

namespace paceline {
namespace {

using testing::kParameters;
using testing::kSizes;
using testing::Model;
using testing::run_group;

std::vector<size_t> random_order(std::mt19937& random) {
  std::vector<size_t> order(kParameters);
  for (size_t p = 0; p < kParameters; ++p) order[p] = p;
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

void run_backwards(int ranks, size_t cap_bytes, int num_backwards,
                   double spin_us) {
  run_group(
      ranks,
      [&](HostGroup& group) {
        Model model(group, cap_bytes);
        std::mt19937 own(17 + static_cast<unsigned>(group.rank()));
        std::mt19937 shared(3);
        for (int step = 0; step < num_backwards; ++step) {
          // 0: unused, 1: a skipped backward, 2: one backward of two forwards,
          // 3: an output that one rank does not use
          const unsigned kind = shared() % 6;
          const bool is_odd = group.rank() == step % group.world();
          std::vector<size_t> order = random_order(own);
          if (kind == 0 && is_odd) order.pop_back();
          for (const size_t parameter : order) {
            if (own() % 8 == 0)
              for (unsigned i = own() % 3000; i > 0; --i) cpu_relax();
            model.mark(parameter, step);
          }
          BackwardStatus status(is_odd && (kind == 1 || kind == 2) ? 2 : 1);
          status.reached = is_odd && kind == 2   ? 2
                           : is_odd && kind == 3 ? 0
                                                 : 1;
          const uint32_t flags = model.reducer().finish(status, false);
          const uint32_t expected = kind == 0 ? kBackwardUnused
                                    : kind == 1 && group.world() > 1
                                        ? kBackwardForwardsDiffer
                                        : 0;
          CHECK_EQ(flags, expected);
          if (flags == 0) model.check(step);
          if (kind == 0)
            CHECK_EQ(
                model.reducer().result().unused[step % group.world()].size(),
                size_t{1});
        }
      },
      {.timeout_s = 60, .spin_us = spin_us});
}

TEST(backwards_with_random_readiness) {
  run_backwards(1, 100'000, 6, -1);
  run_backwards(2, 50'000, 20, 20);
  run_backwards(3, 1, 20, 0);
  run_backwards(4, 1 << 30, 12, -1);
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
      CHECK_EQ(flags, kBackwardUnused | (is_bad ? kBackwardNonFinite : 0));
      CHECK(model.reducer().result().unused[1] == std::vector<size_t>{3});
      CHECK(model.reducer().result().globally_unused.empty());
      const auto nonfinite = model.reducer().result().nonfinite;
      CHECK_EQ(nonfinite.size(), is_bad ? size_t{1} : size_t{0});
      if (is_bad) CHECK(nonfinite[0] == std::make_pair(2, size_t{2}));
      CHECK_EQ(model.view(0)[0], model.mean(0, 0, step));
    }
  });
}

// Rank 0 has used a parameter for which the others have an older gradient.
TEST(what_is_left_of_an_unused_parameter_counts_where_it_is_marked_unused) {
  for (const size_t cap_bytes : {size_t{1}, size_t{50'000}, size_t{1} << 30}) {
    run_group(3, [&](HostGroup& group) {
      Model model(group, cap_bytes);
      for (int step = 0; step < 6; ++step) {
        const bool counts = step % 2 == 0;
        for (size_t p = 0; p < kParameters; ++p) {
          const bool is_used = p != 2 && (p != 3 || group.rank() == 0);
          if (is_used) {
            model.mark(p, step);
          } else {
            std::fill_n(model.view(p), kSizes[p], 7.0F);
            if (counts) model.reducer().mark_unused(p);
          }
        }
        CHECK_EQ(model.reducer().finish(1, true), kBackwardUnused);
        const BackwardResult& result = model.reducer().result();
        CHECK(result.unused[1] == (std::vector<size_t>{2, 3}));
        CHECK(result.globally_unused == std::vector<size_t>{2});
        const float used = Model::value(0, 3, 0, step);
        const float mean = (used + (counts ? 14 : 0)) / 3;
        CHECK(fabsf(model.view(3)[0] - mean) < 1e-5F);
        CHECK_EQ(model.view(0)[0], model.mean(0, 0, step));
      }
    });
  }
}

// Void backwards, good ones, and those in which a rank without data marks all.
void run_with_globally_unused(int ranks, size_t cap_bytes) {
  run_group(ranks, [&](HostGroup& group) {
    Model model(group, cap_bytes);
    const std::vector<size_t> globally_unused = {2, 5};
    std::mt19937 own(5 + static_cast<unsigned>(group.rank()));
    std::mt19937 shared(9);
    for (int step = 0; step < 24; ++step) {
      const unsigned kind = shared() % 4;  // 0: one uses more, 1: all are used
      const bool is_odd = group.rank() == step % ranks;
      const bool is_finished = kind == 2 && ranks > 1 && is_odd;
      const auto leaves_out = [&](size_t p) {
        if (kind == 1 || is_finished || (kind == 0 && is_odd && p == 5))
          return false;
        return p == 2 || p == 5;
      };
      for (const size_t p : random_order(own))
        if (!leaves_out(p)) model.mark(p, step);
      const BackwardStatus status =
          is_finished ? BackwardStatus::without_data() : 1;
      const uint32_t flags = model.reducer().finish(status, false, true);
      const bool is_void = kind == 0 && ranks > 1;
      CHECK_EQ(flags,
               is_void ? kBackwardUnused
                       : (kind == 1 ? 0 : kBackwardGloballyUnused) |
                             (kind == 2 && ranks > 1 ? kBackwardFinished : 0));
      CHECK_EQ(isnan(model.reducer().squared_norm()), is_void);
      if (is_void) {
        CHECK(model.reducer().result().globally_unused ==
              std::vector<size_t>{2});
        continue;
      }
      for (const size_t p : {0, 3, 6})
        CHECK_EQ(model.view(p)[0], model.mean(p, 0, step));
      if (kind == 1) {
        model.check(step);
      } else if (kind == 2 || ranks > 1) {
        CHECK(model.reducer().result().globally_unused == globally_unused);
      }
    }
  });
}

TEST(globally_unused_parameters_are_reported) {
  run_with_globally_unused(1, 100'000);
  run_with_globally_unused(2, 50'000);
  run_with_globally_unused(3, 1);
  run_with_globally_unused(4, 1 << 30);
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

TEST(an_overflowing_sum_of_finite_gradients_is_reported) {
  run_group(2, [](HostGroup& group) {
    constexpr size_t kCount = 20'000;
    constexpr size_t kBytes = kCount * sizeof(double);
    Reducer reducer(
        group.heap, 2 * kBytes,
        {{0, kCount, DType::kFloat32}, {kBytes, kCount, DType::kFloat64}},
        {{0, 2 * kBytes}}, false);
    auto* singles = reinterpret_cast<float*>(reducer.gradient_buffer());
    auto* doubles =
        reinterpret_cast<double*>(reducer.gradient_buffer() + kBytes);
    const auto backward = [&](float single, double two) {
      std::fill_n(singles, kCount, 1.0f);
      std::fill_n(doubles, kCount, 1.0);
      singles[kCount - 1] = single;
      doubles[0] = two;
      reducer.mark_ready(0, nullptr);
      reducer.mark_ready(1, nullptr);
      return reducer.finish(1, false);
    };
    CHECK_EQ(backward(3e38f, 1), kBackwardOverflow);
    CHECK(reducer.result().overflowed == std::vector<size_t>{0});
    CHECK(reducer.result().nonfinite.empty());
    CHECK_EQ(singles[kCount - 1], INFINITY);
    CHECK_EQ(backward(1, 1e200), 0u);  // only its square overflows
    CHECK(reducer.result().overflowed.empty());
    CHECK_EQ(backward(-3e38f, 1.5e308), kBackwardOverflow);
    CHECK(reducer.result().overflowed == (std::vector<size_t>{0, 1}));
    CHECK_EQ(backward(group.rank() == 0 ? INFINITY : 1, 1), kBackwardNonFinite);
    CHECK(reducer.result().overflowed.empty());
  });
}

TEST(a_backward_without_means_has_no_norm) {
  run_group(2, [](HostGroup& group) {
    Model model(group, 50'000);
    CHECK_EQ(model.reducer().squared_norm(), 0.0);
    for (int step = 0; step < 4; ++step) {
      const bool is_void = step % 2 == 1;
      for (size_t p = 0; p < kParameters - is_void; ++p) model.mark(p, step);
      CHECK_EQ(model.reducer().finish(1, false),
               is_void ? kBackwardUnused : 0u);
      CHECK_EQ(isnan(model.reducer().squared_norm()), is_void);
    }
  });
}

}  // namespace
}  // namespace paceline

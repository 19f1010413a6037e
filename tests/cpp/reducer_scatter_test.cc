// Backwards that scatter: each rank receives the means that it owns.

#include <math.h>

#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "core/failure.h"
#include "group_world.h"
#include "reducer/reducer.h"
#include "reducer_layout.h"
#include "reducer_model.h"

namespace paceline {
namespace {

using testing::kParameters;
using testing::kSizes;
using testing::Model;
using testing::ReducerLayout;
using testing::run_group;

constexpr int kWorld = 3;

/// All bytes of all parameters; some segments belong to two or three ranks.
std::vector<OwnedBytes> owned_by_three(const ReducerLayout& layout) {
  std::vector<OwnedBytes> owned;
  int rank = 0;
  for (size_t p = kParameters; p-- > 0;) {
    const size_t begin = layout.parameters[p].offset;
    const size_t cuts[] = {0, kSizes[p] / 5, kSizes[p] / 4, kSizes[p]};
    for (int i = 0; i < 3; ++i) {
      if (cuts[i] == cuts[i + 1]) continue;
      owned.push_back({begin + cuts[i] * sizeof(float),
                       begin + cuts[i + 1] * sizeof(float), rank++ % kWorld});
    }
  }
  return owned;
}

/// One rank of three, whose gradients lie outside of the gradient buffer.
class Scattering {
 public:
  Scattering(HostGroup& group, size_t cap_bytes)
      : layout_(kSizes, cap_bytes),
        owned_(owned_by_three(layout_)),
        rank_(group.rank()),
        reducer_(group.heap, layout_.buffer_bytes, layout_.parameters,
                 layout_.buckets, true, owned_) {
    for (const size_t count : kSizes) gradients_.emplace_back(count);
  }
  Reducer& reducer() { return reducer_; }
  void mark(size_t p, int step, bool in_buffer = false) {
    std::vector<float>& gradient = gradients_[p];
    for (size_t i = 0; i < kSizes[p]; ++i)
      gradient[i] = Model::value(rank_, p, i, step);
    if (in_buffer)
      std::copy(gradient.begin(), gradient.end(), layout_.view(reducer_, p));
    reducer_.mark_ready(p, in_buffer ? nullptr : gradient.data());
  }
  /// This rank's shard is the mean, and no gradient was written to.
  void check(int step) {
    for (const OwnedBytes& range : owned_) {
      if (range.rank != rank_) continue;
      const auto at =
          std::find_if(layout_.parameters.rbegin(), layout_.parameters.rend(),
                       [&](const ParameterSpan& span) {
                         return span.offset <= range.begin && span.count > 0;
                       });
      const auto p = static_cast<size_t>(layout_.parameters.rend() - at) - 1;
      const size_t from = (range.begin - at->offset) / sizeof(float);
      const size_t to = (range.end - at->offset) / sizeof(float);
      for (size_t i = from; i < to; ++i)
        CHECK_EQ(layout_.view(reducer_, p)[i], mean(p, i, step));
    }
    double norm = 0;
    for (size_t p = 0; p < kParameters; ++p) {
      for (size_t i = 0; i < kSizes[p]; ++i) {
        CHECK_EQ(gradients_[p][i], Model::value(rank_, p, i, step));
        norm += static_cast<double>(mean(p, i, step)) * mean(p, i, step);
      }
    }
    CHECK(fabs(reducer_.squared_norm() - norm) <= 1e-9 * norm);
  }

 private:
  static float mean(size_t p, size_t i, int step) {
    float sum = 0;
    for (int r = 0; r < kWorld; ++r) sum += Model::value(r, p, i, step);
    return sum / kWorld;
  }

  const ReducerLayout layout_;
  const std::vector<OwnedBytes> owned_;
  const int rank_;
  Reducer reducer_;
  std::vector<std::vector<float>> gradients_;
};

TEST(owners_get_the_mean_and_gradients_stay_as_they_are) {
  run_group(kWorld,
            [](HostGroup& group) {
              for (const size_t cap_bytes : {size_t{1}, size_t{70'000}}) {
                Scattering model(group, cap_bytes);
                std::mt19937 own(7 + static_cast<unsigned>(group.rank()));
                for (int step = 0; step < 16; ++step) {
                  size_t order[kParameters];
                  for (size_t p = 0; p < kParameters; ++p) order[p] = p;
                  std::shuffle(order, order + kParameters, own);
                  const bool is_void = step % 4 == 2;
                  const bool is_broken_off = step % 4 == 3;
                  for (const size_t p : order) {
                    if (is_void && p == 2 && group.rank() == 1) continue;
                    model.mark(p, step, own() % 4 == 0);
                  }
                  if (is_broken_off) {
                    CHECK_EQ(model.reducer().finish(
                                 BackwardStatus::broken_off(), true),
                             kBackwardForwardsDiffer | kBackwardReported);
                  } else if (is_void) {
                    CHECK_EQ(model.reducer().finish(1, false), kBackwardUnused);
                  } else {
                    CHECK_EQ(model.reducer().finish(1, false), 0u);
                    CHECK(model.reducer().result().overlapping.empty());
                    model.check(step);
                  }
                }
              }
            },
            {.timeout_s = 60});
}

TEST(bytes_without_an_owner_are_refused) {
  run_group(2, [](HostGroup& group) {
    for (const std::vector<OwnedBytes>& owned :
         {std::vector<OwnedBytes>{{0, 32, 0}},
          std::vector<OwnedBytes>{{0, 32, 0}, {36, 64, 1}},
          std::vector<OwnedBytes>{{0, 64, 2}},
          std::vector<OwnedBytes>{{4, 64, 1}}}) {
      bool was_refused = false;
      try {
        Reducer(group.heap, 64, {{0, 16, DType::kFloat32}}, {{0, 64}}, true,
                owned);
      } catch (const Failure& failure) {
        was_refused = failure.message.find("has no owner") != std::string::npos;
      }
      CHECK(was_refused);
    }
  });
}

}  // namespace
}  // namespace paceline

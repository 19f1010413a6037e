// A reducer for a few parameters, and the expected means.
#pragma once

#include <math.h>

#include <memory>

#include "check.h"
#include "group_world.h"
#include "reducer/reducer.h"
#include "reducer_layout.h"

namespace paceline::testing {

inline constexpr size_t kSizes[] = {10, 1, 40'000, 16'384, 0, 16'385, 700};
inline constexpr size_t kParameters = sizeof(kSizes) / sizeof(kSizes[0]);

/// One rank's reducer for parameters of kSizes floats.
class Model {
 public:
  Model(HostGroup& group, size_t cap_bytes)
      : group_(group),
        layout_(kSizes, cap_bytes),
        reducer_(std::make_unique<Reducer>(group.heap, layout_.buffer_bytes,
                                           layout_.parameters, layout_.buckets,
                                           false)) {}

  Reducer& reducer() { return *reducer_; }
  float* view(size_t parameter) { return layout_.view(*reducer_, parameter); }
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
  const ReducerLayout layout_;
  std::unique_ptr<Reducer> reducer_;
};

}  // namespace paceline::testing

// The places of a test's parameters in a reducer's gradient buffer.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "reducer/reducer.h"

namespace paceline::testing {

/// Parameters of floats one after the other, cut into buckets.
struct ReducerLayout {
  std::vector<ParameterSpan> parameters;
  std::vector<BucketSpan> buckets;
  size_t buffer_bytes = 0;

  /// `sizes` in elements. A bucket ends with the first block or parameter that
  /// fills `cap_bytes`.
  ReducerLayout(std::span<const size_t> sizes, size_t cap_bytes) {
    size_t begin = 0;
    const auto cut = [&](size_t end) {
      if (end - begin < cap_bytes) return;
      buckets.push_back({begin, end});
      begin = end;
    };
    for (const size_t count : sizes) {
      const size_t at = buffer_bytes;
      parameters.push_back({at, count, DType::kFloat32});
      for (size_t block = kSegmentElements; block < count;
           block += kSegmentElements)
        cut(at + block * sizeof(float));
      buffer_bytes = at + (count * sizeof(float) + 63) / 64 * 64;
      cut(buffer_bytes);
    }
    if (begin < buffer_bytes) buckets.push_back({begin, buffer_bytes});
  }

  float* view(const Reducer& reducer, size_t parameter) const {
    return reinterpret_cast<float*>(reducer.gradient_buffer() +
                                    parameters[parameter].offset);
  }
};

}  // namespace paceline::testing

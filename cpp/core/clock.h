// Monotonic time, for deadlines and budgets.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstdint>

namespace paceline {

inline int64_t now_ns() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return int64_t{ts.tv_sec} * 1'000'000'000 + ts.tv_nsec;
}

/// Caps at 30 years, which stand for "for ever", so that a sum of two still
/// fits.
inline int64_t seconds_to_ns(double seconds) {
  seconds = std::min(seconds, 1e9);
  return static_cast<int64_t>(seconds * 1e9);
}

}  // namespace paceline

// Monotonic time, for deadlines and budgets.
#pragma once

#include <time.h>

#include <cstdint>

namespace paceline {

inline int64_t now_ns() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return int64_t{ts.tv_sec} * 1'000'000'000 + ts.tv_nsec;
}

inline int64_t seconds_to_ns(double seconds) {
  return static_cast<int64_t>(seconds * 1e9);
}

}  // namespace paceline

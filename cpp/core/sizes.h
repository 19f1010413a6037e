// Sizes used throughout the core.
#pragma once

#include <cstddef>

namespace paceline {

/// The factor by which buffers, chunks and tables are smaller in the protocol's
/// schedule tests: those explore millions of schedules, and large sizes only
/// cost time.
#ifdef PACELINE_SCHEDULER
inline constexpr size_t kSmaller = 64;
#else
inline constexpr size_t kSmaller = 1;
#endif

/// The maximum number of ranks in one group; Python reads it as
/// _core.MAX_RANKS. Up to this number, a sleep on the life words of all ranks
/// is one system call (kMaxFutexWaits), and a set of ranks is two words of 64
/// bits.
inline constexpr int kMaxRanks = kSmaller > 1 ? 8 : 128;

/// Two cache lines: adjacent-line prefetchers load lines in pairs.
inline constexpr size_t kLinePairBytes = 128;

/// A cache line. Each gradient in a gradient buffer begins at one, so that two
/// gradients never share a line, and every vector load at a gradient's start is
/// aligned. Python reads it as _core.ALIGNMENT_BYTES.
inline constexpr size_t kAlignmentBytes = kLinePairBytes / 2;

}  // namespace paceline

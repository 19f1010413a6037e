// Sizes that everything in the core shares.
#pragma once

#include <cstddef>

namespace paceline {

/// The tests of the protocol explore schedules by the million, and large sizes
/// only cost them time: there, buffers, chunks and tables are this much
/// smaller.
#ifdef PACELINE_SCHEDULER
inline constexpr size_t kSmaller = 64;
#else
inline constexpr size_t kSmaller = 1;
#endif

/// The ranks of one group at most; Python reads it as _core.MAX_RANKS. A sleep
/// on everybody's life word is one system call up to this (kMaxFutexWaits), and
/// sets of ranks are two words of 64 bits.
inline constexpr int kMaxRanks = kSmaller > 1 ? 8 : 128;

/// Two cache lines: adjacent-line prefetchers pull lines in pairs.
inline constexpr size_t kLinePairBytes = 128;

/// A cache line. Each gradient of a gradient buffer begins at one: two never
/// share it, and every vector load of a gradient's start is aligned. Python
/// reads it as _core.ALIGNMENT_BYTES.
inline constexpr size_t kAlignmentBytes = kLinePairBytes / 2;

}  // namespace paceline

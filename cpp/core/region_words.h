// The words of the region through which ranks communicate. Where they lie in it
// is in region_layout.h.
//
// Everything in Header, Allocation, RankLine and Channel starts as zeros, which
// is a valid initial state.
#pragma once

#include <linux/futex.h>

#include <cstddef>
#include <cstdint>

#include "core/atomics.h"
#include "core/failure.h"
#include "core/sizes.h"

namespace paceline {

inline constexpr size_t kMaxAllocations = 4096 / kSmaller;

enum class CallKind : uint32_t {
  kNone = 0,
  kAllReduce = 1,
  kBroadcast = 2,
  kAllGather = 3,
  kReduceScatter = 4,
  kReduce = 5,
  kGather = 6,
  kScatter = 7,
  kAllToAll = 8,
  kBarrier = 9,
  kAllocate = 10,
};

/// The name that Python and its users see; null: no such call.
constexpr const char* name_of(CallKind kind) {
  switch (kind) {
    case CallKind::kNone:
      return "none";
    case CallKind::kAllReduce:
      return "all_reduce";
    case CallKind::kBroadcast:
      return "broadcast";
    case CallKind::kAllGather:
      return "all_gather";
    case CallKind::kReduceScatter:
      return "reduce_scatter";
    case CallKind::kReduce:
      return "reduce";
    case CallKind::kGather:
      return "gather";
    case CallKind::kScatter:
      return "scatter";
    case CallKind::kAllToAll:
      return "all_to_all";
    case CallKind::kBarrier:
      return "barrier";
    case CallKind::kAllocate:
      return "allocate";
  }
  return nullptr;
}

/// The call that a rank makes. Ranks compare their calls, and the error shows
/// them when they differ.
struct CallRecord {
  uint64_t number = 0;  ///< counts this rank's calls, from 1
  uint64_t count = 0;   ///< elements or bytes
  CallKind kind = CallKind::kNone;
  uint32_t dtype = 0;
  uint32_t op = 0;
  int32_t root = 0;
  double weight = 1;  ///< may differ between ranks

  uint64_t fingerprint() const;
};

inline constexpr uint32_t kCallsDiffer = 1;
inline constexpr uint32_t kPlacesDiffer = 2;

/// A barrier that counts arrivals and resets itself. It also compares two words
/// between ranks: the fingerprint of their call, and the place of their array.
struct alignas(kLinePairBytes) Gate {
  Atomic<uint64_t> fingerprint;  ///< of the first rank to arrive; 0: none has
  Atomic<uint64_t> place;        ///< of the first rank to arrive; 0: none has
  /// kCallsDiffer and kPlacesDiffer of the current phase.
  Atomic<uint32_t> flags;
  Atomic<uint32_t> arrived;
  /// Futex word: completed phases.
  alignas(kLinePairBytes) Atomic<uint32_t> phase;
  Atomic<uint32_t> verdict;  ///< `flags` of the last completed phase
  Atomic<uint32_t> sleepers;
};

/// An array that Group.allocate returned. It has the same offset in every
/// rank's slab.
struct Allocation {
  Atomic<uint64_t> offset;  ///< in the slab
  Atomic<uint64_t> bytes;   ///< 0: the entry is free
  Atomic<uint32_t> owners;  ///< ranks that have not freed it
  Atomic<uint32_t> next;    ///< of Header::freed_allocations
};

inline constexpr uint32_t kNoRoom = kMaxAllocations;
inline constexpr uint32_t kNoMemoryLeft = kMaxAllocations + 1;
inline constexpr uint32_t kNoAllocationLeft = kMaxAllocations + 2;

struct Header {
  uint64_t magic;
  uint32_t abi_version;
  uint32_t world;
  uint64_t slab_bytes;
  uint64_t nonce[2];  ///< of the job; detects a rank that maps the wrong memory

  /// Futex word: 0, or why the group ended: reason << 16 | reporting rank << 8
  /// | culprit. Set once, by CAS.
  alignas(kLinePairBytes) Atomic<uint32_t> abort;
  /// Futex word: counts ranks that left in good order, so that ranks waiting
  /// for them check again.
  alignas(kLinePairBytes) Atomic<uint32_t> departures;
  /// Futex word: counts ranks that have attached.
  Atomic<uint32_t> attached;

  Gate gate;
  /// Result of an allocation, decided by rank 0 between two barriers: the
  /// entry's number, kNoRoom, kNoMemoryLeft or kNoAllocationLeft.
  alignas(kLinePairBytes) Atomic<uint32_t> last_allocation;
  /// The list of entries whose arrays all ranks have freed, for rank 0 to
  /// reuse: the number of its first entry plus 1, or 0 if it is empty. Each
  /// entry names the next.
  Atomic<uint32_t> freed_allocations;
};

/// Values of RankLine::life other than the holder's thread id and the kernel's
/// FUTEX_OWNER_DIED.
inline constexpr uint32_t kLifeNotYet = 0;
inline constexpr uint32_t kLifeLeft = 0x3fffffff;  // no thread id is that large

/// How the other ranks learn that a rank has died.
enum class LivenessCheck : uint32_t {
  kKernel = 0,    ///< the kernel marks `life`
  kFileLock = 1,  ///< the region's lock with the rank's number is free
  kNone = 2,      ///< neither works here: a dead rank only shows as late
};

/// Fields of RankLine::crash: the number of the signal whose handler is
/// running; a count of such signals; a beat, which the rank's liveness thread
/// changes while it runs; and a bit that is set once the process is sure to
/// die.
inline constexpr uint32_t kCrashSignal = 0x000000ff;
inline constexpr uint32_t kCrashCount = 0x000fff00;
inline constexpr uint32_t kCrashBeat = 0x7ff00000;
inline constexpr uint32_t kOneBeat = 0x00100000;
inline constexpr uint32_t kCrashIsFatal = 0x80000000;

/// Clears the crash word, if it still describes this crash.
inline void end_crash(Atomic<uint32_t>& crash, uint32_t word) {
  uint32_t seen = crash.load(std::memory_order_relaxed);
  // Release: the handler has finished its work; pairs with the acquire of
  // LivenessThread::look_at() on other ranks.
  while ((seen & ~kCrashBeat) == (word & ~kCrashBeat) &&
         !crash.compare_exchange_weak(seen, 0, std::memory_order_release)) {
  }
}

/// What one rank publishes to the others. Only its owner writes it, except
/// `life` and `crash`, in which other ranks mark its death where the kernel
/// does not.
struct alignas(kLinePairBytes) RankLine {
  // The kernel finds `life` at a fixed distance from the list node when the
  // holder's thread ends. Both are here rather than in the holder's own memory,
  // which the kernel may already have reclaimed if memory had run out.
  robust_list_head robust_head;
  void* robust_next;
  /// Futex word: the liveness thread's id, marked by the kernel when it dies.
  Atomic<uint32_t> life;
  /// Set before `life`.
  Atomic<LivenessCheck> check;
  /// 0, or the crash for which a handler is running.
  Atomic<uint32_t> crash;
  Atomic<uint32_t> pid;
  /// cpu_set_t of the process, to check whether the ranks of this host fit on
  /// their cores.
  uint8_t affinity[128];
  Atomic<uint32_t> affinity_known;

  /// Calls n and n + 1 use different entries. Call n + 2 reuses the entry of n,
  /// which no rank reads once all ranks are in n + 1.
  alignas(kLinePairBytes) CallRecord call[2];
  Atomic<uint64_t> call_number;
  Atomic<uint32_t> arrivals;  ///< gate phases that this rank has arrived in

  /// Futex word: point-to-point traffic for this rank.
  alignas(kLinePairBytes) Atomic<uint32_t> bell;
  Atomic<uint32_t> bell_sleepers;

  /// The ranks for which this rank waited in vain, if `abort` names this rank
  /// as the reporting rank.
  alignas(kLinePairBytes) uint64_t late[2];
  double waited_s;
  /// The ranks that were waiting themselves at that time, if a deadline passed.
  uint64_t waiting[2];
  /// Where this rank waits, by wait_place(), and for which ranks; 0: nowhere.
  /// Kept when the group ends during the wait: the errors of all ranks show it.
  Atomic<uint64_t> waits_at;
  Atomic<uint64_t> waits_for[2];
  /// When the wait began, by now_ns().
  Atomic<int64_t> waits_since_ns;
  /// When this rank last checked whether its wait was over, by now_ns().
  /// Release: publishes the words above; pairs with Session::is_crossed().
  Atomic<int64_t> looked_ns;
  /// Whether only the end of that wait can bring this rank to another call: no
  /// other thread of it makes calls, and the wait is not nested in another.
  Atomic<uint32_t> waits_alone;
  /// Forwards since the last backward, published with `activity`.
  Atomic<uint32_t> forwards;
  /// Whether this rank has raised because of `abort`.
  Atomic<uint32_t> is_informed;
  /// Why this rank could not reserve its memory for the last allocation: an
  /// errno; 0: it could. Written before the last barrier of that call.
  Atomic<uint32_t> allocation_error;
  /// Why this rank raised, if `abort` names it as the reporting rank.
  char message[1024];
  /// What the rank did last, as text that may change while others read it; see
  /// shared_text.h.
  char activity[128];
};

/// What a rank waits for.
enum class WaitKind : uint32_t {
  kNowhere = 0,
  kForming = 1,   ///< all ranks of the group to attach
  kCall = 2,      ///< a collective's gate
  kBackward = 3,  ///< the end of a backward, or its chunks
  kHostSums = 4,  ///< gradients of its host's ranks, in a job of several hosts
  kMessage = 5,   ///< a message between two ranks
};

/// The name that Python sees; null: no such kind.
constexpr const char* name_of(WaitKind kind) {
  switch (kind) {
    case WaitKind::kNowhere:
      return "";
    case WaitKind::kForming:
      return "forming";
    case WaitKind::kCall:
      return "call";
    case WaitKind::kBackward:
      return "backward";
    case WaitKind::kHostSums:
      return "host_sums";
    case WaitKind::kMessage:
      return "message";
  }
  return nullptr;
}

/// Where a rank waits, as one word that is not 0. Ranks that wait for the same
/// thing have the same word.
inline constexpr uint64_t wait_place(WaitKind kind, uint64_t number) {
  return static_cast<uint64_t>(kind) << 56 |
         (number & ((uint64_t{1} << 56) - 1));
}

inline constexpr WaitKind kind_of(uint64_t place) {
  return static_cast<WaitKind>(place >> 56);
}

/// One direction between two ranks: a ring of bytes in the sender's outbox.
/// Positions only grow.
struct alignas(kLinePairBytes) Channel {
  /// Release: publishes the bytes before it; pairs with the receiver's acquire.
  Atomic<uint64_t> written;
  /// Release: frees the bytes before it; pairs with the sender's acquire.
  alignas(kLinePairBytes) Atomic<uint64_t> read;
};

inline constexpr uint32_t pack_abort(Reason reason, int by, int culprit) {
  return static_cast<uint32_t>(reason) << 16 |
         static_cast<uint32_t>(by & 0xff) << 8 |
         static_cast<uint32_t>(culprit & 0xff);
}

/// The rank to blame; -1: a deadline passed, and no rank was seen to be late.
inline constexpr int culprit_of(uint32_t abort_word) {
  return static_cast<int8_t>(abort_word & 0xff);
}

}  // namespace paceline

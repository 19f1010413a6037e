// Runs one backward after the other: gradients become ready, buckets are
// posted, chunks are reduced by any rank that has time, and at the end every
// rank holds the mean.
//
// Words
//   gradient buffer
//            one contiguous range of each rank's slab, at the same offset, with a
//            place for every gradient
//   bucket   a byte range of the gradient buffer; a rank posts it once every
//            gradient in it is final there
//   segment  at most kSegmentElements of one parameter: the unit of the
//            statistics, the same for every bucket size
//   chunk    consecutive segments of one bucket: the unit of work
//   receiver a rank that needs the mean of a segment: all ranks, or, in a
//            backward that scatters, those that own some of it
//
// Steps of backward p, for N ranks (counters only grow; nothing is reset)
//   1. a rank posts bucket b:   arrived[b] += 1
//                               (release: its gradients of b are in place)
//   2. arrived[b] == N * p:     b is complete, any rank may claim chunks of it
//                               (acquire)
//   3. claim[b] = (p, next):    a compare-and-swap hands each chunk to exactly
//                               one rank, which reads every rank's copy and
//                               writes the mean into the copies of its
//                               receivers
//   4. chunks_done += 1         (release: that chunk is written everywhere)
//   5. a rank's backward ends:  ended += 1, with its unused parameters; the last
//                               rank to end writes the verdict, whether to go
//                               on, and sets ended_backward = p
//   6. chunks_done == p * all:  the backward is complete, and its mean is in
//                               place (acquire)
//
// If a rank allows unused parameters (any, or only globally unused ones), it
// writes zeros for them before step 5. If only globally unused ones are allowed
// and the verdict reports any, each rank then compares the unused parameters of
// all ranks with data, and all ranks come to the same result: either they are
// the same on all of them, or the backward is void.
//
// A backward succeeds for all ranks or for none
//
// Ranks wait for a count to reach a number: ended_backward the number of the
// backward, chunks_done that of step 6, restarted that of the barrier after a
// void backward. They are settled counts (settled_count.h): all ranks see the
// same end of every wait, whether a death or the last chunk comes first. A rank
// that never waits in a backward has not added to `ended`, and without it no
// rank passes step 5. The poison bit is set before or soon after the group's
// abort word, which wakes the waiting ranks.
//
// After the end of the group
//
// A rank that was stopped while it reduced a chunk, and goes on later, still
// writes that chunk into every rank's gradient buffer; it checks the abort word
// before each further chunk. So a reducer whose backward fails, and whose
// gradients may be in the gradient buffer, makes its own copy of the gradient
// buffer private: same addresses, same values, visible to this process alone.
//
// Chunks are claimed, because a rank that is behind in its backward has the
// least time for them, and the ranks that wait for it have the most. In a large
// bucket they are assigned to the ranks in turn if gradients are outside the
// gradient buffer and every rank has a core of its own: what a rank reduces
// itself need not be copied into the gradient buffer (with two ranks, half of
// all gradients).
//
// Gradients outside the gradient buffer
//
// Their memory belongs to the framework, which may use it for other gradients,
// too. While a rank's backward runs, autograd may still have to read it, so it
// is read and never written: a rank takes no chunk of a bucket with such
// gradients before its own backward has ended. From then on it reads a gradient
// where it is and writes the mean there. Gradients that overlap with each other
// are moved into the gradient buffer at the end of backward, before anything is
// written; their means stay there, and the result lists them.
//
// A backward that scatters
//
// If every element has an owner, its mean is written to the owner's gradient
// buffer and nowhere else: N reads and 1 write for each element on N ranks,
// where other backwards make N reads and N writes. All chunks are assigned: the
// owner of a segment's first element reduces the whole segment, so that its
// contribution to the norm has the same bits as in any other backward. Other
// ranks that own some of the segment are its receivers, too; they do not read
// the elements that they do not own. The memory of gradients outside the
// gradient buffer is read and never written, so gradients may overlap. Nothing
// is reduced before a rank's own backward ends: an owner has whole buckets to
// reduce, and doing that at once would delay its backward's later buckets, for
// which the others wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "collectives/heap.h"
#include "core/atomics.h"
#include "core/region_words.h"
#include "core/session.h"
#include "core/sizes.h"
#include "kernels/kernels.h"
#include "reducer/backward_result.h"
#include "reducer/backward_status.h"
#include "reducer/backward_times.h"
#include "reducer/overlapping_gradients.h"
#include "reducer/settled_count.h"

namespace paceline {

struct ParameterSpan {
  /// Bytes into the gradient buffer, a multiple of kAlignmentBytes.
  size_t offset;
  size_t count;  ///< elements
  DType dtype;
};

struct BucketSpan {
  size_t begin;  ///< bytes into the gradient buffer
  size_t end;
};

/// Bytes of the gradient buffer whose mean one rank needs.
struct OwnedBytes {
  size_t begin;
  size_t end;
  int rank;
};

inline constexpr size_t kSegmentElements = 16384 / kSmaller;
inline constexpr uint32_t kBackwardUnused = 1;
inline constexpr uint32_t kBackwardNonFinite = 2;
/// Ranks skipped a forward or a backward, by BackwardStatus::difference().
inline constexpr uint32_t kBackwardForwardsDiffer = 4;
inline constexpr uint32_t kBackwardFinished = 8;
inline constexpr uint32_t kBackwardOverflow = 16;
/// The notes of the ranks differ. This is not an error by itself: the means are
/// in place.
inline constexpr uint32_t kBackwardNotesDiffer = 32;
/// Replaces kBackwardUnused if no rank has used any of these parameters, and
/// that is allowed.
inline constexpr uint32_t kBackwardGloballyUnused = 64;
/// A rank left parameters unused against its settings. Only exchanged between
/// ranks; callers get kBackwardUnused.
inline constexpr uint32_t kBackwardUnusedRefused = 128;
/// A rank reported more than its counts of forwards; see BackwardStatus.
inline constexpr uint32_t kBackwardReported = 256;
/// Ranks left different numbers of forwards without a backward. Only exchanged
/// between ranks, while kBackwardForwardsDiffer means there that they made
/// different numbers of forwards. Callers get kBackwardForwardsDiffer if both
/// are set.
inline constexpr uint32_t kBackwardLeftDiffer = 512;

class Reducer final : OpenBackward {
 public:
  using OpenBackward::add_foreign;
  /// Collective: allocates the gradient buffer and the counters.
  /// `assigns_chunks`: gradients will be outside the gradient buffer; see
  /// above. `owned`: means are scattered; covers all bytes of all parameters,
  /// the same on all ranks. Empty: all ranks get all means.
  Reducer(Heap& heap, size_t buffer_bytes,
          const std::vector<ParameterSpan>& parameters,
          const std::vector<BucketSpan>& buckets, bool assigns_chunks,
          std::vector<OwnedBytes> owned = {});
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  std::byte* gradient_buffer() const { return buffer_of(session_.rank()); }
  /// Sets the weight of this rank in the mean of the next backward.
  /// `is_in_gradients`: its gradients are sums that include the weight already,
  /// so the weight counts in the divisor alone; the same on all ranks.
  void set_weight(double weight, bool is_in_gradients = false) {
    weight_ = weight;
    are_weights_in_gradients_ = is_in_gradients;
  }
  /// Sets what this rank reports at the end of this backward; 0: nothing, which
  /// agrees with every note. `recorded_backward`: the backward's number in a
  /// recording, which notes when this rank has all its gradients; negative:
  /// records nothing.
  void set_note(uint32_t note, int64_t recorded_backward = -1) {
    note_ = note;
    recorded_backward_ = recorded_backward;
  }
  /// The gradient of a parameter is final, and the caller has copied `bytes`
  /// from `gradient` into the gradient buffer and will copy the mean back
  /// there. `is_shared`: see OpenBackward::add_copied().
  void mark_copied(size_t index, void* gradient, size_t bytes, bool is_shared);
  /// The gradient of a parameter is final at `gradient` (null: in the gradient
  /// buffer already). Its memory is read until finish() returns, and written
  /// only within finish(); if means are scattered, it is never written.
  void mark_ready(size_t index, void* gradient);
  /// This backward has not used the parameter, but the content of its place in
  /// the gradient buffer counts in the mean, instead of zeros.
  void mark_unused(size_t index);
  /// Ends this rank's backward; blocks until the backward is complete on all
  /// ranks. Returns kBackward... flags. Globally unused: unused on all ranks
  /// that have data.
  uint32_t finish(const BackwardStatus& status, bool allow_unused,
                  bool allow_globally_unused = false);
  /// Whether this rank has marked gradients of a backward that it has not
  /// finished.
  bool in_backward() const { return in_backward_; }

  /// The result of the last backward; call it before another one ends.
  BackwardResult result() const;
  /// Ranks that wait at the end of a backward which this rank has not ended.
  std::vector<int> waiting_ranks() const;
  /// NaN if the last backward was not averaged.
  double squared_norm() const;
  /// Since the reducer was made. Working time excludes what a rank slept in
  /// waits of any group.
  BackwardTimes& times() { return times_; }
  size_t num_chunks() const { return total_chunks_; }
  void close();

 private:
  static constexpr int kNoRank = -1;
  struct Segment {
    /// In bytes, within the gradient buffer.
    size_t offset;
    uint32_t count;
    uint32_t parameter;
    /// The position of this segment in the order in which squared norms are
    /// summed: by parameter, then by offset in the parameter.
    uint32_t order;
    DType dtype;
    /// The rank to which its chunk is assigned.
    int owner = kNoRank;
    /// Indices into receivers_, if means are scattered.
    uint32_t first_receiver = 0;
    uint32_t end_receiver = 0;
    size_t bytes() const { return count * dtype_bytes(dtype); }
  };
  /// All that a hook needs, side by side: it runs between kernels that leave
  /// little of it in the caches.
  struct alignas(64) Parameter {
    ParameterSpan span;
    uint32_t first_segment = 0;  ///< into segments_in_order_
    uint32_t end_segment = 0;
    uint32_t first_part = 0;  ///< into bucket_of_part_
    uint32_t end_part = 0;
    /// The last backward in which its gradient was marked ready.
    uint64_t ready_in_backward = 0;
    /// The last backward in which it was unused while its place counts.
    uint64_t counts_in_backward = 0;
    /// Where the mean is copied to; null: it stays in the gradient buffer.
    std::byte* copy_back = nullptr;
  };
  struct Chunk {
    uint32_t first_segment;
    uint32_t end_segment;
  };
  struct Bucket {
    uint32_t first_chunk;
    uint32_t end_chunk;
    /// The number of parameters with a part in this bucket.
    uint32_t parameters = 0;
    /// The number of those that are not ready in this backward.
    uint32_t pending = 0;
    /// Whether this rank has posted it in this backward.
    bool posted = false;
    /// Whether no chunk is left to claim.
    bool exhausted = false;
    /// Whether it holds gradients of this rank that are outside the gradient
    /// buffer.
    bool has_outside = false;
    /// The number of its chunks that this rank has reduced in this backward.
    uint32_t done = 0;
    /// Whether each of its chunks is assigned to one rank.
    bool is_assigned = false;
    /// The range of own_chunks_ with those assigned to this rank.
    uint32_t first_own = 0;
    uint32_t end_own = 0;
  };
  // The following is in rank 0's copy of the control array.
  struct alignas(kLinePairBytes) BackwardControl {
    Atomic<uint64_t> ended;
    /// kBackward... flags of the backward that is ending, except
    /// kBackwardNonFinite and kBackwardOverflow.
    Atomic<uint32_t> flags;
    /// The word of the first rank with data to end, plus 1; 0: none has.
    Atomic<uint64_t> status;
    /// The note of the first rank to end that has one.
    Atomic<uint32_t> note;
    /// Arrivals at the barrier that resets a backward without reduction.
    Atomic<uint64_t> restarted;
    alignas(kLinePairBytes) Atomic<uint64_t> chunks_done;
    /// The last backward with a gradient that is not finite, and the last in
    /// which a sum overflowed.
    Atomic<uint64_t> nonfinite_backward;
    Atomic<uint64_t> overflow_backward;
    /// The last backward whose end was decided, and the flags of that backward.
    alignas(kLinePairBytes) Atomic<uint64_t> ended_backward;
    Atomic<uint32_t> verdict;
    /// Futex word: something above changed.
    alignas(kLinePairBytes) Atomic<uint32_t> bell;
    Atomic<uint32_t> sleepers;
    /// Whether chunks are assigned: rank 0 decides it once for all ranks.
    uint32_t assigns_chunks;
  };
  struct alignas(kLinePairBytes) BucketControl {
    Atomic<uint64_t> arrived;
    /// backward << 32 | next chunk
    Atomic<uint64_t> claim;
  };
  struct SegmentStats {
    double squared_norm;
    uint64_t nonfinite_ranks[2];
    uint64_t has_overflowed;
  };
  // The following is in each rank's own copy. There are two of each, because a
  // fast rank may be one backward ahead of one that still reads.
  struct alignas(kLinePairBytes) BackwardHeader {
    double weight;
    /// BackwardStatus::pack()
    uint64_t status;
    uint32_t note;
    // Read by waiting ranks to find the late rank: how far this rank has come,
    // whether it is reducing a chunk, and how many of the chunks assigned to it
    // are left.
    Atomic<uint64_t> stage;
    Atomic<uint32_t> is_reducing;
    Atomic<uint32_t> assigned_left;
    /// When it ended its backward, and how long it had worked since the
    /// previous backward; 0: there was none.
    int64_t ended_ns;
    int64_t worked_ns;
  };

  void plan(const std::vector<BucketSpan>& buckets,
            std::vector<OwnedBytes> owned);
  void find_receivers(std::vector<Segment>& segments,
                      std::vector<OwnedBytes> owned);
  void allocate(bool assigns_chunks);
  void assign_chunks();
  void check_usable();
  void begin_backward();
  void copy_in(const Parameter& parameter);
  /// Posts the buckets in which its gradient was the last; returns whether
  /// there are any.
  bool post_complete(const Parameter& parameter);
  void post(Bucket& bucket, size_t index);
  void add_unused();
  /// Keeps whatever is reduced of this backward in the gradient buffer.
  void forget_outside();
  /// How much of the complete buckets a rank reduces. In the middle of its
  /// backward (kOwnShare): at most 1/N of each, so that a rank that is behind
  /// does not do the others' work as well, and only of buckets that are
  /// entirely in the gradient buffer; nothing if means are scattered. At its
  /// end (kAll): all that is left.
  enum class ChunkLimit { kOwnShare, kAll };
  void progress(ChunkLimit limit);
  bool claim_chunk(size_t bucket, uint32_t* chunk);
  void reduce_chunk(const Chunk& chunk);
  static bool is_all_finite(const Segment& segment, const void* mean);
  /// Where this rank's gradient is if it is outside the gradient buffer; else
  /// null.
  std::byte* own_place_of(const Segment& segment) const;
  void copy_back();
  double sum_squared_norms(const SegmentStats* table) const;
  void read_weights();
  uint32_t complete_backward(const BackwardStatus& status, bool allow_unused,
                             bool allow_globally_unused);
  bool is_unused_alike() const;
  void find_unused(BackwardResult& result) const;
  void find_nonfinite(BackwardResult& result) const;
  /// Records which rank ended its backward last, how long this rank has waited
  /// for it, and how long each rank has worked. Returns the last rank.
  int note_arrivals(int64_t waited_ns);
  uint32_t end_backward(const BackwardStatus& status, uint32_t flags);
  void restart_without_reduction();
  /// Stages of a backward for which other ranks wait; kVoid and kReset only if
  /// nothing is reduced.
  enum Stage : uint64_t { kEnded = 1, kVoid = 2, kReset = 3 };
  uint64_t stage(Stage of_this_backward) const {
    return backward_ * 4 + of_this_backward;
  }

  /// Calls `work` repeatedly until the count has reached the target. If it
  /// throws, no rank returns from this wait that has not done so already.
  template <class Work>
  void wait_for(Atomic<uint64_t>& count, uint64_t target, Stage awaited,
                Work work);
  template <class Ready>
  void wait_until(Stage awaited, Ready ready);
  /// Records the last wait, if there was any. `whom`: the last rank to arrive,
  /// or kNoRank.
  void record_wait(int whom);
  void ring(int count);
  /// After the end of the group; see the top of this file.
  void keep_buffer();

  void collect_written(std::vector<Extent>& found) const override;
  /// Moves gradients that share memory with any other gradient handed over in
  /// this thread's backwards into the gradient buffer.
  void part_overlapping();
  void move_into_buffer(Parameter& parameter);

  std::byte* buffer_of(int rank) const {
    return session_.slab(rank) + buffer_at_;
  }
  std::byte* control_of(int rank) const {
    return session_.slab(rank) + control_at_;
  }
  BackwardControl& control() const {
    return *reinterpret_cast<BackwardControl*>(control_of(0));
  }
  BucketControl& bucket_control(size_t index) const {
    return reinterpret_cast<BucketControl*>(control_of(0) +
                                            layout_.buckets_at)[index];
  }
  SegmentStats* stats(uint64_t backward) const {
    return reinterpret_cast<SegmentStats*>(control_of(0) + layout_.stats_at) +
           (backward & 1) * segments_.size();
  }
  BackwardHeader& header(int rank, uint64_t backward) const {
    return reinterpret_cast<BackwardHeader*>(control_of(rank) +
                                             layout_.headers_at)[backward & 1];
  }
  uint64_t* unused_bits(int rank, uint64_t backward) const {
    return reinterpret_cast<uint64_t*>(control_of(rank) + layout_.unused_at) +
           (backward & 1) * unused_words_;
  }

  Heap& heap_;
  Session& session_;
  const size_t buffer_bytes_;
  /// Whether gradients may be kept in the gradient buffer.
  const bool holds_gradients_;
  const bool scatters_;
  /// The receivers of each segment, one segment after the other.
  std::vector<int> receivers_;
  std::vector<Segment> segments_;
  std::vector<Chunk> chunks_;
  std::vector<Bucket> buckets_;
  /// The bucket of each part of a parameter, sorted by parameter, then by
  /// bucket.
  std::vector<uint32_t> bucket_of_part_;
  /// Indices of the segments, sorted by parameter, then by offset in the
  /// parameter.
  std::vector<uint32_t> segments_in_order_;
  /// The chunks that are assigned to this rank, bucket by bucket.
  std::vector<uint32_t> own_chunks_;
  size_t total_chunks_ = 0;
  size_t unused_words_ = 0;
  /// Offsets into the control array.
  struct ControlLayout {
    size_t buckets_at, stats_at, headers_at, unused_at, bytes;
  } layout_{};
  size_t buffer_at_ = 0;
  size_t control_at_ = 0;

  /// The current backward, or the last finished one if none is open.
  uint64_t backward_ = 0;
  uint64_t finished_backwards_ = 0;
  uint32_t outcome_ = 0;  ///< of the last finished backward
  /// Whether the last backward was void: it has ended without an average.
  bool has_no_means_ = false;
  bool in_backward_ = false;
  double weight_ = 1;
  bool are_weights_in_gradients_ = false;
  uint32_t note_ = 0;
  int64_t recorded_backward_ = -1;
  std::vector<Parameter> parameters_;
  /// For each segment, the last backward in which this rank reduced it.
  std::vector<uint64_t> reduced_in_backward_;
  std::vector<size_t> overlapping_;
  bool weights_known_ = false;
  bool multiplies_by_weights_ = false;
  std::vector<double> weights_;
  double total_weight_ = 0;
  size_t first_open_bucket_ = 0;
  /// The number of backwards that ended without reduction; the same on all
  /// ranks.
  uint64_t restarts_ = 0;
  /// When the last wait began; 0: none since record_wait().
  int64_t wait_began_ns_ = 0;
  BackwardTimes times_;
  /// When this rank's last backward was over, and `slept_ns` at that time.
  int64_t backward_over_ns_ = 0;
  int64_t slept_before_ns_ = 0;
  /// When this rank's first bucket of the backward was complete.
  int64_t first_bucket_ns_ = 0;
  int64_t reducing_ns_ = 0;
  bool is_buffer_kept_ = false;
  bool closed_ = false;
};

}  // namespace paceline

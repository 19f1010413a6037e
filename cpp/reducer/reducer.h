// One backward pass after the other: gradients become ready, buckets are
// posted, chunks are reduced by whoever has time, and at the end every rank
// holds the mean.
//
// Words
//   arena    one contiguous piece of each rank's slab, at the same offset, that
//   holds all gradients bucket   a byte range of the arena; posted by a rank
//   once every gradient in it is final there segment  at most kBlockElements of
//   one parameter: the unit of the statistics, the same for every bucket size
//   chunk    a run of segments of one bucket: the unit of work
//
// Steps of pass p (counters only grow; nothing is reset)
//   1. a rank posts bucket b:  arrived[b] += 1          (release; all its
//   gradients of b are in place)
//   2. arrived[b] == N * p:    b is complete, any rank may claim chunks of it
//   (acquire)
//   3. claim[b] = (p, next):   a compare-and-swap hands each chunk to exactly
//   one rank, which reads everybody's
//                              copy and writes the mean into everybody's copy
//   4. chunks_done += 1        (release)
//   5. a rank's backward ends: ended += 1, with what it left unused; ended == N
//   * p decides whether to go on
//   6. chunks_done == p * all: the pass is complete; who was waiting copies its
//   gradients out
// Chunks are claimed: a rank that is behind in its backward has the least time
// for them, and those who wait for it have the most. In a large bucket they are
// assigned, to the ranks in turn, if gradients lie outside of the arena and
// every rank has a core of its own: what a rank reduces itself need not be
// copied into the arena (with two ranks, half of all), and it reads and
// replaces it where it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collectives/host_group.h"

namespace paceline {

struct ParameterSpan {
  size_t offset;  ///< bytes into the arena, kLineBytes / 2 aligned
  size_t count;   ///< elements
  DType dtype;
};

struct BucketSpan {
  size_t begin;  ///< bytes into the arena
  size_t end;
};

inline constexpr size_t kBlockElements = 16384;
inline constexpr uint32_t kPassUnused = 1;
inline constexpr uint32_t kPassNonFinite = 2;
inline constexpr uint32_t kPassForwardsDiffer = 4;
inline constexpr uint32_t kPassFinished = 8;
/// `forwards` of a rank that has no more data; agrees with every number.
inline constexpr uint32_t kFinished = (uint32_t{1} << 31) - 2;

class Reducer {
 public:
  /// Collective: allocates the arena and the counters.
  /// `assigns_chunks`: gradients will lie outside of the arena; see the words.
  Reducer(HostGroup& group, size_t arena_bytes,
          const std::vector<ParameterSpan>& parameters,
          const std::vector<BucketSpan>& buckets, bool assigns_chunks);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  std::byte* arena() const { return arena_of(group_.rank()); }
  /// Of this rank in the next pass's mean.
  void set_weight(double weight) { weight_ = weight; }
  /// The gradient of a parameter is final at `gradient` (null: in the arena
  /// already).
  void mark_ready(size_t index, void* gradient);
  /// Ends this rank's pass; blocks until the pass is complete everywhere.
  /// Returns kPass... flags.
  uint32_t finish(uint32_t forwards, bool allow_unused);
  /// Whether this rank has marked gradients of a pass that it has not finished.
  bool in_pass() const { return in_pass_; }

  std::vector<size_t> unused(int rank) const;
  std::vector<size_t> globally_unused() const;
  std::vector<uint32_t> forwards_by_rank() const;
  std::vector<std::pair<int, size_t>> nonfinite() const;
  double squared_norm() const;
  int64_t waited_ns() const { return waited_ns_; }
  uint64_t passes() const { return finished_passes_; }
  size_t num_chunks() const { return total_chunks_; }
  void close();

 private:
  static constexpr int kNobody = -1;
  struct Segment {
    size_t offset;  ///< bytes into the arena
    uint32_t count;
    uint32_t parameter;
    uint32_t order;  ///< in which squared norms are summed: by parameter, then
                     ///< by block
    DType dtype;
    int owner = kNobody;  ///< the rank that its chunk is assigned to
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
    uint64_t ready_in_pass = 0;  ///< the last
    std::byte* copy_back =
        nullptr;  ///< where the mean goes; null: it stays in the arena
  };
  struct Chunk {
    uint32_t first_segment;
    uint32_t end_segment;
  };
  struct Bucket {
    uint32_t first_chunk;
    uint32_t end_chunk;
    uint32_t parameters = 0;  ///< that have a part in it
    uint32_t pending = 0;     ///< of those, not ready in this pass
    bool posted = false;      ///< by this rank
    bool exhausted = false;   ///< nothing left to claim
    uint32_t done = 0;  ///< chunks that this rank has reduced in this pass
    bool is_assigned = false;  ///< every world-th chunk is one rank's
    uint32_t first_own_chunk = 0;
  };
  // In rank 0's copy of the control block.
  struct alignas(kLineBytes) PassControl {
    std::atomic<uint64_t> ended;
    std::atomic<uint32_t> flags;  ///< kPass..., but for kPassNonFinite, of the
                                  ///< pass that is ending
    std::atomic<uint64_t>
        forwards;  ///< of the first to end, plus 1; 0: nobody has
    std::atomic<uint64_t> restarted;  ///< arrivals at the barrier that resets a
                                      ///< pass without reduction
    alignas(kLineBytes) std::atomic<uint64_t> chunks_done;
    std::atomic<uint64_t> nonfinite_pass;  ///< last pass that saw one
    alignas(kLineBytes)
        std::atomic<uint64_t> ended_pass;  ///< last pass whose end was decided
    std::atomic<uint32_t> verdict;         ///< flags of that pass
    alignas(kLineBytes)
        std::atomic<uint32_t> bell;  ///< futex word: something above changed
    std::atomic<uint32_t> sleepers;
    uint32_t assigns_chunks;  ///< as rank 0 decided, once
  };
  struct alignas(kLineBytes) BucketControl {
    std::atomic<uint64_t> arrived;
    std::atomic<uint64_t> claim;  ///< pass << 32 | next chunk
  };
  struct SegmentStats {
    double squared_norm;
    uint64_t nonfinite_ranks[2];
  };
  // In each rank's own copy; two, because a fast rank may be one pass ahead of
  // one that still reads.
  struct alignas(kLineBytes) PassHeader {
    uint64_t pass;
    double weight;
    uint32_t forwards;
    std::atomic<uint64_t> stage;  ///< evidence: how far this rank has come
    std::atomic<uint32_t> is_reducing;  ///< evidence: others wait for its chunk
    std::atomic<uint32_t> owed;  ///< evidence: assigned chunks that it has not
                                 ///< reduced yet
  };

  void plan(const std::vector<BucketSpan>& buckets);
  void allocate(bool assigns_chunks);
  void assign_chunks();
  void check_usable() const;
  void begin_pass();
  void copy_in(const Parameter& parameter);
  /// Posts the buckets in which its gradient was the last; whether there is
  /// any.
  bool post_complete(const Parameter& parameter);
  void post(Bucket& bucket, size_t index);
  void add_unused();
  /// How much of the complete buckets a rank reduces: in the middle of its
  /// backward no more than 1/N of each (a rank that is behind should not do the
  /// others' work as well), at its end all that is left.
  enum class Appetite { kOwnShare, kAll };
  void progress(Appetite appetite);
  bool claim_chunk(size_t bucket, uint32_t* chunk);
  void reduce_chunk(const Chunk& chunk);
  /// Where this rank's gradient is, if not in the arena; else null.
  std::byte* own_place_of(const Segment& segment) const;
  void copy_back();
  double sum_squared_norms(const SegmentStats* table) const;
  void read_weights();
  uint32_t end_backward(uint32_t forwards, uint32_t flags);
  void restart_without_reduction();
  /// Stages of a pass that others wait for; kVoid and kReset only if nothing is
  /// reduced.
  enum Stage : uint64_t { kEnded = 1, kVoid = 2, kReset = 3 };
  uint64_t stage(Stage of_this_pass) const { return pass_ * 4 + of_this_pass; }
  template <class Ready>
  void wait_until(Stage awaited, Ready ready);
  void ring(int count);

  std::byte* arena_of(int rank) const { return group_.slab(rank) + arena_at_; }
  std::byte* control_of(int rank) const {
    return group_.slab(rank) + control_at_;
  }
  PassControl& control() const {
    return *reinterpret_cast<PassControl*>(control_of(0));
  }
  BucketControl& bucket_control(size_t index) const {
    return reinterpret_cast<BucketControl*>(control_of(0) +
                                            layout_.buckets_at)[index];
  }
  SegmentStats* stats(uint64_t pass) const {
    return reinterpret_cast<SegmentStats*>(control_of(0) + layout_.stats_at) +
           (pass & 1) * segments_.size();
  }
  PassHeader& header(int rank, uint64_t pass) const {
    return reinterpret_cast<PassHeader*>(control_of(rank) +
                                         layout_.headers_at)[pass & 1];
  }
  uint64_t* unused_bits(int rank, uint64_t pass) const {
    return reinterpret_cast<uint64_t*>(control_of(rank) + layout_.unused_at) +
           (pass & 1) * unused_words_;
  }

  HostGroup& group_;
  const size_t arena_bytes_;
  std::vector<Segment> segments_;
  std::vector<Chunk> chunks_;
  std::vector<Bucket> buckets_;
  std::vector<uint32_t> bucket_of_part_;     ///< by parameter, then by bucket
  std::vector<uint32_t> segments_in_order_;  ///< by parameter, then by block
  uint32_t own_chunks_ = 0;  ///< assigned to this rank, of all buckets
  size_t total_chunks_ = 0;
  size_t unused_words_ = 0;
  struct ControlLayout {  ///< offsets into the control block
    size_t buckets_at, stats_at, headers_at, unused_at, bytes;
  } layout_{};
  size_t arena_at_ = 0;
  size_t control_at_ = 0;

  uint64_t pass_ = 0;  ///< under way, or finished last
  uint64_t finished_passes_ = 0;
  bool in_pass_ = false;
  double weight_ = 1;
  std::vector<Parameter> parameters_;
  std::vector<uint64_t> reduced_in_pass_;  ///< by segment: the last pass in
                                           ///< which this rank reduced it
  bool weights_known_ = false;
  bool weights_all_one_ = true;
  std::vector<double> weights_;
  size_t first_open_bucket_ = 0;
  uint64_t restarts_ =
      0;  ///< passes that ended without reduction; the same on all ranks
  int64_t waited_ns_ = 0;
  int64_t reducing_ns_ = 0;
  bool closed_ = false;
};

}  // namespace paceline

// One host's part in a mean over several hosts: what its ranks do in shared
// memory, before and after the sums travel between hosts.
//
// Words
//   gradient buffer
//            one contiguous range of each rank's slab, at the same offset, with a
//            place for every gradient
//   bucket   a byte range of the gradient buffer, of one type; a rank posts it
//            once every gradient in it is final there
//   share    the chunk of a bucket that one rank of the host sums, exchanges with
//            its peers on the other hosts, and publishes. The caller assigns the
//            shares; together they make up the bucket.
//   sum      of the host's ranks, weighted and undivided, in sum_type()
//   slot     a few bytes of the backward that all ranks of the host read at its
//            end: the reports of the ranks of all hosts
//
// Steps of backward p, on each rank of a host
//   1. post(b):      posted[b] = p   (release: its gradients of b are in place)
//   2. is_complete(b), wait_complete(b): posted[b] >= p on every rank of the
//                    host            (acquire)
//   3. sum(b, ...):  reads every rank's copy of its share, and writes the sum to
//                    memory of the caller, who sends it to the other hosts
//   4. publish(b, ...): from the sums of all hosts, writes the mean into every
//                    rank's copy of its share
//   5. count_share(): published += 1 (release: that share is written on all
//                    ranks, and so are the slots that came with it)
//   6. wait_published(): published reaches p times the number of shares of the
//                    host (acquire), and all means are in place
// Where a host has one rank, its gradients may be sent instead of sums. Then
// step 3 is left out, and average() replaces step 4.
//
// Nothing is reset: counters only grow. `published` is a settled count
// (settled_count.h), so a backward succeeds for all ranks of the host or for
// none.
//
// Slots, weights and flags of a backward are kept twice, for odd and even
// backwards: a fast rank may be one backward ahead of one that still reads. It
// is never two ahead, because a backward ends only when every rank has posted
// all of it.
//
// Another thread than that of the other steps may make steps 4 and 5.
//
// Bytes: of a bucket of S bytes on a host of L ranks, each rank reads S in step
// 3 (L copies of S/L), and writes S in step 4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/heap.h"
#include "core/atomics.h"
#include "core/session.h"
#include "core/sizes.h"
#include "kernels/kernels.h"
#include "reducer/settled_count.h"

namespace paceline {

struct SummedBucket {
  size_t begin;  ///< bytes into the gradient buffer
  size_t end;
  DType dtype;
  size_t count() const { return (end - begin) / dtype_bytes(dtype); }
};

/// Consecutive ranks of a host, numbered within the host.
struct Neighbours {
  int begin;
  int end;
};

class HostSums {
 public:
  /// Collective: allocates the gradient buffer, filled with zeros, and the
  /// counters. `num_slots` slots of `slot_bytes` each.
  HostSums(Heap& heap, size_t buffer_bytes, std::vector<SummedBucket> buckets,
           size_t num_slots, size_t slot_bytes);
  ~HostSums();
  HostSums(const HostSums&) = delete;
  HostSums& operator=(const HostSums&) = delete;

  std::byte* gradient_buffer() const { return buffer_of(session_.rank()); }
  const SummedBucket& bucket(size_t index) const;

  /// Begins this rank's next backward, in which its gradients have this weight.
  /// `is_in_gradients`: as in Reducer::set_weight().
  void begin_backward(double weight, bool is_in_gradients = false);
  void post(size_t bucket);
  /// Whether all ranks of the host have posted the bucket in this backward.
  bool is_complete(size_t bucket) const;
  /// Blocks until all ranks of the host have posted the bucket.
  void wait_complete(size_t bucket);
  /// All ranks of the host.
  Neighbours everybody() const { return {0, session_.world()}; }
  /// The sum of the weights of some ranks in this backward. Known once a bucket
  /// is complete.
  double total_weight(Neighbours ranks) const;
  /// Sums a range of a complete bucket over some ranks; `first` counts elements
  /// from the bucket's beginning. `stats` receives which gradients hold an
  /// infinity or a NaN, numbered from the first of these ranks.
  void sum(size_t bucket, size_t first, size_t count, Neighbours ranks,
           void* out, ReduceStats* stats) const;
  /// Finds the ranks whose gradients hold an infinity or a NaN in a range of a
  /// bucket that is not published yet, and sets their bits in `ranks`.
  void find_nonfinite(size_t bucket, size_t first, size_t count,
                      uint64_t ranks[2]) const;
  /// Adds the sums of several hosts, without dividing them.
  void add_sums(size_t bucket, const std::vector<const void*>& sums,
                size_t count, void* out) const;
  /// Writes the mean of a range into the copies of all ranks of the host.
  /// Returns whether all of it is finite.
  bool publish(size_t bucket, size_t first, size_t count,
               const std::vector<const void*>& sums, double total_weight);
  struct Averaged {
    /// The number of elements that hold the mean now: those before the first
    /// block whose mean holds an infinity or a NaN, if `stops_at_nonfinite`.
    size_t count;
    /// Whether the mean of these is finite.
    bool is_finite;
  };
  /// Writes the weighted mean of arrays of the bucket's own type, one per host,
  /// into the copies of all ranks of this host. One of the arrays may be such a
  /// copy; it is written only after it has been read. The result has the same
  /// bits as that of sum() and publish().
  Averaged average(size_t bucket, size_t first, size_t count,
                   const std::vector<const void*>& values,
                   const std::vector<double>& weights, double total_weight,
                   bool stops_at_nonfinite);
  /// Whether a range of a published bucket holds an infinity or a NaN.
  bool is_nonfinite(size_t bucket, size_t first, size_t count) const;
  /// Counts this rank's share of a bucket as published.
  void count_share();
  /// Blocks until all shares of this backward are published. Negative: as long
  /// as the group waits. Throws on all ranks of the host or on none, except for
  /// ranks that are closed or in which a signal handler has raised.
  void wait_published(double timeout_s);

  /// Reports to the host that a mean of this backward is not finite; call it
  /// before count_share().
  void note_overflow();
  /// Whether any rank of the host has reported an overflow; call it after
  /// wait_published().
  bool has_overflow() const;
  /// A slot of this backward. Written before count_share(), and read after
  /// wait_published().
  std::byte* slot(size_t index) const;
  size_t num_slots() const { return num_slots_; }
  size_t slot_bytes() const { return slot_bytes_; }

  int64_t waited_ns() const { return waited_ns_; }
  /// Whether this rank has begun a backward that it has not ended.
  bool in_backward() const { return in_backward_; }
  /// The ranks of the host that wait at the end of a backward which this rank
  /// has not ended.
  std::vector<int> waiting_ranks() const;
  /// After the end of the group: makes this rank's copy of the gradient buffer
  /// private, with its present values. Without that, a rank that was stopped
  /// and goes on may still write its share into the copies of the others.
  void keep_buffer();
  void close();

 private:
  // The following is in rank 0's copy of the control array.
  struct alignas(kLinePairBytes) Bell {
    /// Futex word: something for which a rank of this host waits has changed.
    Atomic<uint32_t> bell;
    Atomic<uint32_t> sleepers;
    /// How many shares all ranks have published, over all backwards.
    Atomic<uint64_t> published;
  };
  // The following is in each rank's own copy of the control array.
  struct alignas(kLinePairBytes) Progress {
    double weight[2];
    /// The last backward in which the rank reported an overflow.
    Atomic<uint64_t> overflow_backward;
    /// How many shares this rank has published over all backwards. Waiting
    /// ranks use it to find the late rank.
    Atomic<uint64_t> published;
    /// The last backward of which the rank has posted all buckets, and for
    /// which it waits.
    Atomic<uint64_t> ended_backward;
  };

  void check_usable();
  void check_part(size_t bucket, size_t first, size_t count) const;
  void check_ranks(Neighbours ranks) const;
  void ring();
  template <class Ready, class IsLate>
  void wait_until(double timeout_s, Ready ready, IsLate is_late);
  std::vector<double> weights(Neighbours ranks) const;
  /// The factors by which arrays of these weights are multiplied; null: none.
  const double* factors(const std::vector<double>& weights) const;

  std::byte* buffer_of(int rank) const {
    return session_.slab(rank) + buffer_at_;
  }
  std::byte* control_of(int rank) const {
    return session_.slab(rank) + control_at_;
  }
  Bell& bell() const { return *reinterpret_cast<Bell*>(control_of(0)); }
  Progress& progress(int rank) const {
    return *reinterpret_cast<Progress*>(control_of(rank) + layout_.progress_at);
  }
  /// The last backward in which a rank has posted a bucket.
  Atomic<uint64_t>& posted(int rank, size_t bucket) const {
    return reinterpret_cast<Atomic<uint64_t>*>(control_of(rank) +
                                               layout_.posted_at)[bucket];
  }
  void* at(int rank, size_t bucket, size_t first) const;
  uint64_t shares_per_backward() const {
    return buckets_.size() * static_cast<uint64_t>(session_.world());
  }

  Heap& heap_;
  Session& session_;
  const size_t buffer_bytes_;
  const std::vector<SummedBucket> buckets_;
  const size_t num_slots_;
  const size_t slot_bytes_;
  /// Offsets into the control array.
  struct ControlLayout {
    size_t progress_at, posted_at, slots_at, bytes;
  } layout_{};
  size_t buffer_at_ = 0;
  size_t control_at_ = 0;
  /// The current backward, or the last one if none is open.
  uint64_t backward_ = 0;
  bool in_backward_ = false;
  bool are_weights_in_gradients_ = false;
  int64_t waited_ns_ = 0;
  bool is_buffer_kept_ = false;
  bool closed_ = false;
};

}  // namespace paceline

#include "reducer/reducer.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/clock.h"
#include "core/failure.h"
#include "core/faults.h"
#include "core/futex.h"
#include "core/recorder.h"
#include "kernels/kernels.h"

namespace paceline {

Reducer::Reducer(Heap& heap, size_t buffer_bytes,
                 const std::vector<ParameterSpan>& parameters,
                 const std::vector<BucketSpan>& buckets, bool assigns_chunks,
                 std::vector<OwnedBytes> owned)
    : heap_(heap),
      session_(heap.session()),
      buffer_bytes_(buffer_bytes),
      holds_gradients_(!assigns_chunks),
      scatters_(!owned.empty()),
      times_(static_cast<size_t>(session_.world())) {
  for (const ParameterSpan& span : parameters)
    parameters_.push_back({.span = span});
  plan(buckets, std::move(owned));
  allocate(assigns_chunks);
  assign_chunks();
}

Reducer::~Reducer() { close(); }

void Reducer::close() {
  if (closed_) return;
  closed_ = true;
  in_backward_ = false;
  leave();
  heap_.free(buffer_at_);
  // The counters are in rank 0's memory, where other ranks may still read how
  // the last backward ended.
  heap_.free(control_at_, true);
}

// After the end of the group, an open backward stays as it is: going on with it
// would write to gradients that the caller may have freed since.
void Reducer::check_usable() {
  if (closed_) throw Failure{.reason = Reason::kClosed};
  try {
    session_.check_usable();
  } catch (const Failure& failure) {
    if (failure.reason != Reason::kForked) keep_buffer();
    throw;
  }
}

void Reducer::keep_buffer() {
  if (!holds_gradients_ || is_buffer_kept_ || closed_ || !session_.is_over())
    return;
  is_buffer_kept_ = true;
  session_.keep_to_itself(buffer_at_, buffer_bytes_);
}

void Reducer::begin_backward() {
  ++backward_;
  in_backward_ = true;
  enter();
  weights_known_ = false;
  first_open_bucket_ = 0;
  first_bucket_ns_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.pending = bucket.parameters;
    bucket.posted = false;
    bucket.exhausted = false;
    bucket.has_outside = false;
    bucket.done = 0;
  }
  BackwardHeader& own = header(session_.rank(), backward_);
  own.weight = weight_;
  own.assigned_left.store(static_cast<uint32_t>(own_chunks_.size()),
                          std::memory_order_relaxed);
}

void Reducer::mark_ready(size_t index, void* gradient) {
  check_usable();
  if (!in_backward_) begin_backward();
  if (index >= parameters_.size())
    misuse("no parameter " + std::to_string(index));
  Parameter& parameter = parameters_[index];
  if (parameter.ready_in_backward == backward_) {
    misuse("parameter " + std::to_string(index) +
           " was marked ready twice in one backward pass");
  }
  fault_point(Point::kMarkReady);
  parameter.ready_in_backward = backward_;
  const bool is_elsewhere =
      gradient != nullptr &&
      gradient != gradient_buffer() + parameter.span.offset;
  parameter.copy_back =
      is_elsewhere ? static_cast<std::byte*>(gradient) : nullptr;
  if (is_elsewhere) copy_in(parameter);
  if (post_complete(parameter)) progress(ChunkLimit::kOwnShare);
}

void Reducer::mark_copied(size_t index, void* gradient, size_t bytes,
                          bool is_shared) {
  mark_ready(index, nullptr);
  add_copied(index, gradient, bytes, is_shared);
}

void Reducer::mark_unused(size_t index) {
  check_usable();
  if (!in_backward_) begin_backward();
  if (index >= parameters_.size())
    misuse("no parameter " + std::to_string(index));
  parameters_[index].counts_in_backward = backward_;
}

bool Reducer::post_complete(const Parameter& parameter) {
  bool posted = false;
  for (uint32_t i = parameter.first_part; i < parameter.end_part; ++i) {
    const uint32_t b = bucket_of_part_[i];
    if (parameter.copy_back != nullptr) buckets_[b].has_outside = true;
    if (--buckets_[b].pending > 0) continue;
    post(buckets_[b], b);
    posted = true;
  }
  return posted;
}

// Segments that this rank reduces itself are read where they are; the other
// ranks need the rest.
void Reducer::copy_in(const Parameter& parameter) {
  for (uint32_t i = parameter.first_segment; i < parameter.end_segment; ++i) {
    const Segment& segment = segments_[segments_in_order_[i]];
    if (segment.owner == session_.rank()) continue;
    memcpy(gradient_buffer() + segment.offset, own_place_of(segment),
           segment.bytes());
  }
}

void Reducer::post(Bucket& bucket, size_t index) {
  fault_point(Point::kBeforePost);
  bucket.posted = true;
  if (first_bucket_ns_ == 0) first_bucket_ns_ = now_ns();
  // acq_rel: releases this rank's gradients and header; the last rank to arrive
  // acquires those of all ranks. Pairs with this operation on the others, and
  // with the acquire in progress().
  if (Recorder* recorder = Recorder::current(); recorder != nullptr)
    recorder->record(Event::kPosted, static_cast<int64_t>(index), 0);
  const uint64_t arrived =
      bucket_control(index).arrived.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (arrived == backward_ * static_cast<uint64_t>(session_.world())) ring(1);
  fault_point(Point::kAfterPost);
}

bool Reducer::claim_chunk(size_t index, uint32_t* chunk) {
  const Bucket& bucket = buckets_[index];
  const uint32_t count = bucket.end_chunk - bucket.first_chunk;
  if (bucket.is_assigned) {
    const uint32_t place = bucket.first_own + bucket.done;
    if (place >= bucket.end_own) return false;
    *chunk = own_chunks_[place];
    return true;
  }
  Atomic<uint64_t>& claim = bucket_control(index).claim;
  const uint64_t base = backward_ << 32;
  uint64_t seen = claim.load(std::memory_order_relaxed);
  while (true) {
    // A claim of an earlier backward does not count.
    const uint64_t next = std::max(seen, base);
    if (static_cast<uint32_t>(next) >= count) return false;
    // Relaxed: a claim only decides which rank reduces the chunk; the data was
    // acquired through `arrived`.
    if (claim.compare_exchange_weak(seen, next + 1,
                                    std::memory_order_relaxed)) {
      *chunk = bucket.first_chunk + static_cast<uint32_t>(next);
      return true;
    }
  }
}

void Reducer::progress(ChunkLimit limit) {
  const auto world = static_cast<uint32_t>(session_.world());
  const uint64_t all = backward_ * world;
  while (first_open_bucket_ < buckets_.size() &&
         buckets_[first_open_bucket_].exhausted)
    ++first_open_bucket_;
  for (size_t b = first_open_bucket_; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    if (!bucket.posted || bucket.exhausted) continue;
    if ((bucket.has_outside || scatters_) && limit != ChunkLimit::kAll)
      continue;
    const uint32_t chunks = bucket.end_chunk - bucket.first_chunk;
    const uint32_t most =
        limit == ChunkLimit::kAll ? chunks : (chunks + world - 1) / world;
    if (bucket.done >= most) continue;
    // Acquire: all ranks' gradients of this bucket are in place; pairs with the
    // release in post().
    if (bucket_control(b).arrived.load(std::memory_order_acquire) < all)
      continue;
    if (!weights_known_) read_weights();
    const int64_t start_ns = now_ns();
    const uint32_t done_before = bucket.done;
    BackwardHeader& own = header(session_.rank(), backward_);
    own.is_reducing.store(1, std::memory_order_relaxed);
    while (bucket.done < most && !bucket.exhausted) {
      uint32_t chunk = 0;
      // A rank that was stopped and goes on must not write after the others
      // have given up: they may use that memory for something else.
      if (session_.is_over()) break;
      if (!claim_chunk(b, &chunk)) {
        bucket.exhausted = true;
        break;
      }
      fault_point(Point::kChunkClaimed);
      reduce_chunk(chunks_[chunk]);
      fault_point(Point::kChunkReduced);
      ++bucket.done;
      if (bucket.is_assigned)
        own.assigned_left.fetch_sub(1, std::memory_order_relaxed);
      // Release: the chunk is written on all its receivers; pairs with the
      // acquire of the ranks that wait for the count.
      if (count_up(control().chunks_done, backward_ * total_chunks_))
        ring(kWakeAll);
    }
    own.is_reducing.store(0, std::memory_order_relaxed);
    const int64_t end_ns = now_ns();
    reducing_ns_ += end_ns - start_ns;
    if (Recorder* recorder = Recorder::current();
        recorder != nullptr && bucket.done > done_before) {
      recorder->record_at(end_ns, Event::kReduced, start_ns,
                          static_cast<int64_t>(uint64_t{b} << 32 |
                                               (bucket.done - done_before)));
    }
  }
}

std::byte* Reducer::own_place_of(const Segment& segment) const {
  const Parameter& parameter = parameters_[segment.parameter];
  if (parameter.copy_back == nullptr) return nullptr;
  return parameter.copy_back + (segment.offset - parameter.span.offset);
}

// The means that other ranks computed are in the gradient buffer only. If means
// are scattered, all means stay there.
void Reducer::copy_back() {
  if (scatters_) return;
  for (size_t s = 0; s < segments_.size(); ++s) {
    std::byte* own = own_place_of(segments_[s]);
    if (own == nullptr || reduced_in_backward_[s] == backward_) continue;
    memcpy(own, gradient_buffer() + segments_[s].offset, segments_[s].bytes());
  }
}

void Reducer::read_weights() {
  weights_known_ = true;
  multiplies_by_weights_ = false;
  for (int r = 0; r < session_.world(); ++r) {
    weights_[static_cast<size_t>(r)] = header(r, backward_).weight;
    multiplies_by_weights_ =
        multiplies_by_weights_ || weights_[static_cast<size_t>(r)] != 1.0;
  }
  multiplies_by_weights_ = multiplies_by_weights_ && !are_weights_in_gradients_;
  total_weight_ = sum_of_weights(weights_.data(), session_.world());
}

void Reducer::reduce_chunk(const Chunk& chunk) {
  void* arrays[kMaxRanks];
  void* kept[kMaxRanks];
  SegmentStats* table = stats(backward_);
  const int world = session_.world();
  for (uint32_t s = chunk.first_segment; s < chunk.end_segment; ++s) {
    const Segment& segment = segments_[s];
    for (int r = 0; r < world; ++r) arrays[r] = buffer_of(r) + segment.offset;
    // A gradient outside the gradient buffer is read and replaced where it is,
    // which saves copying its mean back. Only after the end of this rank's
    // backward (see progress()), and only if no other gradient uses its memory
    // (see part_overlapping()). It is not replaced if means are scattered.
    if (std::byte* own = own_place_of(segment); own != nullptr) {
      arrays[session_.rank()] = own;
      reduced_in_backward_[s] = backward_;
    }
    void** outputs = arrays;
    int num_outputs = world;
    if (scatters_) {
      outputs = kept;
      num_outputs = 0;
      for (uint32_t k = segment.first_receiver; k < segment.end_receiver; ++k)
        kept[num_outputs++] = buffer_of(receivers_[k]) + segment.offset;
    }
    ReduceStats seen;
    paceline::reduce(segment.dtype, ReduceOp::kMean, arrays, world, outputs,
                     num_outputs, segment.count,
                     multiplies_by_weights_ ? weights_.data() : nullptr, &seen,
                     total_weight_);
    const bool has_culprit =
        (seen.nonfinite_ranks[0] | seen.nonfinite_ranks[1]) != 0;
    const bool has_overflowed =
        !has_culprit && !isfinite(seen.squared_norm) &&
        !is_all_finite(segment,
                       scatters_ ? outputs[0] : arrays[session_.rank()]);
    table[s] = {seen.squared_norm,
                {seen.nonfinite_ranks[0], seen.nonfinite_ranks[1]},
                has_overflowed};
    // Relaxed: published by chunks_done.
    if (has_culprit)
      control().nonfinite_backward.store(backward_, std::memory_order_relaxed);
    if (has_overflowed)
      control().overflow_backward.store(backward_, std::memory_order_relaxed);
  }
}

// The squares of float64 gradients may overflow where the mean does not.
bool Reducer::is_all_finite(const Segment& segment, const void* mean) {
  ReduceStats seen;
  // The maximum of one array, without an output: the kernel checks it all the
  // same.
  paceline::reduce(segment.dtype, ReduceOp::kMax, &mean, 1, nullptr, 0,
                   segment.count, nullptr, &seen);
  return seen.nonfinite_ranks[0] == 0;
}

void Reducer::ring(int count) {
  BackwardControl& shared = control();
  shared.bell.fetch_add(1, std::memory_order_seq_cst);
  if (shared.sleepers.load(std::memory_order_seq_cst) != 0)
    futex_wake(shared.bell, count);
}

}  // namespace paceline

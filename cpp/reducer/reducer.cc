#include "reducer/reducer.h"

#include <string.h>

#include <algorithm>
#include <string>

namespace paceline {
Reducer::Reducer(HostGroup& group, size_t arena_bytes,
                 const std::vector<ParameterSpan>& parameters,
                 const std::vector<BucketSpan>& buckets, bool assigns_chunks)
    : group_(group), arena_bytes_(arena_bytes) {
  for (const ParameterSpan& span : parameters)
    parameters_.push_back({.span = span});
  plan(buckets);
  allocate(assigns_chunks);
  assign_chunks();
}

Reducer::~Reducer() { close(); }

void Reducer::close() {
  if (closed_) return;
  closed_ = true;
  in_pass_ = false;
  leave_pass();
  group_.free(arena_at_);
  // The counters are in rank 0's share: others may still be reading how the
  // last pass ended.
  group_.free(control_at_, true);
}

// A pass that the group did not survive stays as it is: going on with it would
// write where gradients were that the caller has given up since.
void Reducer::check_usable() const {
  if (closed_) throw Failure{.reason = Reason::kClosed};
  group_.check_usable();
}

void Reducer::begin_pass() {
  ++pass_;
  in_pass_ = true;
  enter_pass();
  weights_known_ = false;
  first_open_bucket_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.pending = bucket.parameters;
    bucket.posted = false;
    bucket.exhausted = false;
    bucket.has_outside = false;
    bucket.done = 0;
  }
  PassHeader& own = header(group_.rank(), pass_);
  own.pass = pass_;
  own.weight = weight_;
  own.owed.store(own_chunks_, std::memory_order_relaxed);
}

void Reducer::mark_ready(size_t index, void* gradient) {
  check_usable();
  if (!in_pass_) begin_pass();
  if (index >= parameters_.size())
    misuse("no parameter " + std::to_string(index));
  Parameter& parameter = parameters_[index];
  if (parameter.ready_in_pass == pass_) {
    misuse("parameter " + std::to_string(index) +
           " was marked ready twice in one backward pass");
  }
  fault_point(Point::kMarkReady);
  parameter.ready_in_pass = pass_;
  const bool is_elsewhere =
      gradient != nullptr && gradient != arena() + parameter.span.offset;
  parameter.copy_back =
      is_elsewhere ? static_cast<std::byte*>(gradient) : nullptr;
  if (is_elsewhere) copy_in(parameter);
  if (post_complete(parameter)) progress(Appetite::kOwnShare);
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

// What this rank reduces itself is read where it is; the others need the rest.
void Reducer::copy_in(const Parameter& parameter) {
  for (uint32_t i = parameter.first_segment; i < parameter.end_segment; ++i) {
    const Segment& segment = segments_[segments_in_order_[i]];
    if (segment.owner == group_.rank()) continue;
    memcpy(arena() + segment.offset, own_place_of(segment), segment.bytes());
  }
}

void Reducer::post(Bucket& bucket, size_t index) {
  fault_point(Point::kBeforePost);
  bucket.posted = true;
  // acq_rel: releases this rank's gradients and header; the last to arrive
  // acquires everybody's.
  const uint64_t arrived =
      bucket_control(index).arrived.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (arrived == pass_ * static_cast<uint64_t>(group_.world())) ring(1);
  fault_point(Point::kAfterPost);
}

bool Reducer::claim_chunk(size_t index, uint32_t* chunk) {
  const Bucket& bucket = buckets_[index];
  const uint32_t count = bucket.end_chunk - bucket.first_chunk;
  if (bucket.is_assigned) {
    *chunk = bucket.first_own_chunk +
             bucket.done * static_cast<uint32_t>(group_.world());
    return *chunk < bucket.end_chunk;
  }
  std::atomic<uint64_t>& claim = bucket_control(index).claim;
  const uint64_t base = pass_ << 32;
  uint64_t seen = claim.load(std::memory_order_relaxed);
  while (true) {
    const uint64_t next =
        std::max(seen, base);  // a claim of an earlier pass counts as none
    if (static_cast<uint32_t>(next) >= count) return false;
    // Relaxed: a claim only decides who; the data was acquired through
    // `arrived`.
    if (claim.compare_exchange_weak(seen, next + 1,
                                    std::memory_order_relaxed)) {
      *chunk = bucket.first_chunk + static_cast<uint32_t>(next);
      return true;
    }
  }
}

void Reducer::progress(Appetite appetite) {
  const auto world = static_cast<uint32_t>(group_.world());
  const uint64_t all = pass_ * world;
  while (first_open_bucket_ < buckets_.size() &&
         buckets_[first_open_bucket_].exhausted)
    ++first_open_bucket_;
  for (size_t b = first_open_bucket_; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    if (!bucket.posted || bucket.exhausted) continue;
    if (bucket.has_outside && appetite != Appetite::kAll) continue;
    const uint32_t chunks = bucket.end_chunk - bucket.first_chunk;
    const uint32_t most =
        appetite == Appetite::kAll ? chunks : (chunks + world - 1) / world;
    if (bucket.done >= most) continue;
    // Acquire: everybody's gradients of this bucket are in place; partner: the
    // release in post().
    if (bucket_control(b).arrived.load(std::memory_order_acquire) < all)
      continue;
    if (!weights_known_) read_weights();
    const int64_t start_ns = now_ns();
    PassHeader& own = header(group_.rank(), pass_);
    own.is_reducing.store(1, std::memory_order_relaxed);
    while (bucket.done < most && !bucket.exhausted) {
      uint32_t chunk = 0;
      if (!claim_chunk(b, &chunk)) {
        bucket.exhausted = true;
        break;
      }
      fault_point(Point::kChunkClaimed);
      reduce_chunk(chunks_[chunk]);
      fault_point(Point::kChunkReduced);
      ++bucket.done;
      if (bucket.is_assigned) own.owed.fetch_sub(1, std::memory_order_relaxed);
      // Release: the chunk is written everywhere; partner: the acquire of
      // whoever waits for the count.
      const uint64_t done_chunks =
          control().chunks_done.fetch_add(1, std::memory_order_acq_rel) + 1;
      if (done_chunks == pass_ * total_chunks_) ring(kWakeAll);
    }
    own.is_reducing.store(0, std::memory_order_relaxed);
    reducing_ns_ += now_ns() - start_ns;
  }
}

std::byte* Reducer::own_place_of(const Segment& segment) const {
  const Parameter& parameter = parameters_[segment.parameter];
  if (parameter.copy_back == nullptr) return nullptr;
  return parameter.copy_back + (segment.offset - parameter.span.offset);
}

// What other ranks reduced lies in the arena only.
void Reducer::copy_back() {
  for (size_t s = 0; s < segments_.size(); ++s) {
    std::byte* own = own_place_of(segments_[s]);
    if (own == nullptr || reduced_in_pass_[s] == pass_) continue;
    memcpy(own, arena() + segments_[s].offset, segments_[s].bytes());
  }
}

void Reducer::read_weights() {
  weights_known_ = true;
  weights_all_one_ = true;
  for (int r = 0; r < group_.world(); ++r) {
    weights_[static_cast<size_t>(r)] = header(r, pass_).weight;
    weights_all_one_ =
        weights_all_one_ && weights_[static_cast<size_t>(r)] == 1.0;
  }
}

void Reducer::reduce_chunk(const Chunk& chunk) {
  void* arrays[kMaxWorld];
  SegmentStats* table = stats(pass_);
  const int world = group_.world();
  for (uint32_t s = chunk.first_segment; s < chunk.end_segment; ++s) {
    const Segment& segment = segments_[s];
    for (int r = 0; r < world; ++r) arrays[r] = arena_of(r) + segment.offset;
    // Where the gradient is not in the arena, it is read and replaced where it
    // is: one copy less to bring back. Only after the end of this rank's
    // backward (see progress()), and only memory of this gradient alone (see
    // part_overlapping()).
    if (std::byte* own = own_place_of(segment); own != nullptr) {
      arrays[group_.rank()] = own;
      reduced_in_pass_[s] = pass_;
    }
    ReduceStats seen;
    paceline::reduce(segment.dtype, ReduceOp::kMean, arrays, world, arrays,
                     world, segment.count,
                     weights_all_one_ ? nullptr : weights_.data(), &seen);
    table[s] = {seen.squared_norm,
                {seen.nonfinite_ranks[0], seen.nonfinite_ranks[1]}};
    if ((seen.nonfinite_ranks[0] | seen.nonfinite_ranks[1]) != 0) {
      control().nonfinite_pass.store(
          pass_, std::memory_order_relaxed);  // published by chunks_done
    }
  }
}

void Reducer::ring(int count) {
  PassControl& shared = control();
  shared.bell.fetch_add(1, std::memory_order_seq_cst);
  if (shared.sleepers.load(std::memory_order_seq_cst) != 0)
    futex_wake(shared.bell, count);
}

uint32_t Reducer::finish(uint32_t forwards, bool allow_unused) {
  check_usable();
  if (!in_pass_) begin_pass();
  fault_point(Point::kBeforeEnd);
  uint64_t* bits = unused_bits(group_.rank(), pass_);
  std::fill_n(bits, unused_words_, 0);
  bool any_unused = false;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (parameters_[p].ready_in_pass == pass_) continue;
    bits[p / 64] |= uint64_t{1} << (p % 64);
    any_unused = true;
  }
  part_overlapping();
  if (any_unused && allow_unused) add_unused();
  const uint32_t verdict = end_backward(forwards, any_unused ? kPassUnused : 0);
  fault_point(Point::kAfterEnd);
  in_pass_ = false;
  leave_pass();
  finished_passes_ = pass_;
  const bool is_reduced = (verdict & kPassForwardsDiffer) == 0 &&
                          ((verdict & kPassUnused) == 0 || allow_unused);
  if (!is_reduced) {
    restart_without_reduction();
    return verdict;
  }
  const uint64_t all = pass_ * total_chunks_;
  // Acquire: pairs with the releases in progress(); the mean is written in this
  // rank's arena.
  wait_until(kEnded, [&] {
    progress(Appetite::kAll);
    return control().chunks_done.load(std::memory_order_acquire) >= all;
  });
  copy_back();
  const bool is_nonfinite =
      control().nonfinite_pass.load(std::memory_order_relaxed) == pass_;
  return verdict | (is_nonfinite ? kPassNonFinite : 0);
}

// A parameter without a gradient counts as zeros; its buckets can be posted
// after all.
void Reducer::add_unused() {
  for (Parameter& parameter : parameters_) {
    if (parameter.ready_in_pass == pass_) continue;
    const auto [offset, count, dtype] = parameter.span;
    memset(arena() + offset, 0, count * dtype_bytes(dtype));
    parameter.copy_back = nullptr;
    post_complete(parameter);
  }
}

// Says that this rank's backward is over, and waits for the others to say so,
// reducing meanwhile.
uint32_t Reducer::end_backward(uint32_t forwards, uint32_t flags) {
  PassControl& shared = control();
  PassHeader& own = header(group_.rank(), pass_);
  own.forwards = forwards;
  uint64_t first = 0;
  const uint64_t mine = uint64_t{forwards} + 1;
  if (forwards == kFinished) {
    flags |= kPassFinished;
  } else if (!shared.forwards.compare_exchange_strong(
                 first, mine, std::memory_order_relaxed) &&
             first != mine) {
    flags |= kPassForwardsDiffer;
  }
  if (flags != 0) shared.flags.fetch_or(flags, std::memory_order_relaxed);
  // acq_rel: releases this rank's header, unused bits and flags; the last to
  // end acquires everybody's.
  const uint64_t all = pass_ * static_cast<uint64_t>(group_.world());
  if (shared.ended.fetch_add(1, std::memory_order_acq_rel) + 1 == all) {
    shared.verdict.store(shared.flags.load(std::memory_order_relaxed),
                         std::memory_order_relaxed);
    shared.flags.store(0, std::memory_order_relaxed);
    shared.forwards.store(0, std::memory_order_relaxed);
    shared.ended_pass.store(pass_, std::memory_order_release);
    ring(kWakeAll);
  }
  own.stage.store(stage(kEnded), std::memory_order_relaxed);
  wait_until(kEnded, [&] {
    progress(Appetite::kAll);
    return shared.ended_pass.load(std::memory_order_acquire) >= pass_;
  });
  return shared.verdict.load(std::memory_order_relaxed);
}

// Nothing was (or will be) reduced in this pass on any rank; brings the
// counters to where it would have ended.
void Reducer::restart_without_reduction() {
  PassControl& shared = control();
  const auto world = static_cast<uint64_t>(group_.world());
  // Two meetings: nobody reduces any more before rank 0 writes; nobody goes on
  // before it has.
  const auto meet = [&](Stage next, uint64_t target) {
    if (shared.restarted.fetch_add(1, std::memory_order_acq_rel) + 1 == target)
      ring(kWakeAll);
    header(group_.rank(), pass_)
        .stage.store(stage(next), std::memory_order_relaxed);
    wait_until(next, [&] {
      return shared.restarted.load(std::memory_order_acquire) >= target;
    });
  };
  const uint64_t base = restarts_++ * 2 * world;
  meet(kVoid, base + world);
  if (group_.rank() == 0) {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      bucket_control(b).arrived.store(pass_ * world, std::memory_order_relaxed);
      bucket_control(b).claim.store(pass_ << 32 | UINT32_MAX,
                                    std::memory_order_relaxed);
    }
    shared.chunks_done.store(pass_ * total_chunks_, std::memory_order_relaxed);
  }
  meet(kReset, base + 2 * world);
}

template <class Ready>
void Reducer::wait_until(Stage awaited, Ready ready) {
  if (ready()) return;
  const int64_t start_ns = now_ns();
  const int64_t reducing_before_ns = reducing_ns_;
  PassControl& shared = control();
  group_.wait_until(
      shared.bell, shared.sleepers, group_.timeout_ns(-1), ready, [&](int r) {
        const PassHeader& theirs = header(r, pass_);
        // What a rank owes is its own fault only once all gradients are there.
        const bool can_reduce =
            shared.ended_pass.load(std::memory_order_relaxed) >= pass_;
        return theirs.stage.load(std::memory_order_relaxed) < stage(awaited) ||
               theirs.is_reducing.load(std::memory_order_relaxed) != 0 ||
               (can_reduce && awaited == kEnded &&
                theirs.owed.load(std::memory_order_relaxed) != 0);
      });
  waited_ns_ += now_ns() - start_ns - (reducing_ns_ - reducing_before_ns);
}

}  // namespace paceline

// The end of a backward, with the same result on all ranks; see the top of
// reducer.h.
#include <string.h>

#include <algorithm>
#include <array>
#include <span>

#include "core/failure.h"
#include "core/faults.h"
#include "core/futex.h"
#include "core/recorder.h"
#include "core/wait.h"
#include "reducer/reducer.h"

namespace paceline {

uint32_t Reducer::finish(const BackwardStatus& status, bool allow_unused,
                         bool allow_globally_unused) {
  check_usable();
  if (!in_backward_) begin_backward();
  has_no_means_ = true;  // until the backward has succeeded
  try {
    outcome_ = complete_backward(status, allow_unused, allow_globally_unused);
    backward_over_ns_ = now_ns();
    slept_before_ns_ = slept_ns;
    return outcome_;
  } catch (...) {
    leave();
    keep_buffer();
    throw;
  }
}

uint32_t Reducer::complete_backward(const BackwardStatus& status,
                                    bool allow_unused,
                                    bool allow_globally_unused) {
  if (Recorder* recorder = Recorder::current();
      recorder != nullptr && recorded_backward_ >= 0)
    recorder->record(Event::kBackwardEnded, recorded_backward_,
                     status.finished);
  recorded_backward_ = -1;
  fault_point(Point::kBeforeEnd);
  uint64_t* bits = unused_bits(session_.rank(), backward_);
  std::fill_n(bits, unused_words_, 0);
  bool any_unused = false;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (parameters_[p].ready_in_backward == backward_) continue;
    bits[p / 64] |= uint64_t{1} << (p % 64);
    any_unused = true;
  }
  if (status.interrupted) {
    forget_outside();
  } else {
    part_overlapping();
    if (any_unused && (allow_unused || allow_globally_unused)) add_unused();
  }
  uint32_t flags = any_unused ? kBackwardUnused : 0;
  if (any_unused && !allow_unused) flags |= kBackwardUnusedRefused;
  uint32_t verdict = end_backward(status, flags);
  fault_point(Point::kAfterEnd);
  in_backward_ = false;
  leave();
  finished_backwards_ = backward_;
  constexpr uint32_t kBoth = kBackwardForwardsDiffer | kBackwardLeftDiffer;
  if ((verdict & kBoth) != kBoth) verdict &= ~kBoth;
  // The settings of this rank do not matter: a rank without data has none to
  // apply.
  if ((verdict & kBackwardUnusedRefused) != 0 && allow_globally_unused &&
      is_unused_alike())
    verdict ^=
        kBackwardUnused | kBackwardUnusedRefused | kBackwardGloballyUnused;
  const bool is_reduced =
      (verdict & (kBackwardForwardsDiffer | kBackwardUnusedRefused)) == 0;
  verdict &= ~(kBackwardUnusedRefused | kBackwardLeftDiffer);
  if (!is_reduced) {
    restart_without_reduction();
    return verdict;
  }
  wait_for(control().chunks_done, backward_ * total_chunks_, kEnded,
           [&] { progress(ChunkLimit::kAll); });
  record_wait(kNoRank);
  Recorder* const recorder = Recorder::current();
  const int64_t copying_from_ns = recorder == nullptr ? 0 : now_ns();
  copy_back();
  if (recorder != nullptr)
    recorder->record(Event::kCopiedBack, copying_from_ns, 0);
  has_no_means_ = false;
  const BackwardControl& shared = control();
  const auto saw = [&](const Atomic<uint64_t>& backward, uint32_t flag) {
    return backward.load(std::memory_order_relaxed) == backward_ ? flag : 0;
  };
  return verdict | saw(shared.nonfinite_backward, kBackwardNonFinite) |
         saw(shared.overflow_backward, kBackwardOverflow);
}

// The code that caught the exception which interrupted the backward may have
// cleared the gradients since, in place, and the next backward adds to them. So
// they must not be written any more, not even by a void backward, in which
// complete buckets are reduced.
void Reducer::forget_outside() {
  overlapping_.clear();
  for (Parameter& parameter : parameters_) parameter.copy_back = nullptr;
}

void Reducer::collect_written(std::vector<Extent>& found) const {
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const Parameter& parameter = parameters_[p];
    if (parameter.ready_in_backward != backward_ ||
        parameter.copy_back == nullptr || parameter.span.count == 0)
      continue;
    const size_t bytes =
        parameter.span.count * dtype_bytes(parameter.span.dtype);
    found.push_back({parameter.copy_back, parameter.copy_back + bytes, p});
  }
}

void Reducer::part_overlapping() {
  overlapping_.clear();
  if (scatters_) return;  // no gradient outside the buffer is written
  overlapping_ = find_overlapping();
  for (const size_t index : overlapping_) {
    Parameter& parameter = parameters_[index];
    if (parameter.copy_back != nullptr) move_into_buffer(parameter);
  }
}

// Only chunks that are assigned to this rank are not in the gradient buffer
// already, and none of them is reduced yet.
void Reducer::move_into_buffer(Parameter& parameter) {
  for (uint32_t i = parameter.first_segment; i < parameter.end_segment; ++i) {
    const Segment& segment = segments_[segments_in_order_[i]];
    if (segment.owner != session_.rank()) continue;
    memcpy(gradient_buffer() + segment.offset, own_place_of(segment),
           segment.bytes());
  }
  parameter.copy_back = nullptr;
}

// A parameter without a gradient counts as zeros, or as the content that
// mark_unused() announced; its buckets can be posted after all.
void Reducer::add_unused() {
  for (Parameter& parameter : parameters_) {
    if (parameter.ready_in_backward == backward_) continue;
    const auto [offset, count, dtype] = parameter.span;
    if (parameter.counts_in_backward != backward_)
      memset(gradient_buffer() + offset, 0, count * dtype_bytes(dtype));
    parameter.copy_back = nullptr;
    post_complete(parameter);
  }
}

// Whether all ranks with data have left the same parameters unused. Ranks
// without data do not count. All ranks read the same values: ranks write them
// before they end, and again only when all have ended another backward.
bool Reducer::is_unused_alike() const {
  const uint64_t* first = nullptr;
  for (int r = 0; r < session_.world(); ++r) {
    if (BackwardStatus::unpack(header(r, backward_).status).finished) continue;
    const uint64_t* bits = unused_bits(r, backward_);
    if (first == nullptr) first = bits;
    if (!std::equal(bits, bits + unused_words_, first)) return false;
  }
  return true;
}

// Publishes that this rank's backward is over, and waits for the other ranks,
// while it reduces chunks.
uint32_t Reducer::end_backward(const BackwardStatus& status, uint32_t flags) {
  BackwardControl& shared = control();
  BackwardHeader& own = header(session_.rank(), backward_);
  own.status = status.pack();
  uint64_t first = 0;
  const uint64_t mine = own.status + 1;
  uint32_t difference = BackwardStatus::kNone;
  if (status.finished) {
    flags |= kBackwardFinished;
  } else if (status.interrupted) {
    difference = BackwardStatus::kInBoth;
  } else if (!shared.status.compare_exchange_strong(
                 first, mine, std::memory_order_relaxed)) {
    difference = BackwardStatus::difference(first - 1, own.status);
  }
  if ((difference & BackwardStatus::kInForwards) != 0)
    flags |= kBackwardForwardsDiffer;
  if ((difference & BackwardStatus::kInLeft) != 0) flags |= kBackwardLeftDiffer;
  if (!status.is_plain() && !status.finished) flags |= kBackwardReported;
  own.note = note_;
  own.ended_ns = now_ns();
  own.worked_ns = backward_over_ns_ == 0
                      ? 0
                      : std::max<int64_t>(0, own.ended_ns - backward_over_ns_ -
                                                 (slept_ns - slept_before_ns_));
  if (uint32_t other = 0; note_ != 0 &&
                          !shared.note.compare_exchange_strong(
                              other, note_, std::memory_order_relaxed) &&
                          other != note_) {
    flags |= kBackwardNotesDiffer;
  }
  if (flags != 0) shared.flags.fetch_or(flags, std::memory_order_relaxed);
  // acq_rel: releases this rank's header, unused bits and flags; the last rank
  // to end acquires those of all ranks. Pairs with this operation on the
  // others. The last rank passes on what it has acquired with ended_backward,
  // in count_up().
  const uint64_t all = backward_ * static_cast<uint64_t>(session_.world());
  if (shared.ended.fetch_add(1, std::memory_order_acq_rel) + 1 == all) {
    shared.verdict.store(shared.flags.load(std::memory_order_relaxed),
                         std::memory_order_relaxed);
    shared.flags.store(0, std::memory_order_relaxed);
    shared.status.store(0, std::memory_order_relaxed);
    shared.note.store(0, std::memory_order_relaxed);
    // Unless a rank has given up on this backward.
    if (count_up(shared.ended_backward, backward_)) ring(kWakeAll);
  }
  own.stage.store(stage(kEnded), std::memory_order_relaxed);
  const int64_t waited_before_ns = times_.waited_ns;
  wait_for(shared.ended_backward, backward_, kEnded,
           [&] { progress(ChunkLimit::kAll); });
  record_wait(note_arrivals(times_.waited_ns - waited_before_ns));
  return shared.verdict.load(std::memory_order_relaxed);
}

// Reads what ranks wrote before they ended; they write it again only when all
// have ended another backward.
int Reducer::note_arrivals(int64_t waited_ns) {
  const auto world = static_cast<size_t>(session_.world());
  std::array<int64_t, kMaxRanks> worked_ns;
  size_t last = 0;
  bool is_known = true;
  int64_t last_ns = 0;
  int64_t ended_sum_ns = 0;
  for (size_t r = 0; r < world; ++r) {
    const BackwardHeader& theirs = header(static_cast<int>(r), backward_);
    if (theirs.ended_ns > last_ns) {
      last = r;
      last_ns = theirs.ended_ns;
    }
    worked_ns[r] = theirs.worked_ns;
    ended_sum_ns += theirs.ended_ns;
    is_known = is_known && theirs.worked_ns != 0;
  }
  if (is_known)
    times_.note(std::span(worked_ns).first(world), last,
                static_cast<int64_t>(world) * last_ns - ended_sum_ns);
  if (static_cast<int>(last) != session_.rank())
    times_.waited_for_ns[last] += waited_ns;
  return static_cast<int>(last);
}

void Reducer::record_wait(int whom) {
  if (wait_began_ns_ == 0) return;
  if (Recorder* recorder = Recorder::current(); recorder != nullptr)
    recorder->record(Event::kWaited, wait_began_ns_, whom);
  wait_began_ns_ = 0;
}

// Chunks of complete buckets may have been reduced; their content is of no use
// then. Sets the counters to the values that the backward would have ended
// with.
void Reducer::restart_without_reduction() {
  BackwardControl& shared = control();
  const auto world = static_cast<uint64_t>(session_.world());
  // Two barriers: no rank reduces any more when rank 0 writes, and no rank goes
  // on before rank 0 has written.
  const auto barrier = [&](Stage next, uint64_t target) {
    if (count_up(shared.restarted, target)) ring(kWakeAll);
    header(session_.rank(), backward_)
        .stage.store(stage(next), std::memory_order_relaxed);
    wait_for(shared.restarted, target, next, [] {});
  };
  const uint64_t base = restarts_++ * 2 * world;
  barrier(kVoid, base + world);
  if (session_.rank() == 0) {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      bucket_control(b).arrived.store(backward_ * world,
                                      std::memory_order_relaxed);
      bucket_control(b).claim.store(backward_ << 32 | UINT32_MAX,
                                    std::memory_order_relaxed);
    }
    shared.chunks_done.store(backward_ * total_chunks_,
                             std::memory_order_relaxed);
  }
  barrier(kReset, base + 2 * world);
  record_wait(kNoRank);
}

template <class Work>
void Reducer::wait_for(Atomic<uint64_t>& count, uint64_t target, Stage awaited,
                       Work work) {
  wait_settled(count, target, [&] {
    wait_until(awaited, [&] {
      work();
      // Acquire: pairs with the release in count_up().
      return has_reached(count.load(std::memory_order_acquire), target);
    });
  });
}

template <class Ready>
void Reducer::wait_until(Stage awaited, Ready ready) {
  if (ready()) return;
  const int64_t start_ns = now_ns();
  wait_began_ns_ = start_ns;
  const int64_t reducing_before_ns = reducing_ns_;
  BackwardControl& shared = control();
  session_.wait_until(
      wait_place(WaitKind::kBackward, (control_at_ << 20) + backward_),
      shared.bell, shared.sleepers, session_.timeout_ns(-1), ready, [&](int r) {
        const BackwardHeader& theirs = header(r, backward_);
        // Chunks that a rank has not reduced are its own fault only once all
        // gradients are there.
        const bool can_reduce = has_reached(
            shared.ended_backward.load(std::memory_order_relaxed), backward_);
        return theirs.stage.load(std::memory_order_relaxed) < stage(awaited) ||
               theirs.is_reducing.load(std::memory_order_relaxed) != 0 ||
               (can_reduce && awaited == kEnded &&
                theirs.assigned_left.load(std::memory_order_relaxed) != 0);
      });
  times_.waited_ns += now_ns() - start_ns - (reducing_ns_ - reducing_before_ns);
}

}  // namespace paceline

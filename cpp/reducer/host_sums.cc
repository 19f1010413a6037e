#include "reducer/host_sums.h"

#include <algorithm>
#include <utility>

#include "core/clock.h"
#include "core/failure.h"
#include "core/faults.h"
#include "core/futex.h"
#include "core/region_layout.h"
#include "core/wait.h"

namespace paceline {
namespace {

constexpr int kWordBits = 64;

/// The kernels take this many arrays at once.
void check_arrays(const std::vector<const void*>& arrays) {
  if (arrays.empty() || arrays.size() > static_cast<size_t>(kMaxRanks))
    misuse(std::to_string(arrays.size()) + " arrays");
}

bool has_bit(const uint64_t* bits, int index) {
  return (bits[index / kWordBits] >> (index % kWordBits) & 1) != 0;
}

}  // namespace

HostSums::HostSums(Heap& heap, size_t buffer_bytes,
                   std::vector<SummedBucket> buckets, size_t num_slots,
                   size_t slot_bytes)
    : heap_(heap),
      session_(heap.session()),
      buffer_bytes_(buffer_bytes),
      buckets_(std::move(buckets)),
      num_slots_(num_slots),
      slot_bytes_(slot_bytes) {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const auto& [begin, end, dtype] = buckets_[b];
    if (!is_supported(dtype, ReduceOp::kMean))
      misuse("bucket " + std::to_string(b) + " is not of a floating type");
    if (begin >= end || end > buffer_bytes_ ||
        (end - begin) % dtype_bytes(dtype) != 0)
      misuse("bucket " + std::to_string(b) +
             " is no range of the gradient buffer");
  }
  layout_.progress_at = round_up(sizeof(Bell), kLinePairBytes);
  layout_.posted_at = layout_.progress_at + sizeof(Progress);
  layout_.slots_at =
      round_up(layout_.posted_at + buckets_.size() * sizeof(Atomic<uint64_t>),
               kLinePairBytes);
  layout_.bytes = layout_.slots_at + 2 * num_slots_ * slot_bytes_;
  control_at_ = heap_.allocate(layout_.bytes, -1);
  try {
    buffer_at_ = heap_.allocate(buffer_bytes_, -1);
  } catch (...) {
    heap_.free(control_at_);
    throw;
  }
}

HostSums::~HostSums() { close(); }

void HostSums::close() {
  if (closed_) return;
  closed_ = true;
  in_backward_ = false;
  heap_.free(buffer_at_);
  // Other ranks may still read how far this rank has come.
  heap_.free(control_at_, true);
}

void HostSums::check_usable() {
  if (closed_) throw Failure{.reason = Reason::kClosed};
  session_.check_usable();
}

void HostSums::keep_buffer() {
  if (is_buffer_kept_ || closed_ || session_.is_forked() || !session_.is_over())
    return;
  is_buffer_kept_ = true;
  session_.keep_to_itself(buffer_at_, buffer_bytes_);
}

const SummedBucket& HostSums::bucket(size_t index) const {
  if (index >= buckets_.size()) misuse("no bucket " + std::to_string(index));
  return buckets_[index];
}

void HostSums::check_part(size_t index, size_t first, size_t count) const {
  const size_t elements = bucket(index).count();
  if (first > elements || count > elements - first) {
    misuse("elements " + std::to_string(first) + " to " +
           std::to_string(first + count) + " of bucket " +
           std::to_string(index) + ", which has " + std::to_string(elements));
  }
}

void* HostSums::at(int rank, size_t index, size_t first) const {
  const SummedBucket& bucket = buckets_[index];
  return buffer_of(rank) + bucket.begin + first * dtype_bytes(bucket.dtype);
}

void HostSums::begin_backward(double weight, bool is_in_gradients) {
  check_usable();
  if (in_backward_) misuse("a backward was begun twice");
  ++backward_;
  in_backward_ = true;
  are_weights_in_gradients_ = is_in_gradients;
  // Published by post().
  progress(session_.rank()).weight[backward_ & 1] = weight;
}

void HostSums::post(size_t index) {
  check_usable();
  bucket(index);
  if (!in_backward_) misuse("a bucket was posted outside of a backward");
  Atomic<uint64_t>& own = posted(session_.rank(), index);
  if (own.load(std::memory_order_relaxed) == backward_) {
    misuse("bucket " + std::to_string(index) +
           " was posted twice in one backward pass");
  }
  fault_point(Point::kBeforePost);
  // Release: this rank's gradients of the bucket, and its weight; pairs with
  // the acquire in is_complete().
  own.store(backward_, std::memory_order_release);
  ring();
  fault_point(Point::kAfterPost);
}

bool HostSums::is_complete(size_t index) const {
  bucket(index);
  for (int r = 0; r < session_.world(); ++r) {
    // Acquire; pairs with the release in post().
    if (posted(r, index).load(std::memory_order_acquire) < backward_)
      return false;
  }
  return true;
}

void HostSums::wait_complete(size_t index) {
  check_usable();
  bucket(index);
  wait_until(
      -1, [&] { return is_complete(index); },
      [&](int r) {
        return posted(r, index).load(std::memory_order_relaxed) < backward_;
      });
}

void HostSums::check_ranks(Neighbours ranks) const {
  if (ranks.begin < 0 || ranks.begin >= ranks.end ||
      ranks.end > session_.world()) {
    misuse("ranks " + std::to_string(ranks.begin) + " to " +
           std::to_string(ranks.end) + " of a host that has " +
           std::to_string(session_.world()));
  }
}

std::vector<double> HostSums::weights(Neighbours ranks) const {
  std::vector<double> found;
  for (int r = ranks.begin; r < ranks.end; ++r)
    found.push_back(progress(r).weight[backward_ & 1]);
  return found;
}

const double* HostSums::factors(const std::vector<double>& weights) const {
  const bool all_one =
      are_weights_in_gradients_ ||
      std::ranges::all_of(weights, [](double w) { return w == 1; });
  return all_one ? nullptr : weights.data();
}

double HostSums::total_weight(Neighbours ranks) const {
  check_ranks(ranks);
  const std::vector<double> each = weights(ranks);
  return sum_of_weights(each.data(), static_cast<int>(each.size()));
}

void HostSums::sum(size_t index, size_t first, size_t count, Neighbours ranks,
                   void* out, ReduceStats* stats) const {
  check_part(index, first, count);
  check_ranks(ranks);
  const std::vector<double> each = weights(ranks);
  const void* copies[kMaxRanks];
  for (int r = ranks.begin; r < ranks.end; ++r)
    copies[r - ranks.begin] = at(r, index, first);
  sum_weighted(buckets_[index].dtype, copies, ranks.end - ranks.begin, out,
               count, factors(each), stats);
}

void HostSums::find_nonfinite(size_t index, size_t first, size_t count,
                              uint64_t ranks[2]) const {
  check_part(index, first, count);
  const std::vector<double> each = weights(everybody());
  ranks[0] = ranks[1] = 0;
  for (int r = 0; r < session_.world(); ++r) {
    const void* copy = at(r, index, first);
    const DType dtype = buckets_[index].dtype;
    // A rank whose weight is 0 in the type of the sums does not count.
    const bool counts = sum_type(dtype) == DType::kFloat64
                            ? each[r] != 0
                            : static_cast<float>(each[r]) != 0;
    if (!counts) continue;
    ReduceStats seen;
    // The maximum of one array, without an output: the kernel checks it all the
    // same.
    reduce(dtype, ReduceOp::kMax, &copy, 1, nullptr, 0, count, nullptr, &seen);
    if (has_bit(seen.nonfinite_ranks, 0))
      ranks[r / kWordBits] |= uint64_t{1} << (r % kWordBits);
  }
}

void HostSums::add_sums(size_t index, const std::vector<const void*>& sums,
                        size_t count, void* out) const {
  check_arrays(sums);
  void* const outputs[] = {out};
  reduce(sum_type(bucket(index).dtype), ReduceOp::kSum, sums.data(),
         static_cast<int>(sums.size()), outputs, 1, count, nullptr, nullptr);
}

bool HostSums::publish(size_t index, size_t first, size_t count,
                       const std::vector<const void*>& sums,
                       double total_weight) {
  check_usable();
  check_part(index, first, count);
  fault_point(Point::kChunkClaimed);
  check_arrays(sums);
  void* copies[kMaxRanks];
  for (int r = 0; r < session_.world(); ++r) copies[r] = at(r, index, first);
  ReduceStats seen;
  mean_of_sums(buckets_[index].dtype, sums.data(),
               static_cast<int>(sums.size()), copies, session_.world(), count,
               total_weight, &seen);
  return !seen.has_nonfinite;
}

HostSums::Averaged HostSums::average(size_t index, size_t first, size_t count,
                                     const std::vector<const void*>& values,
                                     const std::vector<double>& weights,
                                     double total_weight,
                                     bool stops_at_nonfinite) {
  check_usable();
  check_part(index, first, count);
  fault_point(Point::kChunkClaimed);
  check_arrays(values);
  if (weights.size() != values.size())
    misuse(std::to_string(weights.size()) + " weights");
  const DType dtype = buckets_[index].dtype;
  void* copies[kMaxRanks];
  for (int r = 0; r < session_.world(); ++r) copies[r] = at(r, index, first);
  ReduceStats seen;
  const size_t done =
      weighted_mean(dtype, values.data(), static_cast<int>(values.size()),
                    copies, session_.world(), count, factors(weights),
                    total_weight, stops_at_nonfinite, &seen);
  // If it has stopped early, the block that it saw last is not written.
  return {.count = done, .is_finite = !seen.has_nonfinite || done < count};
}

bool HostSums::is_nonfinite(size_t index, size_t first, size_t count) const {
  check_part(index, first, count);
  const void* own = at(session_.rank(), index, first);
  ReduceStats seen;
  reduce(buckets_[index].dtype, ReduceOp::kMax, &own, 1, nullptr, 0, count,
         nullptr, &seen);
  return has_bit(seen.nonfinite_ranks, 0);
}

void HostSums::count_share() {
  check_usable();
  fault_point(Point::kChunkReduced);
  // Release: the share is written on all ranks, and slots and flags with it;
  // pairs with the acquire in wait_published().
  const bool is_last =
      count_up(bell().published, backward_ * shares_per_backward());
  // After count_up(): if this rank is stopped in between, it shows as late.
  progress(session_.rank()).published.fetch_add(1, std::memory_order_relaxed);
  if (is_last) ring();
}

void HostSums::wait_published(double timeout_s) {
  if (closed_) throw Failure{.reason = Reason::kClosed};
  fault_point(Point::kBeforeEnd);
  const uint64_t all = backward_ * shares_per_backward();
  const uint64_t own = backward_ * buckets_.size();
  progress(session_.rank())
      .ended_backward.store(backward_, std::memory_order_relaxed);
  Atomic<uint64_t>& count = bell().published;
  wait_settled(count, all, [&] {
    wait_until(
        timeout_s,
        // Acquire; pairs with the release in count_up().
        [&] { return has_reached(count.load(std::memory_order_acquire), all); },
        [&](int r) {
          return progress(r).published.load(std::memory_order_relaxed) < own;
        });
  });
  in_backward_ = false;
  fault_point(Point::kAfterEnd);
}

void HostSums::note_overflow() {
  // Relaxed: published by count_share().
  progress(session_.rank())
      .overflow_backward.store(backward_, std::memory_order_relaxed);
}

bool HostSums::has_overflow() const {
  for (int r = 0; r < session_.world(); ++r) {
    if (progress(r).overflow_backward.load(std::memory_order_relaxed) ==
        backward_)
      return true;
  }
  return false;
}

std::byte* HostSums::slot(size_t index) const {
  if (index >= num_slots_) misuse("no slot " + std::to_string(index));
  return control_of(0) + layout_.slots_at +
         ((backward_ & 1) * num_slots_ + index) * slot_bytes_;
}

std::vector<int> HostSums::waiting_ranks() const {
  std::vector<int> found;
  if (closed_ || session_.is_closed()) return found;
  const uint64_t next = in_backward_ ? backward_ : backward_ + 1;
  for (int r = 0; r < session_.world(); ++r) {
    if (r != session_.rank() &&
        progress(r).ended_backward.load(std::memory_order_relaxed) >= next)
      found.push_back(r);
  }
  return found;
}

void HostSums::ring() {
  bell().bell.fetch_add(1, std::memory_order_seq_cst);
  if (bell().sleepers.load(std::memory_order_seq_cst) != 0)
    futex_wake(bell().bell, kWakeAll);
}

template <class Ready, class IsLate>
void HostSums::wait_until(double timeout_s, Ready ready, IsLate is_late) {
  if (ready()) return;
  const int64_t start_ns = now_ns();
  session_.wait_until(
      wait_place(WaitKind::kHostSums, (control_at_ << 20) + backward_),
      bell().bell, bell().sleepers, session_.timeout_ns(timeout_s), ready,
      is_late);
  waited_ns_ += now_ns() - start_ns;
}

}  // namespace paceline

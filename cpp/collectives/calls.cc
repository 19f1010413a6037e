#include "collectives/calls.h"

#include "core/faults.h"
#include "core/futex.h"
#include "core/wait.h"

namespace paceline {

void Calls::begin(CallKind kind, size_t count, DType dtype, ReduceOp op,
                  int root, double weight, double timeout_s) {
  session_.check_usable();
  fault_point(Point::kCallBegin);
  call_ = {.number = call_.number + 1,
           .count = count,
           .kind = kind,
           .dtype = static_cast<uint32_t>(dtype),
           .op = static_cast<uint32_t>(op),
           .root = root,
           .weight = weight};
  call_timeout_ns_ = session_.timeout_ns(timeout_s);
  own_.call[call_.number & 1] = call_;
  // Release: publishes the record; pairs with describe_ranks() on a rank that
  // reports an error.
  own_.call_number.store(call_.number, std::memory_order_release);
}

Places Calls::barrier(uint64_t place) {
  fault_point(Point::kBeforeArrive);
  Gate& gate = gate_;
  // Relaxed: this rank took part in the previous phase, so it knows the value.
  const uint32_t phase = gate.phase.load(std::memory_order_relaxed);
  uint32_t flags = 0;
  uint64_t first = 0;
  const uint64_t mine = call_.fingerprint();
  if (!gate.fingerprint.compare_exchange_strong(first, mine,
                                                std::memory_order_relaxed) &&
      first != mine) {
    flags |= kCallsDiffer;
  }
  first = 0;
  // Place 0 ("not in the region") is stored as 1, so that it is compared, too.
  const uint64_t place_word = place + 1;
  if (!gate.place.compare_exchange_strong(first, place_word,
                                          std::memory_order_relaxed) &&
      first != place_word) {
    flags |= kPlacesDiffer;
  }
  if (flags != 0) gate.flags.fetch_or(flags, std::memory_order_relaxed);
  // acq_rel: the release half publishes this rank's data and flags; the acquire
  // half lets the last rank to arrive see those of all ranks. Pairs with this
  // operation on the other ranks. The last rank passes on what it has acquired
  // with `phase`.
  const bool is_last =
      gate.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 ==
      mapping_.header().world;
  // A rank that was stopped may arrive after the others have given up, and
  // reduce arrays that they have freed since. So a rank that finds the group
  // over here does not pass the gate, and the gate stays shut for all. This
  // check must follow the arrival: what this rank read earlier is valid only if
  // the group still runs here.
  if (session_.is_over()) [[unlikely]]
    session_.check_usable();
  if (is_last) {
    gate.verdict.store(gate.flags.load(std::memory_order_relaxed),
                       std::memory_order_relaxed);
    gate.flags.store(0, std::memory_order_relaxed);
    gate.fingerprint.store(0, std::memory_order_relaxed);
    gate.place.store(0, std::memory_order_relaxed);
    gate.arrived.store(0, std::memory_order_relaxed);
    // seq_cst: a release for the resets and for the data of all ranks (pairs
    // with the acquire of `phase` below), and ordered before the load of
    // `sleepers`.
    gate.phase.store(phase + 1, std::memory_order_seq_cst);
    if (gate.sleepers.load(std::memory_order_seq_cst) != 0)
      futex_wake(gate.phase, kWakeAll);
  }
  // Only now: a rank that is stopped before its arrival has its full effect
  // must not look as if it had arrived.
  own_.arrivals.store(phase + 1, std::memory_order_relaxed);
  fault_point(Point::kAfterArrive);
  // Acquire in ready(): the data of all ranks; pairs with the store of `phase`
  // by the last rank to arrive.
  session_.wait_until(
      wait_place(WaitKind::kCall, phase), gate.phase, gate.sleepers,
      call_timeout_ns_,
      [&] { return gate.phase.load(std::memory_order_acquire) != phase; },
      [&](int r) {
        return mapping_.line(r).arrivals.load(std::memory_order_relaxed) !=
               phase + 1;
      });
  const uint32_t verdict = gate.verdict.load(std::memory_order_relaxed);
  if ((verdict & kCallsDiffer) != 0) throw Failure{.reason = Reason::kMismatch};
  if ((verdict & kPlacesDiffer) != 0) return Places::kDifferent;
  return place == 0 ? Places::kOutside : Places::kInRegion;
}

uint64_t Calls::place_of(const void* data, size_t bytes) const {
  const std::byte* heap = slab(rank()) + mapping_.layout().heap_at();
  const std::byte* end = slab(rank()) + mapping_.layout().slab_bytes;
  const auto* at = static_cast<const std::byte*>(data);
  if (at < heap || at + bytes > end) return 0;
  return static_cast<uint64_t>(at - slab(rank()));
}

const double* Calls::weights(double (&storage)[kMaxRanks]) const {
  // Only for a mean, because reading the weights touches a cache line of every
  // rank.
  if (static_cast<ReduceOp>(call_.op) != ReduceOp::kMean) return nullptr;
  bool all_one = true;
  for (int r = 0; r < world(); ++r) {
    storage[r] = mapping_.line(r).call[call_.number & 1].weight;
    all_one = all_one && storage[r] == 1.0;
  }
  return all_one ? nullptr : storage;
}

}  // namespace paceline

#include "core/session.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/cgroup.h"
#include "core/shared_text.h"
#include "core/wait.h"

namespace paceline {
namespace {

// Measured on a 2-core virtual machine: a futex wake-up costs 10 to 60 us
// there, and two ranks that do the same work arrive within less time than that.
// See benchmarks/results/.
constexpr double kDefaultSpinUs = 50;

}  // namespace

Session::Session(std::shared_ptr<Region> region, int rank,
                 const uint64_t nonce[2], const GroupOptions& options)
    : options_(options),
      fork_generation_(fork_generation()),
      mapping_(std::move(region), rank, nonce),
      message_rings_(mapping_) {
  take_place();
}

void Session::take_place() {
  RankLine& own = mapping_.own_line();
  if (own.pid.exchange(static_cast<uint32_t>(getpid())) != 0) {
    misuse("another process has taken the place of rank " +
           std::to_string(rank()));
  }
  try {
    mapping_.reserve(0, Layout::buffers_bytes());
  } catch (const Failure& failure) {
    // The other ranks need not wait for this one.
    abort(failure.message.c_str());
    throw;
  }
  cpu_set_t affinity;
  static_assert(sizeof(affinity) == sizeof(own.affinity));
  if (sched_getaffinity(0, sizeof(affinity), &affinity) == 0) {
    memcpy(own.affinity, &affinity, sizeof(affinity));
    // Release: publishes the affinity; pairs with decide_spinning().
    own.affinity_known.store(1, std::memory_order_release);
  }
  liveness_ = std::make_unique<LivenessThread>(
      mapping_.header(), mapping_.lines(), rank(), &mapping_.region());
  mapping_.header().attached.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(mapping_.header().attached, kWakeAll);
}

void Session::join() {
  Atomic<uint32_t> no_sleepers{0};  // an attaching rank always wakes
  // Acquire in ready(): what each rank wrote to its line; pairs with
  // take_place().
  wait_until(
      wait_place(WaitKind::kForming, 0), mapping_.header().attached,
      no_sleepers, timeout_ns(-1),
      [&] {
        return mapping_.header().attached.load(std::memory_order_acquire) ==
               mapping_.header().world;
      },
      [&](int r) {  // pairs with LivenessThread::hold()
        return line(r).life.load(std::memory_order_acquire) == kLifeNotYet;
      });
  decide_spinning();
}

// Spins only if every rank of this host can have a core of its own.
void Session::decide_spinning() {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const RankLine& each : mapping_.lines()) {
    cpu_set_t one;
    // Acquire; pairs with take_place().
    if (each.affinity_known.load(std::memory_order_acquire) == 0) continue;
    memcpy(&one, each.affinity, sizeof(one));
    CPU_OR(&all, &all, &one);
  }
  const double cores =
      std::min<double>(CPU_COUNT(&all), read_cgroup_limits().cores);
  has_core_per_rank_ = cores >= world();
  if (world() == 1) return;
  spin_ns_ =
      static_cast<int64_t>(1000 * (options_.spin_us >= 0 ? options_.spin_us
                                   : has_core_per_rank_  ? kDefaultSpinUs
                                                         : 0));
  // With more ranks than cores, one yield often lets the late rank run: 5 us
  // instead of a 20 us sleep.
  yields_ = has_core_per_rank_ ? 0 : 2;
}

Session::~Session() {
  close();
  // A child forked from the group's process has a liveness thread object, but
  // not its thread.
  if (liveness_ != nullptr) liveness_->abandon();
}

void Session::close() {
  if (liveness_ == nullptr || closed_.exchange(true)) return;
  if (is_forked()) return;
  // Acquire; pairs with abort_group().
  if (mapping_.header().abort.load(std::memory_order_acquire) == 0)
    message_rings_.advance_all();
  liveness_.reset();
}

void Session::abort(const char* message) {
  if (closed_ || is_forked()) return;
  // The first reason stays, and its message must not change while a rank reads
  // it. Acquire; pairs with abort_group().
  if (mapping_.header().abort.load(std::memory_order_acquire) != 0) return;
  RankLine& own = mapping_.own_line();
  snprintf(own.message, sizeof(own.message), "%s", message);
  abort_group(mapping_.header(), Reason::kRaised, rank(), rank());
}

void Session::set_activity(const char* text, uint32_t forwards) {
  if (closed_ || is_forked()) return;
  mapping_.own_line().forwards.store(forwards, std::memory_order_relaxed);
  write_text(mapping_.own_line().activity, text);
}

void Session::check_usable() const {
  if (is_forked()) throw Failure{.reason = Reason::kForked};
  if (closed_) throw Failure{.reason = Reason::kClosed};
  // Acquire; pairs with abort_group().
  if (mapping_.header().abort.load(std::memory_order_acquire) != 0)
    fail_from_abort(0);
}

}  // namespace paceline

#include "collectives/host_group.h"

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "core/cgroup.h"

namespace paceline {
namespace {

// Measured on a 2-core virtual machine: a futex wake-up costs 10 to 60 us
// there, and two ranks that do the same work arrive within less than that. See
// benchmarks/results/.
constexpr double kDefaultSpinUs = 50;

}  // namespace

HostGroup::HostGroup(int fd, int rank, const uint64_t nonce[2],
                     const GroupOptions& options)
    : HostGroup(std::make_shared<Region>(fd), rank, nonce, options) {}

HostGroup::HostGroup(std::shared_ptr<Region> region, int rank,
                     const uint64_t nonce[2], const GroupOptions& options)
    : region_(std::move(region)),
      options_(options),
      rank_(rank),
      fork_generation_(fork_generation()),
      header_(reinterpret_cast<Header*>(region_->data())) {
  attach(nonce);
}

void HostGroup::attach(const uint64_t nonce[2]) {
  if (region_->size() < sizeof(Header) || header_->magic != kMagic ||
      header_->abi_version != kAbiVersion) {
    misuse(
        "the shared region was made by another version of Paceline; all ranks "
        "must use the same one");
  }
  if (header_->nonce[0] != nonce[0] || header_->nonce[1] != nonce[1]) {
    misuse("the shared region belongs to another job");
  }
  layout_ = {static_cast<int>(header_->world), header_->slab_bytes};
  if (rank_ < 0 || rank_ >= layout_.world ||
      layout_.region_bytes() > region_->size()) {
    misuse("rank " + std::to_string(rank_) +
           " does not fit a region made for " + std::to_string(layout_.world) +
           " ranks");
  }
  std::byte* base = region_->data();
  first_slab_ = base + layout_.slab_at(0);
  blocks_ = {reinterpret_cast<Block*>(base + layout_.blocks_at()), kMaxBlocks};
  lines_ = {reinterpret_cast<RankLine*>(base + layout_.rank_lines_at()),
            header_->world};
  RankLine& own = lines_[static_cast<size_t>(rank_)];
  if (own.pid.exchange(static_cast<uint32_t>(getpid())) != 0) {
    misuse("another process has taken the place of rank " +
           std::to_string(rank_));
  }
  try {
    region_->reserve(layout_.slab_at(rank_), Layout::buffers_bytes());
  } catch (const Failure& failure) {
    abort(failure.message.c_str());  // the others need not wait for this rank
    throw;
  }
  cpu_set_t affinity;
  static_assert(sizeof(affinity) == sizeof(own.affinity));
  if (sched_getaffinity(0, sizeof(affinity), &affinity) == 0) {
    memcpy(own.affinity, &affinity, sizeof(affinity));
    own.affinity_known.store(1, std::memory_order_release);
  }
  if (rank_ == 0) {
    const size_t heap_at = round_up(layout_.heap_at(), page_bytes());
    if (heap_at < layout_.slab_bytes)
      free_space_.give_back(heap_at, layout_.slab_bytes - heap_at);
    for (size_t i = kMaxBlocks; i > 0; --i)
      free_blocks_.push_back(static_cast<uint32_t>(i - 1));
  }
  transfers_ = std::make_unique<Transfers>(*this);
  keeper_ = std::make_unique<Keeper>(*header_, lines_, rank_, region_.get());
  header_->attached.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(header_->attached, kWakeAll);
}

void HostGroup::join() {
  Atomic<uint32_t> no_sleepers{0};  // whoever attaches always wakes
  wait_until(
      header_->attached, no_sleepers, timeout_ns(-1),
      [&] {
        return header_->attached.load(std::memory_order_acquire) ==
               header_->world;
      },
      [&](int r) {
        return line(r).life.load(std::memory_order_acquire) == kLifeNotYet;
      });
  decide_spinning();
}

// Spinning is right only while every rank of this host can have a core of its
// own.
void HostGroup::decide_spinning() {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const RankLine& each : lines_) {
    cpu_set_t one;
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

HostGroup::~HostGroup() {
  close();
  // A child forked from the group's process has a keeper object, but not its
  // thread.
  if (keeper_ != nullptr) keeper_->abandon();
}

void HostGroup::close() {
  if (keeper_ == nullptr || closed_.exchange(true)) return;
  if (is_forked()) return;
  if (header_->abort.load(std::memory_order_acquire) == 0)
    transfers_->advance_all();
  keeper_.reset();
}

void HostGroup::abort(const char* message) {
  if (closed_ || is_forked()) return;
  // The first reason stays, and whoever reads it must not see it change.
  if (header_->abort.load(std::memory_order_acquire) != 0) return;
  RankLine& own = lines_[static_cast<size_t>(rank_)];
  snprintf(own.message, sizeof(own.message), "%s", message);
  abort_group(*header_, Reason::kRaised, rank_, rank_);
}

void HostGroup::set_activity(const char* text) {
  if (closed_ || is_forked()) return;
  RankLine& own = lines_[static_cast<size_t>(rank_)];
  snprintf(own.activity, sizeof(own.activity), "%s", text);
}

void HostGroup::check_usable() const {
  if (is_forked()) throw Failure{.reason = Reason::kForked};
  if (closed_) throw Failure{.reason = Reason::kClosed};
  if (header_->abort.load(std::memory_order_acquire) != 0) fail_from_abort(0);
}

void HostGroup::fail_from_abort(double waited_s) const {
  const uint32_t word = header_->abort.load(std::memory_order_acquire);
  const auto by = static_cast<int>(word >> 8 & 0xff);
  Failure failure{.reason = static_cast<Reason>(word >> 16),
                  .culprit = static_cast<int>(word & 0xff)};
  failure.waited_s = waited_s;
  if (failure.reason == Reason::kDeadline) {
    const RankLine& noticed = line(by);
    failure.late[0] = noticed.late[0];
    failure.late[1] = noticed.late[1];
    failure.waited_s = noticed.waited_s;
  } else {
    for (int r = 0; r < world(); ++r) {
      // Who died after it had learned of the end did so because of it.
      const bool is_victim =
          has_died(line(r)) &&
          line(r).is_informed.load(std::memory_order_relaxed) == 0;
      if (r == failure.culprit || is_victim)
        failure.late[r / 64] |= uint64_t{1} << (r % 64);
    }
  }
  if (failure.reason == Reason::kRaised) {
    const RankLine& raised = line(failure.culprit);
    failure.message.assign(raised.message,
                           strnlen(raised.message, sizeof(raised.message)));
  }
  lines_[static_cast<size_t>(rank_)].is_informed.store(
      1, std::memory_order_relaxed);
  throw failure;
}

void HostGroup::fail_deadline(const Failure& so_far) {
  RankLine& own = lines_[static_cast<size_t>(rank_)];
  own.late[0] = so_far.late[0];
  own.late[1] = so_far.late[1];
  own.waited_s = so_far.waited_s;
  abort_group(*header_, Reason::kDeadline, rank_, so_far.culprit);
  fail_from_abort(so_far.waited_s);
}

void HostGroup::begin(CallKind kind, size_t count, DType dtype, ReduceOp op,
                      int root, double weight, double timeout_s) {
  check_usable();
  fault_point(Point::kCallBegin);
  call_ = {.number = call_.number + 1,
           .count = count,
           .kind = kind,
           .dtype = static_cast<uint32_t>(dtype),
           .op = static_cast<uint32_t>(op),
           .root = root,
           .weight = weight};
  call_timeout_ns_ = timeout_ns(timeout_s);
  RankLine& own = lines_[static_cast<size_t>(rank_)];
  own.call[call_.number & 1] = call_;
  own.call_number.store(call_.number, std::memory_order_release);
}

Places HostGroup::meet(uint64_t place) {
  fault_point(Point::kBeforeArrive);
  Gate& gate = header_->gate;
  RankLine& own = lines_[static_cast<size_t>(rank_)];
  // Relaxed: this rank itself took part in the phase before, so it knows the
  // value.
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
  // Place 0 ("not in the region") is stored as 1, so that it too is compared.
  const uint64_t place_word = place + 1;
  if (!gate.place.compare_exchange_strong(first, place_word,
                                          std::memory_order_relaxed) &&
      first != place_word) {
    flags |= kPlacesDiffer;
  }
  if (flags != 0) gate.flags.fetch_or(flags, std::memory_order_relaxed);
  // acq_rel: the release half publishes this rank's data and its flags; the
  // acquire half lets the last to arrive see everybody's.
  if (gate.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 ==
      header_->world) {
    gate.verdict.store(gate.flags.load(std::memory_order_relaxed),
                       std::memory_order_relaxed);
    gate.flags.store(0, std::memory_order_relaxed);
    gate.fingerprint.store(0, std::memory_order_relaxed);
    gate.place.store(0, std::memory_order_relaxed);
    gate.arrived.store(0, std::memory_order_relaxed);
    // seq_cst: a release for the resets and everybody's data (partner: the
    // acquire below), and ordered before the look at the sleepers.
    gate.phase.store(phase + 1, std::memory_order_seq_cst);
    if (gate.sleepers.load(std::memory_order_seq_cst) != 0)
      futex_wake(gate.phase, kWakeAll);
  }
  // Only now: a rank that is stopped before its arrival has its full effect
  // must not look as if it had arrived.
  own.arrivals.store(phase + 1, std::memory_order_relaxed);
  fault_point(Point::kAfterArrive);
  wait_until(
      gate.phase, gate.sleepers, call_timeout_ns_,
      [&] { return gate.phase.load(std::memory_order_acquire) != phase; },
      [&](int r) {
        return line(r).arrivals.load(std::memory_order_relaxed) != phase + 1;
      });
  const uint32_t verdict = gate.verdict.load(std::memory_order_relaxed);
  if ((verdict & kCallsDiffer) != 0) throw Failure{.reason = Reason::kMismatch};
  if ((verdict & kPlacesDiffer) != 0) return Places::kDifferent;
  return place == 0 ? Places::kOutside : Places::kInRegion;
}

uint64_t HostGroup::place_of(const void* data, size_t bytes) const {
  const std::byte* heap = slab(rank_) + layout_.heap_at();
  const std::byte* end = slab(rank_) + layout_.slab_bytes;
  const auto* at = static_cast<const std::byte*>(data);
  if (at < heap || at + bytes > end) return 0;
  return static_cast<uint64_t>(at - slab(rank_));
}

const double* HostGroup::weights(double (&storage)[kMaxRanks]) const {
  // Reading them touches a cache line of every rank.
  if (static_cast<ReduceOp>(call_.op) != ReduceOp::kMean) return nullptr;
  bool all_one = true;
  for (int r = 0; r < world(); ++r) {
    storage[r] = line(r).call[call_.number & 1].weight;
    all_one = all_one && storage[r] == 1.0;
  }
  return all_one ? nullptr : storage;
}

void HostGroup::barrier(double timeout_s) {
  begin(CallKind::kBarrier, 0, DType::kUInt8, ReduceOp::kSum, 0, 1, timeout_s);
  meet();
}

TransferId HostGroup::start_send(const void* data, size_t bytes,
                                 int destination, uint64_t tag) {
  check_usable();
  if (destination == rank_ || destination < 0 || destination >= world()) {
    misuse("send to rank " + std::to_string(destination) + " of " +
           std::to_string(world()));
  }
  // A send only reads it.
  auto* unchanged = static_cast<std::byte*>(const_cast<void*>(data));
  return transfers_->start(unchanged, bytes, destination, tag, true);
}

TransferId HostGroup::start_receive(void* data, size_t bytes, int source,
                                    uint64_t tag) {
  check_usable();
  if (source == rank_ || source < 0 || source >= world()) {
    misuse("receive from rank " + std::to_string(source) + " of " +
           std::to_string(world()));
  }
  return transfers_->start(static_cast<std::byte*>(data), bytes, source, tag,
                           false);
}

bool HostGroup::test(TransferId id) {
  check_usable();
  transfers_->advance_all();
  return transfers_->is_finished(id);
}

void HostGroup::wait(TransferId id, double timeout_s) {
  if (!transfers_->is_finished(id)) {
    check_usable();
    RankLine& own = lines_[static_cast<size_t>(rank_)];
    const int peer = transfers_->peer_of(id);
    try {
      wait_until(
          own.bell, own.bell_sleepers, timeout_ns(timeout_s),
          [&] {
            transfers_->advance_all();
            return transfers_->is_finished(id);
          },
          [&](int r) { return r == peer; });
    } catch (const Failure&) {
      // The caller may free the array now; another thread of this rank must
      // not go on filling it.
      transfers_->forget(id, true);
      throw;
    }
  }
  transfers_->collect(id);
}

int HostGroup::source_of_waiting(uint64_t tag) {
  check_usable();
  transfers_->advance_all();
  return transfers_->source_of_waiting(tag);
}

int HostGroup::wait_for_source(uint64_t tag, double timeout_s) {
  check_usable();
  RankLine& own = lines_[static_cast<size_t>(rank_)];
  const auto has_left = [&](int r) {
    return line(r).life.load(std::memory_order_acquire) == kLifeLeft;
  };
  int source = -1;
  wait_until(
      own.bell, own.bell_sleepers, timeout_ns(timeout_s),
      [&] {
        source = transfers_->source_of_waiting(tag);
        return source >= 0;
      },
      // Who has left is to blame only when nobody else is there to send.
      [&](int r) {
        if (!has_left(r)) return true;
        for (int other = 0; other < world(); ++other)
          if (other != rank_ && !has_left(other)) return false;
        return true;
      });
  return source;
}

bool HostGroup::forget(TransferId id) {
  if (is_forked()) return true;
  return transfers_->forget(
      id, closed_ || header_->abort.load(std::memory_order_acquire) != 0);
}

}  // namespace paceline

// One rank's end of a group of ranks that map the same region.
//
// Every collective is built from two things: data that each rank puts where the
// others can read it (its small buffers, its staging buffers, or an array that
// lies in the region), and meet(), which returns once every rank has got there.
// Ranks call the same collectives in the same order; meet() compares what they
// call and makes all of them fail together when they differ.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "collectives/free_space.h"
#include "collectives/point_to_point.h"
#include "collectives/turn.h"
#include "core/clock.h"
#include "core/control.h"
#include "core/failure.h"
#include "core/faults.h"
#include "core/futex.h"
#include "core/life.h"
#include "core/region.h"
#include "kernels/kernels.h"

namespace paceline {

/// How long the calls of one user of a group wait.
struct Patience {
  double timeout_s;
  double warn_after_s;
};

/// What a thread does around sleeping. The core knows nothing of Python's lock;
/// the binding does.
struct Hooks {
  virtual ~Hooks() = default;
  /// About to sleep.
  virtual void before_block() {}
  /// A signal arrived (`by_signal`), or may have: true gives the call up.
  virtual bool interrupted(bool /*by_signal*/) { return false; }
  /// Waited for the warning time.
  virtual void slow(const Failure& /*so_far*/) {}
  /// Null: the group's own.
  const Patience* patience = nullptr;
};

/// Of this thread's call under way; null: none.
inline thread_local Hooks* current_hooks = nullptr;

struct GroupOptions {
  std::string name = "world";
  double timeout_s = 300;
  double warn_after_s = 10;
  /// How long to spin before sleeping, in microseconds; negative: 50 when the
  /// host's ranks fit its cores, else 0.
  double spin_us = -1;
};

inline constexpr int64_t kSignalRecheckNs = 500'000'000;

/// Where the ranks' arrays of one call lie.
enum class Places {
  kDifferent,  ///< at different offsets, or not all in the region
  kOutside,    ///< all outside the region
  kInRegion,   ///< all in the region, at the same offset
};

class HostGroup {
 public:
  /// Maps the region behind `fd` and takes place `rank` in it. Reserves this
  /// rank's share. Does not block: join() comes next.
  HostGroup(int fd, int rank, const uint64_t nonce[2],
            const GroupOptions& options);
  /// The same on a mapping that several ranks of one process share: ranks as
  /// threads, for the C++ tests.
  HostGroup(std::shared_ptr<Region> region, int rank, const uint64_t nonce[2],
            const GroupOptions& options);
  ~HostGroup();
  /// Blocks until every rank has taken its place.
  void join();
  HostGroup(const HostGroup&) = delete;
  HostGroup& operator=(const HostGroup&) = delete;

  int rank() const { return rank_; }
  int world() const { return layout_.world; }
  /// Whether every rank of this host can have a core of its own.
  bool has_core_per_rank() const { return has_core_per_rank_; }
  const GroupOptions& options() const { return options_; }

  // --- collectives; pointers into the region are used where they are, others
  // are copied through it ---
  void all_reduce(void* data, size_t count, DType dtype, ReduceOp op,
                  double weight, double timeout_s);
  void reduce(void* data, size_t count, DType dtype, ReduceOp op, int root,
              double timeout_s);
  void reduce_scatter(const void* in, void* out, size_t count, DType dtype,
                      ReduceOp op, double timeout_s);
  void broadcast(void* data, size_t bytes, int root, double timeout_s);
  void all_gather(const void* in, void* out, size_t bytes, double timeout_s);
  void gather(const void* in, void* out, size_t bytes, int root,
              double timeout_s);
  void scatter(const void* in, void* out, size_t bytes, int root,
               double timeout_s);
  /// in_bytes[r] go to rank r, out_bytes[r] come from it; both arrays are
  /// contiguous in rank order.
  void all_to_all(const void* in, std::span<const uint64_t> in_bytes, void* out,
                  std::span<const uint64_t> out_bytes, double timeout_s);
  void barrier(double timeout_s);

  // --- point to point: started in order per pair, finished by wait(); never
  // blocks in start ---
  TransferId start_send(const void* data, size_t bytes, int destination,
                        uint64_t tag);
  TransferId start_receive(void* data, size_t bytes, int source, uint64_t tag);
  bool test(TransferId id);
  void wait(TransferId id, double timeout_s);
  /// A rank that has sent a message with this tag for which no receive was
  /// started; -1: none.
  int source_of_waiting(uint64_t tag);
  /// Blocks until there is one.
  int wait_for_source(uint64_t tag, double timeout_s);
  /// Lets go of a transfer that nobody will wait for. False: it is under way,
  /// and its memory must stay. Never blocks, never throws.
  bool forget(TransferId id);

  // --- memory ---
  /// Collective: the same offset on every rank, page-aligned and zeroed. Throws
  /// on every rank when one lacks memory.
  size_t allocate(size_t bytes, double timeout_s);
  /// Not collective: gives this rank's share back; the offset is used again
  /// once all ranks have freed it. `others_still_read`: the memory stays until
  /// then, too.
  void free(size_t offset, bool others_still_read = false);
  std::byte* slab(int rank) const {
    return first_slab_ + layout_.slab_bytes * static_cast<size_t>(rank);
  }

  // --- the state of the group ---
  /// Tells the others that this rank raised; they raise too, quoting the
  /// message.
  void abort(const char* message);
  /// Leaves in good order. Idempotent; later calls throw Failure{kClosed}.
  void close();
  bool is_closed() const { return closed_; }
  /// Whether this process is a child forked from the one that joined; it does
  /// not map the region.
  bool is_forked() const { return fork_generation_ != fork_generation(); }
  void set_activity(const char* text);
  const RankLine& line(int rank) const {
    return lines_[static_cast<size_t>(rank)];
  }
  const CallRecord& current_call() const { return call_; }
  /// Throws unless this process may use the group: not closed, not forked, not
  /// aborted.
  void check_usable() const;
  /// Whether a rank has ended the group: died, given up, raised.
  bool is_over() const {
    return header_->abort.load(std::memory_order_acquire) != 0;
  }
  /// Takes a range of this rank's slab out of the memory that others see. Only
  /// after the end of the group: no array may come to lie there again.
  void keep_to_itself(size_t offset, size_t bytes) {
    region_->keep_to_itself(layout_.slab_at(rank_) + offset, bytes);
  }
  void die_for_test() { keeper_->die(); }

  // --- for the reducer and for transfers ---
  /// Blocks until `ready()`. Sleeps on `word` (whoever makes ready() true
  /// changes it, then wakes it if `sleepers` is not 0). `is_late(r)` tells whom
  /// to blame. Point-to-point traffic goes on meanwhile.
  template <class Ready, class IsLate>
  void wait_until(Atomic<uint32_t>& word, Atomic<uint32_t>& sleepers,
                  int64_t timeout_ns, Ready ready, IsLate is_late);
  /// Negative: that of whoever makes this thread's call, or else the group's.
  int64_t timeout_ns(double timeout_s) const {
    return seconds_to_ns(timeout_s < 0 ? patience().timeout_s : timeout_s);
  }
  /// Held while a collective runs. Messages and the reducer do without: what
  /// they wait for must not depend on a collective that waits for them.
  Turn& turn() { return turn_; }
  Channel& channel(int source, int destination) {
    auto* channels =
        reinterpret_cast<Channel*>(region_->data() + layout_.channels_at());
    return channels[source * world() + destination];
  }
  RankLine& mutable_line(int rank) { return lines_[static_cast<size_t>(rank)]; }
  void reserve_in_slab(size_t offset, size_t bytes) {
    region_->reserve(layout_.slab_at(rank_) + offset, bytes);
  }

 private:
  Patience patience() const {
    if (current_hooks != nullptr && current_hooks->patience != nullptr)
      return *current_hooks->patience;
    return {options_.timeout_s, options_.warn_after_s};
  }
  void attach(const uint64_t nonce[2]);
  void decide_spinning();

  void begin(CallKind kind, size_t count, DType dtype, ReduceOp op, int root,
             double weight, double timeout_s);
  /// Arrives at the gate and waits for everybody. Throws kMismatch on every
  /// rank when calls differ. Returns how the `place`s of all ranks compare.
  Places meet(uint64_t place = 0);
  /// 0 when the pointer is not in this rank's heap; else a number that is equal
  /// at equal offsets.
  uint64_t place_of(const void* data, size_t bytes) const;
  void reduce_everywhere_or_at(int root, void* data, size_t count, DType dtype,
                               ReduceOp op);
  template <class ArrayOf>
  void reduce_chunk(ArrayOf array_of, int root, size_t count, DType dtype,
                    ReduceOp op);
  template <class ArrayOf>
  void reduce_all(ArrayOf array_of, void* out, size_t count, DType dtype,
                  ReduceOp op);
  void reduce_through_pieces(int root, std::byte* data, size_t count,
                             DType dtype, ReduceOp op);
  void reduce_from_pieces(int root, std::byte* data, size_t count, DType dtype,
                          ReduceOp op);
  void gather_everywhere_or_at(int root, const void* in, void* out,
                               size_t bytes);
  const double* weights(double (&storage)[kMaxRanks]) const;
  std::byte* small(int rank) const {
    return slab(rank) + Layout::small_at(call_.number & 1);
  }
  std::byte* piece(int rank, uint64_t step) const {
    return slab(rank) + Layout::piece_at(step & 1);
  }

  [[noreturn]] void fail_from_abort(double waited_s) const;
  [[noreturn]] void fail_deadline(const Failure& so_far);
  void reclaim_blocks();
  void decide_allocation(size_t length);
  void own_block(size_t offset, uint32_t entry);
  std::optional<uint32_t> disown_block(size_t offset);
  void check_reserved(size_t length, const std::optional<Failure>& own) const;

  std::shared_ptr<Region> region_;
  GroupOptions options_;
  Layout layout_{};
  const int rank_;
  const uint32_t fork_generation_;
  Header* header_ = nullptr;
  std::byte* first_slab_ = nullptr;
  std::span<Block> blocks_;
  /// What only rank 0 knows, which decides: the free part of the slabs, and
  /// blocks without an array.
  FreeSpace<> free_space_;
  std::vector<uint32_t> free_blocks_;
  /// Of the arrays that this rank has not freed, by offset. A garbage collector
  /// may free one while another thread allocates.
  std::unordered_map<size_t, uint32_t> own_blocks_;
  std::mutex own_blocks_mutex_;
  std::span<RankLine> lines_;
  std::unique_ptr<Keeper> keeper_;
  std::unique_ptr<Transfers> transfers_;
  Turn turn_;
  CallRecord call_;
  int64_t call_timeout_ns_ = 0;
  /// Counts pieces over all calls, so that the two staging buffers alternate
  /// from call to call too: the last piece of one call may still be read while
  /// the first of the next is written.
  uint64_t step_ = 0;
  int64_t spin_ns_ = 0;
  int yields_ = 0;
  bool has_core_per_rank_ = false;
  static constexpr int64_t kSpinAloneNs = 4000;  ///< then with yields
  Atomic<bool> closed_{false};
};

template <class Ready, class IsLate>
void HostGroup::wait_until(Atomic<uint32_t>& word, Atomic<uint32_t>& sleepers,
                           int64_t timeout_ns, Ready ready, IsLate is_late) {
  if (ready()) return;
  const int64_t start_ns = now_ns();
  if (spin_ns_ > 0) {
    int64_t spun_ns = 0;
    do {
      for (int i = 0; i < 32; ++i) {
        cpu_relax();
        if (ready()) return;
      }
      // The scheduler may have put the late rank on this very core.
      if (spun_ns > kSpinAloneNs) sched_yield();
      spun_ns = now_ns() - start_ns;
    } while (spun_ns < spin_ns_);
  }
  for (int i = 0; i < yields_; ++i) {
    sched_yield();
    if (ready()) return;
  }

  const int64_t deadline_ns = start_ns + timeout_ns;
  int64_t warn_ns = start_ns + seconds_to_ns(patience().warn_after_s);
  RankLine& own = lines_[static_cast<size_t>(rank_)];
  Hooks* const hooks = current_hooks;
  if (hooks != nullptr) hooks->before_block();
  // seq_cst: orders this announcement before the look at `word`; partner: the
  // change of the word before the look at `sleepers` of whoever wakes.
  struct Announced {
    Atomic<uint32_t>& count;
    explicit Announced(Atomic<uint32_t>& c) : count(c) {
      count.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Announced() { count.fetch_sub(1, std::memory_order_seq_cst); }
  } announced(sleepers), at_bell(own.bell_sleepers);

  while (true) {
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    const uint32_t departures =
        header_->departures.load(std::memory_order_seq_cst);
    const uint32_t bell = own.bell.load(std::memory_order_seq_cst);
    transfers_->advance_all();
    if (ready()) return;
    if (closed_) throw Failure{.reason = Reason::kClosed};

    Failure so_far{.reason = Reason::kDeadline};
    so_far.waited_s = static_cast<double>(now_ns() - start_ns) * 1e-9;
    if (header_->abort.load(std::memory_order_acquire) != 0) {
      if (ready()) return;  // what was complete before the end counts
      fail_from_abort(so_far.waited_s);
    }
    for (int r = 0; r < world(); ++r) {
      if (r == rank_ || !is_late(r)) continue;
      so_far.late[r / 64] |= uint64_t{1} << (r % 64);
      if (so_far.culprit < 0) so_far.culprit = r;
      if (line(r).life.load(std::memory_order_acquire) == kLifeLeft) {
        transfers_->advance_all();  // its last message may have come meanwhile
        if (ready()) return;
        abort_group(*header_, Reason::kLeft, rank_, r);
        fail_from_abort(so_far.waited_s);
      }
    }
    const int64_t now = now_ns();
    if (now >= deadline_ns) {
      if (ready()) return;  // it came while we looked whom to blame
      fail_deadline(so_far);
    }
    if (now >= warn_ns) {
      if (hooks != nullptr) hooks->slow(so_far);
      warn_ns = INT64_MAX;
    }
    const FutexWait waits[] = {{&word, seen},
                               {&header_->abort, 0},
                               {&header_->departures, departures},
                               {&own.bell, bell}};
    // A signal that came before the sleep does not end it: look again soon.
    const int64_t wake_ns =
        std::min({deadline_ns, warn_ns, now + kSignalRecheckNs});
    const FutexResult woken = futex_wait_any(waits, wake_ns);
    if (woken != FutexResult::kWoken && hooks != nullptr &&
        hooks->interrupted(woken == FutexResult::kInterrupted)) {
      throw Failure{.reason = Reason::kInterrupted,
                    .waited_s = so_far.waited_s};
    }
  }
}

}  // namespace paceline

// A shared region that is used again for each schedule, and the helpers that
// programs need to take part in one.
#pragma once

#include <string.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/host_group.h"
#include "core/region.h"
#include "core/region_layout.h"
#include "kernel.h"
#include "memory.h"
#include "scheduler.h"
#include "watched_memory.h"

namespace paceline::schedules {

inline constexpr uint64_t kNonce[2] = {11, 22};
/// Of each rank's slab, after the buffers.
inline constexpr size_t kHeapBytes = 40 * 1024;

inline Scheduler& scheduler() { return Scheduler::get(); }

/// `what` is a claim; a schedule in which it is false is a finding.
inline void expect(bool condition, const char* what) {
  if (!condition) [[unlikely]]
    scheduler().fail(what);
}

class World {
 public:
  explicit World(int ranks) : ranks_(ranks) {
    const int file = create_region(
        ranks, kNonce,
        round_up(Layout::outbox_at(ranks) + kHeapBytes, page_bytes()));
    region_ = std::make_shared<Region>(file);
    ::close(file);
    const Layout layout{ranks,
                        reinterpret_cast<Header*>(region_->data())->slab_bytes};
    used_bytes_ = layout.region_bytes();
    region_->reserve(0, used_bytes_);
    set_region(region_->data(), used_bytes_);
    start_.assign(region_->data(), region_->data() + layout.control_bytes());
  }

  /// A new process and a new region: zeros after its header.
  void renew() {
    renew_statics();
    memcpy(region_->data(), start_.data(), start_.size());
    memset(region_->data() + start_.size(), 0, used_bytes_ - start_.size());
    set_region(region_->data(), used_bytes_);
  }
  int ranks() const { return ranks_; }
  bool is_over() const {
    return reinterpret_cast<const Header*>(region_->data())->abort != 0;
  }
  const std::shared_ptr<Region>& region() const { return region_; }

 private:
  int ranks_;
  size_t used_bytes_ = 0;
  std::shared_ptr<Region> region_;
  std::vector<std::byte> start_;
};

/// Makes the attempts here, before the first schedule, that a process makes
/// only once (has the kernel this call?): in a schedule, ranks would wait for
/// each other in a way that processes do not.
void warm_up();

/// The outcome of a rank; outlives its fiber.
struct Outcome {
  bool returned = false;
  int good_backwards = 0;
  Reason reason{};  ///< why it raised; only if has_raised
  bool has_raised = false;
  int late_claims = 0;  ///< of chunks, when the group was over already
};

/// One schedule, as a program sees it.
struct Run {
  World& world;
  uint64_t seed;
  std::vector<Outcome> outcomes;

  /// The same numbers on every rank.
  Random shared_random() const { return Random(seed ^ 0x5eed); }
  Random random_of(int rank) const {
    return Random(seed * 31 + static_cast<uint64_t>(rank));
  }
};

struct Program {
  const char* name;
  int ranks;
  Events events;
  /// The program of one rank. Failures of the core end it, and are noted.
  std::function<void(Run&, int rank)> body;
  /// After all ranks: the finding, or nothing.
  std::function<std::string(const Run&)> judge;
};

/// All programs, in the order in which they run.
std::vector<Program> all_programs();
void add_reducer_programs(std::vector<Program>& programs);
void add_collective_programs(std::vector<Program>& programs);
void add_host_programs(std::vector<Program>& programs);

// --- judges ---
std::string no_rank_raises(const Run& run);
/// All survivors have the same number of good backwards, and no rank continued
/// to reduce a backward that was given up.
std::string all_agree(const Run& run);

}  // namespace paceline::schedules

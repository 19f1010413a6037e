// Groups whose ranks are threads on one mapping of one region.
#pragma once

#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "collectives/host_group.h"
#include "core/region.h"
#include "core/region_layout.h"
#include "ranks.h"

namespace paceline::testing {

/// A region for `size` ranks; each program runs in a separate group on it.
class World {
 public:
  explicit World(int size, GroupOptions options = {.timeout_s = 60})
      : size_(size), options_(options) {
    const int fd = create_region(size, kNonce, slab_bytes(size));
    region_ = std::make_shared<Region>(fd);
    ::close(fd);
  }

  /// Runs `program` on every rank; ends the test if one throws.
  void run(const std::function<void(HostGroup&)>& program) {
    run_ranks(size_, [&](int rank) {
      try {
        HostGroup group(region_, rank, kNonce, options_);
        group.session.join();
        program(group);
      } catch (const Failure& failure) {
        fail(__FILE__, __LINE__,
             "rank " + std::to_string(rank) + " failed: reason " +
                 std::to_string(static_cast<int>(failure.reason)) +
                 ", culprit " + std::to_string(failure.culprit) + ", " +
                 failure.message);
      }
    });
  }

 private:
  static constexpr uint64_t kNonce[2] = {11, 22};
  static size_t slab_bytes(int size) {
    return Layout::outbox_at(size) + (size_t{16} << 20);
  }

  int size_;
  GroupOptions options_;
  std::shared_ptr<Region> region_;
};

/// Runs `program` in a new group of `size` ranks.
inline void run_group(int size, const std::function<void(HostGroup&)>& program,
                      GroupOptions options = {.timeout_s = 60}) {
  World(size, options).run(program);
}

/// The failure that `call` throws; ends the test if it returns.
inline Failure failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Failure& failure) {
    return failure;
  }
  fail(__FILE__, __LINE__, "the call returned, and should have failed");
}

inline bool is_late(const Failure& failure, int rank) {
  return (failure.late[rank / 64] >> (rank % 64) & 1) != 0;
}

}  // namespace paceline::testing

namespace paceline {

inline std::ostream& operator<<(std::ostream& out, Reason reason) {
  return out << static_cast<int>(reason);
}
inline int operator+(Reason reason) { return static_cast<int>(reason); }

}  // namespace paceline

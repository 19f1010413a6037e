// One rank's end of a group whose ranks map the same region, assembled from its
// parts, for the binding and the tests. Code that uses one part includes that
// part alone.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "collectives/calls.h"
#include "collectives/heap.h"
#include "collectives/point_to_point.h"
#include "core/region.h"
#include "core/session.h"

namespace paceline {

struct HostGroup {
  /// Maps the region behind `fd` and takes place `rank` in it. Does not block:
  /// call session.join() next.
  HostGroup(int fd, int rank, const uint64_t nonce[2],
            const GroupOptions& options)
      : HostGroup(std::make_shared<Region>(fd), rank, nonce, options) {}
  /// The same on a mapping that several ranks of one process share: the C++
  /// tests run ranks as threads.
  HostGroup(std::shared_ptr<Region> region, int rank, const uint64_t nonce[2],
            const GroupOptions& options)
      : session(std::move(region), rank, nonce, options) {}

  int rank() const { return session.rank(); }
  int world() const { return session.world(); }

  Session session;
  Calls calls{session};
  Heap heap{calls};
  PointToPoint point_to_point{session};
};

}  // namespace paceline

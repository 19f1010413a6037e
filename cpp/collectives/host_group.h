// One rank's end of a group of ranks that map the same region, put together from
// its parts: what the binding and the tests hold. A user of one part includes
// that part alone.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "collectives/calls.h"
#include "collectives/heap.h"
#include "collectives/messages.h"
#include "core/region.h"
#include "core/session.h"

namespace paceline {

struct HostGroup {
  /// Maps the region behind `fd` and takes place `rank` in it. Does not block:
  /// session.join() comes next.
  HostGroup(int fd, int rank, const uint64_t nonce[2],
            const GroupOptions& options)
      : HostGroup(std::make_shared<Region>(fd), rank, nonce, options) {}
  /// The same on a mapping that several ranks of one process share: ranks as
  /// threads, for the C++ tests.
  HostGroup(std::shared_ptr<Region> region, int rank, const uint64_t nonce[2],
            const GroupOptions& options)
      : session(std::move(region), rank, nonce, options) {}

  int rank() const { return session.rank(); }
  int world() const { return session.world(); }

  Session session;
  Calls calls{session};
  Heap heap{calls};
  Messages messages{session};
};

}  // namespace paceline

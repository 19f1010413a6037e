// broadcast and scatter: one rank's data goes out. The steps and bytes are at
// the head of broadcast.cc.
#pragma once

#include <cstddef>

#include "collectives/calls.h"

namespace paceline {

/// Replaces `data` on every rank by the `data` of `root`.
void broadcast(Calls& calls, void* data, size_t bytes, int root,
               double timeout_s);
/// Copies block r of `in` on `root`, which is `bytes` long, to `out` of rank r.
void scatter(Calls& calls, const void* in, void* out, size_t bytes, int root,
             double timeout_s);

}  // namespace paceline

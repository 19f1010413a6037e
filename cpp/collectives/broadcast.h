// broadcast and scatter: the data of one rank goes to all others. The steps and
// byte counts are at the top of broadcast.cc.
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

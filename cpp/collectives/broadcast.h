// broadcast and scatter: one rank's data goes out.
#pragma once

#include <cstddef>

#include "collectives/calls.h"

namespace paceline {

/// Everybody's `data` becomes that of `root`.
void broadcast(Calls& calls, void* data, size_t bytes, int root,
               double timeout_s);
/// Block r of `in` on `root`, `bytes` long, goes to `out` of rank r.
void scatter(Calls& calls, const void* in, void* out, size_t bytes, int root,
             double timeout_s);

}  // namespace paceline

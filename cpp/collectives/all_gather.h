// all_gather and gather: everybody's bytes, in rank order.
#pragma once

#include <cstddef>

#include "collectives/calls.h"

namespace paceline {

/// `out` holds one block of `bytes` per rank.
void all_gather(Calls& calls, const void* in, void* out, size_t bytes,
                double timeout_s);
/// The same on `root` alone.
void gather(Calls& calls, const void* in, void* out, size_t bytes, int root,
            double timeout_s);

}  // namespace paceline

// all_gather and gather: everybody's bytes, in rank order. The steps and bytes
// are at the head of all_gather.cc.
#pragma once

#include <cstddef>

#include "collectives/calls.h"

namespace paceline {

/// Copies `in` of every rank to `out`, which holds one block of `bytes` per
/// rank.
void all_gather(Calls& calls, const void* in, void* out, size_t bytes,
                double timeout_s);
/// Does the same on `root` alone.
void gather(Calls& calls, const void* in, void* out, size_t bytes, int root,
            double timeout_s);

}  // namespace paceline

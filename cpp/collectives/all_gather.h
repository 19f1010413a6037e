// all_gather, all_gather_pieces and gather: the bytes of all ranks, in rank
// order. The steps and byte counts are at the top of all_gather.cc.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collectives/calls.h"

namespace paceline {

/// Copies `in` of every rank to `out`, which holds one block of `bytes` per
/// rank.
void all_gather(Calls& calls, const void* in, void* out, size_t bytes,
                double timeout_s);
/// Copies the bytes that rank r owns to the same bytes on all other ranks.
/// `blocks[r]` lists them as spans of this rank's memory, in the same number
/// and of the same sizes on every rank.
void all_gather_pieces(
    Calls& calls, const std::vector<std::vector<std::span<std::byte>>>& blocks,
    double timeout_s);
/// Does the same as all_gather on `root` alone.
void gather(Calls& calls, const void* in, void* out, size_t bytes, int root,
            double timeout_s);

}  // namespace paceline

// all_to_all: different bytes from every rank to every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "collectives/calls.h"

namespace paceline {

/// in_bytes[r] bytes go to rank r, and out_bytes[r] come from it; both arrays
/// are contiguous in rank order. Throws kMismatch on every rank if a pair
/// disagrees.
void all_to_all(Calls& calls, const void* in,
                std::span<const uint64_t> in_bytes, void* out,
                std::span<const uint64_t> out_bytes, double timeout_s);

}  // namespace paceline

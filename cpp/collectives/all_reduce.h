// all_reduce and reduce: the arrays of all ranks, reduced element by element.
#pragma once

#include <cstddef>

#include "collectives/calls.h"
#include "core/sizes.h"
#include "kernels/kernels.h"

namespace paceline {

/// Up to this size, every rank reduces the whole array by itself.
inline constexpr size_t kSmallSumBytes = 4 * 1024 / kSmaller;

/// Replaces the array on every rank by the reduction over all ranks. An array
/// in the region is reduced in place; any other is copied through the region.
void all_reduce(Calls& calls, void* data, size_t count, DType dtype,
                ReduceOp op, double weight, double timeout_s);
/// The same, but only `root` gets the result.
void reduce(Calls& calls, void* data, size_t count, DType dtype, ReduceOp op,
            int root, double timeout_s);

}  // namespace paceline

// all_reduce and reduce: everybody's array, element by element over the ranks.
#pragma once

#include <cstddef>

#include "collectives/calls.h"
#include "core/sizes.h"
#include "kernels/kernels.h"

namespace paceline {

/// Up to this every rank reduces all of an array by itself.
inline constexpr size_t kSmallSumBytes = 4 * 1024 / kSmaller;

/// Replaces the array on every rank by the reduction over all ranks. An array in
/// the region is used where it is, another is copied through it.
void all_reduce(Calls& calls, void* data, size_t count, DType dtype,
                ReduceOp op, double weight, double timeout_s);
/// The same on `root` alone.
void reduce(Calls& calls, void* data, size_t count, DType dtype, ReduceOp op,
            int root, double timeout_s);

}  // namespace paceline

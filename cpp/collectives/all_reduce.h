// all_reduce and reduce: everybody's array, element by element over the ranks.
#pragma once

#include <cstddef>

#include "collectives/calls.h"
#include "kernels/kernels.h"

namespace paceline {

/// Replaces the array on every rank by the reduction over all ranks. An array in
/// the region is used where it is, another is copied through it.
void all_reduce(Calls& calls, void* data, size_t count, DType dtype,
                ReduceOp op, double weight, double timeout_s);
/// The same on `root` alone.
void reduce(Calls& calls, void* data, size_t count, DType dtype, ReduceOp op,
            int root, double timeout_s);

}  // namespace paceline

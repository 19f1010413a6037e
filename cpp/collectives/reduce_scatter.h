// reduce_scatter: rank r gets the reduction of all ranks' blocks r.
#pragma once

#include <cstddef>

#include "collectives/calls.h"
#include "kernels/kernels.h"

namespace paceline {

/// `in` holds one block of `count` elements per rank, `out` is one block.
void reduce_scatter(Calls& calls, const void* in, void* out, size_t count,
                    DType dtype, ReduceOp op, double timeout_s);

}  // namespace paceline

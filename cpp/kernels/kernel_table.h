// Declarations shared by the dispatcher (kernels.cc) and the compiled sets of
// loops (kernels_*.cc).
//
// Only plain data and declarations: a function defined here would be compiled
// for several instruction sets, and the linker might keep the one that this
// processor cannot run.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"

namespace paceline {

inline constexpr int kNumDTypes = 10;
inline constexpr int kNumOps = 5;
inline constexpr int kNumFloats = 4;  ///< the first ones of DType

/// The arguments of reduce(), sum_weighted(), mean_of_sums() and
/// weighted_mean(), checked, and not null where a loop reads them.
struct Request {
  const void* const* inputs;
  int num_inputs;
  void* const* outputs;
  int num_outputs;
  size_t count;
  const double* weights;  ///< null: all 1
  double total_weight;    ///< of a mean; num_inputs when `weights` is null
  ReduceStats* stats;     ///< null, or already zero
  bool stops_at_nonfinite = false;  ///< only with `stats`
};

/// Returns the number of elements written.
using ReduceFunction = size_t (*)(const Request& request);

/// One instruction set's loops; null where the type has no such op.
struct KernelTable {
  ReduceFunction reduce[kNumDTypes][kNumOps];
  ReduceFunction sum_weighted[kNumFloats];
  ReduceFunction mean_of_sums[kNumFloats];
  ReduceFunction weighted_mean[kNumFloats];
};

namespace portable {
extern const KernelTable kKernels;
}
namespace avx2 {
extern const KernelTable kKernels;
}
namespace avx512 {
extern const KernelTable kKernels;
}
namespace neon {
extern const KernelTable kKernels;
}

}  // namespace paceline

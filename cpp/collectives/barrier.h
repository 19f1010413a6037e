// barrier: no rank returns before all ranks have called it.
//
// Steps: one barrier. Bytes: one line, the gate's.
#pragma once

#include "collectives/calls.h"

namespace paceline {

inline void barrier(Calls& calls, double timeout_s) {
  calls.begin(CallKind::kBarrier, 0, DType::kUInt8, ReduceOp::kSum, 0, 1,
              timeout_s);
  calls.barrier();
}

}  // namespace paceline

// reduce_scatter: every rank holds N blocks of `count` elements; rank r gets
// the reduction of block r of all ranks.
//
// Words: N ranks. A block has B bytes, so an array has N * B. A piece is the part
// of a block that fits a slot of a staging buffer.
//
// Small (N * B <= kSmallBytes), one barrier:
//   1. copy own array to own small buffer;
//   2. barrier;
//   3. rank r reduces block r of every rank's small buffer to `out`.
//
// In the region, two barriers and no copy:
//   1. barrier;
//   2. rank r reduces block r of every rank's array to `out`;
//   3. barrier: no rank may overwrite what another rank still reads.
//
// Any other array, through two staging buffers, each divided into N slots, one
// per block. One barrier for each piece k of a block:
//   copy piece k of each block to the block's slot;  barrier;
//   rank r reduces slot r of every rank's staging buffer to piece k of `out`, and
//   writes the result to these slots as well: see all_reduce.cc.
//   Two buffers are enough: see all_reduce.cc.
//
// Bytes per rank: N * B are copied in (none in the region); N * B are read to
// reduce them, of which (N - 1) * B come from other ranks; B are written.
#include "collectives/reduce_scatter.h"

#include <string.h>

#include <algorithm>

#include "core/faults.h"

namespace paceline {

void reduce_scatter(Calls& calls, const void* in, void* out, size_t count,
                    DType dtype, ReduceOp op, double timeout_s) {
  calls.begin(CallKind::kReduceScatter, count, dtype, op, 0, 1, timeout_s);
  const size_t size = dtype_bytes(dtype);
  const size_t block_bytes = count * size;
  const auto ranks = static_cast<size_t>(calls.world());
  const auto* blocks = static_cast<const std::byte*>(in);
  const void* inputs[kMaxRanks];
  const auto reduce_to = [&](void* const* outputs, int number,
                             size_t elements) {
    fault_point(Point::kBeforeReduce);
    paceline::reduce(dtype, op, inputs, calls.world(), outputs, number,
                     elements, nullptr, nullptr);
    fault_point(Point::kAfterReduce);
  };
  if (block_bytes * ranks <= kSmallBytes) {
    memcpy(calls.small(calls.rank()), blocks, block_bytes * ranks);
    calls.barrier();
    for (int r = 0; r < calls.world(); ++r)
      inputs[r] =
          calls.small(r) + block_bytes * static_cast<size_t>(calls.rank());
    reduce_to(&out, 1, count);
    return;
  }
  const uint64_t place = calls.place_of(in, block_bytes * ranks);
  if (calls.barrier(place) == Places::kInRegion) {
    for (int r = 0; r < calls.world(); ++r)
      inputs[r] = calls.slab(r) + place +
                  block_bytes * static_cast<size_t>(calls.rank());
    // `out` may be within `in`; no other rank reads this rank's block there.
    reduce_to(&out, 1, count);
    calls.barrier();
    return;
  }
  const size_t slot_bytes =
      kPieceBytes / ranks / kLinePairBytes * kLinePairBytes;
  const size_t slot_count = slot_bytes / size;
  for (size_t begin = 0; begin < count;
       begin += slot_count, calls.next_piece()) {
    const size_t elements = std::min(slot_count, count - begin);
    for (size_t r = 0; r < ranks; ++r) {
      memcpy(calls.piece(calls.rank()) + r * slot_bytes,
             blocks + r * block_bytes + begin * size, elements * size);
    }
    calls.barrier();
    void* outputs[kMaxRanks + 1];
    for (int r = 0; r < calls.world(); ++r) {
      outputs[r] =
          calls.piece(r) + slot_bytes * static_cast<size_t>(calls.rank());
      inputs[r] = outputs[r];
    }
    outputs[calls.world()] = static_cast<std::byte*>(out) + begin * size;
    reduce_to(outputs, calls.world() + 1, elements);
  }
}

}  // namespace paceline

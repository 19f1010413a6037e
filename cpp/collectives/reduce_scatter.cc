// reduce_scatter: every rank holds N blocks of `count` elements; rank r gets
// the reduction of everybody's block r.
//
// Small: as all_reduce, one synchronisation. In the region: meet, each rank
// reads block r of everybody's array, meet (nobody may overwrite what another
// still reads). Else in pieces: a staging buffer is divided into one slot per
// destination; step k: copy the k-th part of each block to its slot, meet,
// reduce own slot. With two buffers, one synchronisation a step is enough (see
// all_reduce.cc).
#include <string.h>

#include "collectives/host_group.h"

namespace paceline {

void HostGroup::reduce_scatter(const void* in, void* out, size_t count,
                               DType dtype, ReduceOp op, double timeout_s) {
  begin(CallKind::kReduceScatter, count, dtype, op, 0, 1, timeout_s);
  const size_t size = dtype_bytes(dtype);
  const size_t block_bytes = count * size;
  const auto ranks = static_cast<size_t>(world());
  const auto* blocks = static_cast<const std::byte*>(in);
  const void* inputs[kMaxRanks];
  const auto reduce_to = [&](void* to, size_t elements) {
    fault_point(Point::kBeforeReduce);
    paceline::reduce(dtype, op, inputs, world(), &to, 1, elements, nullptr,
                     nullptr);
    fault_point(Point::kAfterReduce);
  };
  if (block_bytes * ranks <= kSmallBytes) {
    memcpy(small(rank_), blocks, block_bytes * ranks);
    meet();
    for (int r = 0; r < world(); ++r)
      inputs[r] = small(r) + block_bytes * static_cast<size_t>(rank_);
    reduce_to(out, count);
    return;
  }
  const uint64_t place = place_of(in, block_bytes * ranks);
  if (meet(place) == Places::kInRegion) {
    for (int r = 0; r < world(); ++r)
      inputs[r] = slab(r) + place + block_bytes * static_cast<size_t>(rank_);
    // `out` may be a part of `in`; nobody else reads this rank's block there.
    reduce_to(out, count);
    meet();
    return;
  }
  const size_t slot_bytes =
      kPieceBytes / ranks / kLinePairBytes * kLinePairBytes;
  const size_t slot_count = slot_bytes / size;
  for (size_t begin = 0; begin < count; begin += slot_count, ++step_) {
    const size_t elements = std::min(slot_count, count - begin);
    for (size_t r = 0; r < ranks; ++r) {
      memcpy(piece(rank_, step_) + r * slot_bytes,
             blocks + r * block_bytes + begin * size, elements * size);
    }
    meet();
    for (int r = 0; r < world(); ++r)
      inputs[r] = piece(r, step_) + slot_bytes * static_cast<size_t>(rank_);
    reduce_to(static_cast<std::byte*>(out) + begin * size, elements);
  }
}

}  // namespace paceline

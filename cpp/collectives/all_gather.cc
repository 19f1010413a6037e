// all_gather and gather: everybody's bytes, in rank order, on every rank or on
// one.
#include <string.h>

#include "collectives/host_group.h"

namespace paceline {

void HostGroup::all_gather(const void* in, void* out, size_t bytes,
                           double timeout_s) {
  begin(CallKind::kAllGather, bytes, DType::kUInt8, ReduceOp::kSum, 0, 1,
        timeout_s);
  gather_everywhere_or_at(-1, in, out, bytes);
}

void HostGroup::gather(const void* in, void* out, size_t bytes, int root,
                       double timeout_s) {
  begin(CallKind::kGather, bytes, DType::kUInt8, ReduceOp::kSum, root, 1,
        timeout_s);
  gather_everywhere_or_at(root, in, out, bytes);
}

void HostGroup::gather_everywhere_or_at(int root, const void* in, void* out,
                                        size_t bytes) {
  const bool receives = root < 0 || root == rank_;
  const auto copy_all = [&](auto block_of, size_t begin, size_t length) {
    fault_point(Point::kCopyOut);
    if (!receives) return;
    for (int r = 0; r < world(); ++r) {
      std::byte* to =
          static_cast<std::byte*>(out) + bytes * static_cast<size_t>(r) + begin;
      const std::byte* from = block_of(r);
      if (to != from) memcpy(to, from, length);
    }
  };
  if (bytes <= kSmallBytes) {
    memcpy(small(rank_), in, bytes);
    meet();
    copy_all([&](int r) { return small(r); }, 0, bytes);
    return;
  }
  const uint64_t place = place_of(in, bytes);
  if (meet(place) == Places::kInRegion) {
    copy_all([&](int r) { return slab(r) + place; }, 0, bytes);
    meet();
    return;
  }
  const auto* at = static_cast<const std::byte*>(in);
  for (size_t begin = 0; begin < bytes; begin += kPieceBytes, ++step_) {
    const size_t length = std::min(kPieceBytes, bytes - begin);
    memcpy(piece(rank_, step_), at + begin, length);
    meet();
    copy_all([&](int r) { return piece(r, step_); }, begin, length);
  }
}

}  // namespace paceline

// broadcast and scatter: one rank's data goes out.
//
// broadcast in pieces: the root copies piece k to its staging buffer, all meet,
// the others copy it out. With two buffers the root may be one piece ahead, so
// one synchronisation a piece is enough.
#include <string.h>

#include "collectives/host_group.h"

namespace paceline {

void HostGroup::broadcast(void* data, size_t bytes, int root,
                          double timeout_s) {
  begin(CallKind::kBroadcast, bytes, DType::kUInt8, ReduceOp::kSum, root, 1,
        timeout_s);
  const bool is_root = rank_ == root;
  if (bytes <= kSmallBytes) {
    if (is_root) memcpy(small(root), data, bytes);
    meet();
    if (!is_root) memcpy(data, small(root), bytes);
    return;
  }
  const uint64_t place = place_of(data, bytes);
  if (meet(place) == Places::kInRegion) {
    fault_point(Point::kCopyOut);
    if (!is_root) memcpy(data, slab(root) + place, bytes);
    meet();
    return;
  }
  auto* at = static_cast<std::byte*>(data);
  for (size_t begin = 0; begin < bytes; begin += kPieceBytes, ++step_) {
    const size_t length = std::min(kPieceBytes, bytes - begin);
    if (is_root) memcpy(piece(root, step_), at + begin, length);
    meet();
    fault_point(Point::kCopyOut);
    if (!is_root) memcpy(at + begin, piece(root, step_), length);
  }
}

void HostGroup::scatter(const void* in, void* out, size_t bytes, int root,
                        double timeout_s) {
  begin(CallKind::kScatter, bytes, DType::kUInt8, ReduceOp::kSum, root, 1,
        timeout_s);
  meet();  // compares the calls before any staging buffer is touched
  const auto ranks = static_cast<size_t>(world());
  const auto* blocks = static_cast<const std::byte*>(in);
  const size_t slot_bytes =
      kPieceBytes / ranks / kLinePairBytes * kLinePairBytes;
  for (size_t begin = 0; begin < bytes; begin += slot_bytes, ++step_) {
    const size_t length = std::min(slot_bytes, bytes - begin);
    if (rank_ == root) {
      for (size_t r = 0; r < ranks; ++r) {
        memcpy(piece(root, step_) + r * slot_bytes, blocks + r * bytes + begin,
               length);
      }
    }
    meet();
    fault_point(Point::kCopyOut);
    memcpy(static_cast<std::byte*>(out) + begin,
           piece(root, step_) + slot_bytes * static_cast<size_t>(rank_),
           length);
  }
}

}  // namespace paceline

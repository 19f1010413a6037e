// broadcast and scatter: one rank's data goes out.
//
// broadcast in pieces: the root copies piece k to its staging buffer, all meet,
// the others copy it out. With two buffers the root may be one piece ahead, so
// one synchronisation a piece is enough.
#include "collectives/broadcast.h"

#include <string.h>

#include <algorithm>

#include "core/faults.h"

namespace paceline {

void broadcast(Calls& calls, void* data, size_t bytes, int root,
               double timeout_s) {
  calls.begin(CallKind::kBroadcast, bytes, DType::kUInt8, ReduceOp::kSum, root,
              1, timeout_s);
  const bool is_root = calls.rank() == root;
  if (bytes <= kSmallBytes) {
    if (is_root) memcpy(calls.small(root), data, bytes);
    calls.meet();
    if (!is_root) memcpy(data, calls.small(root), bytes);
    return;
  }
  const uint64_t place = calls.place_of(data, bytes);
  if (calls.meet(place) == Places::kInRegion) {
    fault_point(Point::kCopyOut);
    if (!is_root) memcpy(data, calls.slab(root) + place, bytes);
    calls.meet();
    return;
  }
  auto* at = static_cast<std::byte*>(data);
  for (size_t begin = 0; begin < bytes;
       begin += kPieceBytes, calls.next_piece()) {
    const size_t length = std::min(kPieceBytes, bytes - begin);
    if (is_root) memcpy(calls.piece(root), at + begin, length);
    calls.meet();
    fault_point(Point::kCopyOut);
    if (!is_root) memcpy(at + begin, calls.piece(root), length);
  }
}

void scatter(Calls& calls, const void* in, void* out, size_t bytes, int root,
             double timeout_s) {
  calls.begin(CallKind::kScatter, bytes, DType::kUInt8, ReduceOp::kSum, root, 1,
              timeout_s);
  calls.meet();  // compares the calls before any staging buffer is touched
  const auto ranks = static_cast<size_t>(calls.world());
  const auto* blocks = static_cast<const std::byte*>(in);
  const size_t slot_bytes =
      kPieceBytes / ranks / kLinePairBytes * kLinePairBytes;
  for (size_t begin = 0; begin < bytes;
       begin += slot_bytes, calls.next_piece()) {
    const size_t length = std::min(slot_bytes, bytes - begin);
    if (calls.rank() == root) {
      for (size_t r = 0; r < ranks; ++r) {
        memcpy(calls.piece(root) + r * slot_bytes, blocks + r * bytes + begin,
               length);
      }
    }
    calls.meet();
    fault_point(Point::kCopyOut);
    memcpy(static_cast<std::byte*>(out) + begin,
           calls.piece(root) + slot_bytes * static_cast<size_t>(calls.rank()),
           length);
  }
}

}  // namespace paceline

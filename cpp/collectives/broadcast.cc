// broadcast and scatter: the data of one rank goes to all others.
//
// Words: N ranks. B is the number of bytes that each rank has in the end: the
// whole array in broadcast, one block in scatter. A piece is what fits a staging
// buffer (kPieceBytes).
//
// broadcast, small (B <= kSmallBytes), one barrier:
//   1. the root copies its data to its small buffer;
//   2. barrier;
//   3. every other rank copies the root's small buffer out.
//
// broadcast in the region, two barriers:
//   1. barrier;
//   2. every other rank copies the root's array from the region;
//   3. barrier: the root may not overwrite what another rank still reads.
//
// broadcast of any other array, piece by piece through the root's two staging
// buffers, one barrier per piece. For each piece k:
//   the root copies piece k in;  barrier;
//   every other rank copies piece k out.
//   With two buffers the root may be one piece ahead.
//
// Bytes per rank in broadcast: the root copies B in (none in the region), and
// every other rank copies B out.
//
// scatter uses staging buffers for every size and wherever the arrays are. A
// staging buffer of the root is divided into N slots, one per rank:
//   1. barrier, which compares the calls before a staging buffer is written;
//   2. for each piece k of a block, as long as a slot:
//        the root copies piece k of every block to the block's slot;  barrier;
//        every rank copies its slot out.
//
// Bytes per rank in scatter: the root copies N * B in, and every rank, including
// the root, copies B out.
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
    calls.barrier();
    if (!is_root) memcpy(data, calls.small(root), bytes);
    return;
  }
  const uint64_t place = calls.place_of(data, bytes);
  if (calls.barrier(place) == Places::kInRegion) {
    fault_point(Point::kCopyOut);
    if (!is_root) memcpy(data, calls.slab(root) + place, bytes);
    calls.barrier();
    return;
  }
  auto* at = static_cast<std::byte*>(data);
  for (size_t begin = 0; begin < bytes;
       begin += kPieceBytes, calls.next_piece()) {
    const size_t length = std::min(kPieceBytes, bytes - begin);
    if (is_root) memcpy(calls.piece(root), at + begin, length);
    calls.barrier();
    fault_point(Point::kCopyOut);
    if (!is_root) memcpy(at + begin, calls.piece(root), length);
  }
}

void scatter(Calls& calls, const void* in, void* out, size_t bytes, int root,
             double timeout_s) {
  calls.begin(CallKind::kScatter, bytes, DType::kUInt8, ReduceOp::kSum, root, 1,
              timeout_s);
  calls.barrier();  // compares the calls before any staging buffer is written
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
    calls.barrier();
    fault_point(Point::kCopyOut);
    memcpy(static_cast<std::byte*>(out) + begin,
           calls.piece(root) + slot_bytes * static_cast<size_t>(calls.rank()),
           length);
  }
}

}  // namespace paceline

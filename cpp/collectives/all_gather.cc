// all_gather and gather: everybody's bytes, in rank order, on every rank or on
// one.
//
// Words: N ranks, each with a block of B bytes. The receivers are all ranks in
// all_gather, and the root in gather.
//
// Small (B <= kSmallBytes), one synchronisation:
//   1. copy own block to own small buffer;
//   2. meet;
//   3. each receiver copies all N small buffers to `out`.
//
// In the region, two synchronisations:
//   1. meet;
//   2. each receiver copies everybody's block from where it lies to `out`; its
//      own block is skipped if it lies there already;
//   3. meet: nobody may overwrite a block that another rank still reads.
//
// Any other array, in pieces of kPieceBytes through two staging buffers, one
// synchronisation a piece. For each piece k:
//   copy piece k in;  meet;
//   each receiver copies everybody's piece k to its place in `out`.
//   Two buffers are enough: see all_reduce.cc.
//
// Bytes per rank: B are copied in (none in the region), and a receiver copies
// N * B out, of which (N - 1) * B come from other ranks.
#include "collectives/all_gather.h"

#include <string.h>

#include <algorithm>

#include "core/faults.h"

namespace paceline {
namespace {

void gather_everywhere_or_at(Calls& calls, int root, const void* in, void* out,
                             size_t bytes) {
  const bool receives = root < 0 || root == calls.rank();
  const auto copy_all = [&](auto block_of, size_t begin, size_t length) {
    fault_point(Point::kCopyOut);
    if (!receives) return;
    for (int r = 0; r < calls.world(); ++r) {
      std::byte* to =
          static_cast<std::byte*>(out) + bytes * static_cast<size_t>(r) + begin;
      const std::byte* from = block_of(r);
      if (to != from) memcpy(to, from, length);
    }
  };
  if (bytes <= kSmallBytes) {
    memcpy(calls.small(calls.rank()), in, bytes);
    calls.meet();
    copy_all([&](int r) { return calls.small(r); }, 0, bytes);
    return;
  }
  const uint64_t place = calls.place_of(in, bytes);
  if (calls.meet(place) == Places::kInRegion) {
    copy_all([&](int r) { return calls.slab(r) + place; }, 0, bytes);
    calls.meet();
    return;
  }
  const auto* at = static_cast<const std::byte*>(in);
  for (size_t begin = 0; begin < bytes;
       begin += kPieceBytes, calls.next_piece()) {
    const size_t length = std::min(kPieceBytes, bytes - begin);
    memcpy(calls.piece(calls.rank()), at + begin, length);
    calls.meet();
    copy_all([&](int r) { return calls.piece(r); }, begin, length);
  }
}

}  // namespace

void all_gather(Calls& calls, const void* in, void* out, size_t bytes,
                double timeout_s) {
  calls.begin(CallKind::kAllGather, bytes, DType::kUInt8, ReduceOp::kSum, 0, 1,
              timeout_s);
  gather_everywhere_or_at(calls, -1, in, out, bytes);
}

void gather(Calls& calls, const void* in, void* out, size_t bytes, int root,
            double timeout_s) {
  calls.begin(CallKind::kGather, bytes, DType::kUInt8, ReduceOp::kSum, root, 1,
              timeout_s);
  gather_everywhere_or_at(calls, root, in, out, bytes);
}

}  // namespace paceline

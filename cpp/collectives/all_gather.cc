// all_gather and gather: the bytes of all ranks, in rank order, on every rank
// or on one. all_gather_pieces: the same, in place, for blocks that consist of
// many spans.
//
// Words: N ranks, each with a block of B bytes. The receivers are all ranks in
// all_gather, and the root in gather. A piece is the kPieceBytes of a block
// that fit a staging buffer.
//
// Small (B <= kSmallBytes), one barrier:
//   1. copy own block to own small buffer;
//   2. barrier;
//   3. each receiver copies all N small buffers to `out`.
//
// In the region, two barriers:
//   1. barrier;
//   2. each receiver copies every rank's block from the region to `out`; it skips
//      its own block if that is already there;
//   3. barrier: no rank may overwrite a block that another rank still reads.
//
// Any other array, piece by piece through two staging buffers, one barrier per
// piece. For each piece k:
//   copy piece k in;  barrier;
//   each receiver copies every rank's piece k to its place in `out`.
//   Two buffers are enough: see all_reduce.cc.
//
// Bytes per rank: B are copied in (none in the region), and a receiver copies
// N * B out, of which (N - 1) * B come from other ranks.
//
// all_gather_pieces uses the two staging buffers for every size and wherever the
// spans are, with one barrier per piece of the longest block. For each piece k of
// the longest block:
//   copy piece k of own block in;  barrier;
//   copy every other rank's piece k to its spans.
//   A small span costs a memcpy and no barrier.
//
// Bytes per rank: its own block is copied in, all others are copied out.
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
    calls.barrier();
    copy_all([&](int r) { return calls.small(r); }, 0, bytes);
    return;
  }
  const uint64_t place = calls.place_of(in, bytes);
  if (calls.barrier(place) == Places::kInRegion) {
    copy_all([&](int r) { return calls.slab(r) + place; }, 0, bytes);
    calls.barrier();
    return;
  }
  const auto* at = static_cast<const std::byte*>(in);
  for (size_t begin = 0; begin < bytes;
       begin += kPieceBytes, calls.next_piece()) {
    const size_t length = std::min(kPieceBytes, bytes - begin);
    memcpy(calls.piece(calls.rank()), at + begin, length);
    calls.barrier();
    copy_all([&](int r) { return calls.piece(r); }, begin, length);
  }
}

/// A position in a block, which moves forward.
class Cursor {
 public:
  explicit Cursor(const std::vector<std::span<std::byte>>& block)
      : block_(block) {}

  /// Calls `copy(at, offset, length)` for each span, or part of one, in the
  /// next `bytes` bytes at most.
  template <class Copy>
  void advance(size_t bytes, Copy copy) {
    size_t done = 0;
    while (done < bytes && piece_ < block_.size()) {
      const std::span<std::byte> rest = block_[piece_].subspan(used_);
      const size_t length = std::min(rest.size(), bytes - done);
      if (length > 0) copy(rest.data(), done, length);
      done += length;
      used_ += length;
      if (length == rest.size()) {
        ++piece_;
        used_ = 0;
      }
    }
  }

 private:
  const std::vector<std::span<std::byte>>& block_;
  size_t piece_ = 0;
  size_t used_ = 0;  ///< bytes of this span that are done
};

}  // namespace

void all_gather_pieces(
    Calls& calls, const std::vector<std::vector<std::span<std::byte>>>& blocks,
    double timeout_s) {
  size_t total = 0, longest = 0;
  std::vector<Cursor> cursors;
  for (const auto& block : blocks) {
    size_t bytes = 0;
    for (const auto& piece : block) bytes += piece.size();
    total += bytes;
    longest = std::max(longest, bytes);
    cursors.emplace_back(block);
  }
  calls.begin(CallKind::kAllGather, total, DType::kUInt8, ReduceOp::kSum, 0, 1,
              timeout_s);
  size_t begin = 0;
  do {  // at least once: a rank without bytes waits for the others, too
    std::byte* const own = calls.piece(calls.rank());
    cursors[static_cast<size_t>(calls.rank())].advance(
        kPieceBytes, [&](std::byte* at, size_t offset, size_t length) {
          memcpy(own + offset, at, length);
        });
    calls.barrier();
    fault_point(Point::kCopyOut);
    for (int r = 0; r < calls.world(); ++r) {
      if (r == calls.rank()) continue;
      const std::byte* const from = calls.piece(r);
      cursors[static_cast<size_t>(r)].advance(
          kPieceBytes, [&](std::byte* at, size_t offset, size_t length) {
            memcpy(at, from + offset, length);
          });
    }
    calls.next_piece();
    begin += kPieceBytes;
  } while (begin < longest);
}

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

// all_to_all: rank s sends in_bytes[d] bytes to rank d, which may differ for
// every pair.
//
// Words: N ranks. Rank r sends S bytes in all and receives R, including what it
// sends to itself. M is the longest message of any pair. Each staging buffer is
// divided into N slots, one per destination, of some kPieceBytes / N bytes. A
// piece is the part of a message that fits a slot.
//
// The steps are the same for every size, and wherever the arrays are:
//   1. each rank writes to its small buffer how much it sends to each rank and
//      expects from each;
//   2. barrier;
//   3. every rank reads all small buffers, so all know M, and all fail alike if a
//      pair disagrees;
//   4. for each piece k of the messages, until M is reached:
//        copy piece k of the message to each rank to that rank's slot;  barrier;
//        copy the own slot out of every rank's staging buffer.
//   Two buffers are enough: see all_reduce.cc.
//
// Barriers: one, and one for each piece.
// Bytes per rank: S are copied in and R out. Besides, each rank writes 2 * N
// sizes and reads 2 * N * N.
#include "collectives/all_to_all.h"

#include <string.h>

#include <algorithm>
#include <string>

#include "core/failure.h"
#include "core/faults.h"

namespace paceline {
namespace {

/// The content of each rank's small buffer.
struct Sizes {
  uint64_t sends[kMaxRanks];
  uint64_t expects[kMaxRanks];
};
static_assert(sizeof(Sizes) <= kSmallBytes);

}  // namespace

void all_to_all(Calls& calls, const void* in,
                std::span<const uint64_t> in_bytes, void* out,
                std::span<const uint64_t> out_bytes, double timeout_s) {
  const auto ranks = static_cast<size_t>(calls.world());
  if (in_bytes.size() != ranks || out_bytes.size() != ranks) {
    misuse("all_to_all needs one size per rank, for sending and for receiving");
  }
  calls.begin(CallKind::kAllToAll, 0, DType::kUInt8, ReduceOp::kSum, 0, 1,
              timeout_s);
  const auto sizes_of = [&](size_t r) {
    return reinterpret_cast<Sizes*>(calls.small(static_cast<int>(r)));
  };
  const auto me = static_cast<size_t>(calls.rank());
  std::copy(in_bytes.begin(), in_bytes.end(), sizes_of(me)->sends);
  std::copy(out_bytes.begin(), out_bytes.end(), sizes_of(me)->expects);
  calls.barrier();
  uint64_t most = 0;
  for (size_t source = 0; source < ranks; ++source) {
    for (size_t to = 0; to < ranks; ++to) {
      const uint64_t sent = sizes_of(source)->sends[to];
      const uint64_t expected = sizes_of(to)->expects[source];
      most = std::max(most, sent);
      if (sent == expected) continue;
      throw Failure{.reason = Reason::kMismatch,
                    .culprit = static_cast<int>(source),
                    .message = "all_to_all: rank " + std::to_string(source) +
                               " sends " + std::to_string(sent) +
                               " bytes to rank " + std::to_string(to) +
                               ", which expects " + std::to_string(expected)};
    }
  }

  const size_t slot_bytes =
      kPieceBytes / ranks / kLinePairBytes * kLinePairBytes;
  for (size_t begin = 0; begin < most;
       begin += slot_bytes, calls.next_piece()) {
    const auto part = [&](uint64_t total) {
      return begin < total ? std::min<size_t>(slot_bytes, total - begin) : 0;
    };
    size_t at = 0;
    for (size_t r = 0; r < ranks; at += in_bytes[r], ++r) {
      if (part(in_bytes[r]) == 0) continue;
      memcpy(calls.piece(calls.rank()) + r * slot_bytes,
             static_cast<const std::byte*>(in) + at + begin, part(in_bytes[r]));
    }
    calls.barrier();
    fault_point(Point::kCopyOut);
    at = 0;
    for (size_t r = 0; r < ranks; at += out_bytes[r], ++r) {
      if (part(out_bytes[r]) == 0) continue;
      memcpy(static_cast<std::byte*>(out) + at + begin,
             calls.piece(static_cast<int>(r)) + me * slot_bytes,
             part(out_bytes[r]));
    }
  }
}

}  // namespace paceline

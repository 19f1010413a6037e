// all_reduce and reduce.
//
// Words: N ranks, each with B bytes. A chunk is what one rank reduces of an array.
// A piece is the kPieceBytes of an array that fit a staging buffer.
//
// Small (B <= kSmallSumBytes), one barrier:
//   1. copy own data to own small buffer;
//   2. barrier;
//   3. every rank reduces all N small buffers by itself.
//   Bytes read per rank: B + N * B, all in cache.
//
// In the region, two barriers and no copy:
//   1. barrier;
//   2. rank r reduces chunk r of every rank's array and writes the result into
//      every rank's array;
//   3. barrier.
//   Over all ranks, each byte of each array is read once and written once.
//
// Any other array, piece by piece through two staging buffers, one barrier per
// piece. For each piece k:
//     copy piece k in;  barrier;
//     reduce own chunk of piece k in place;  copy piece k - 1 out.
//   About 2 cache lines change owner per line of the result. It would be one if
//   each rank reduced every rank's piece straight into its own array. But where
//   cores share no cache (EPYC), writing to a line that another core has only
//   read takes ten times as long as writing to one that it has written.
//   Reading the other rank's array with process_vm_readv, 1 MiB at a time, takes
//   longer: 8.1 ms for 25 MiB and two ranks, against 3.7 ms through the staging
//   buffers. With huge pages, which tensors seldom have, it takes 3.5 ms.
//   Two buffers are enough: piece k + 1 replaces piece k - 1, which no rank needs
//   any more once all have passed the barrier of piece k.
#include "collectives/all_reduce.h"

#include <string.h>

#include <algorithm>

#include "core/faults.h"

namespace paceline {
namespace {

constexpr size_t kTinyBytes = 2048 / kSmaller;

struct Range {
  size_t begin;
  size_t end;
  size_t size() const { return end - begin; }
};

// Chunk `index` of `parts` of `count` elements. Chunks begin at a pair of cache
// lines, so that no two ranks write to the same line.
Range chunk_of(size_t count, size_t element_bytes, int index, int parts) {
  const size_t line = kLinePairBytes / element_bytes;
  const size_t lines = (count + line - 1) / line;
  const auto at = [&](int i) {
    return std::min(count, lines * static_cast<size_t>(i) /
                               static_cast<size_t>(parts) * line);
  };
  return {at(index), at(index + 1)};
}

// Reduces the whole arrays at array_of(rank) of all ranks into `out`.
template <class ArrayOf>
void reduce_all(Calls& calls, ArrayOf array_of, void* out, size_t count,
                DType dtype, ReduceOp op) {
  double storage[kMaxRanks];
  const void* inputs[kMaxRanks];
  for (int r = 0; r < calls.world(); ++r) inputs[r] = array_of(r);
  fault_point(Point::kBeforeReduce);
  paceline::reduce(dtype, op, inputs, calls.world(), &out, 1, count,
                   calls.weights(storage), nullptr);
  fault_point(Point::kAfterReduce);
}

// Reduces this rank's chunk of the arrays at array_of(rank), in place; root <
// 0: the result goes to all arrays.
template <class ArrayOf>
void reduce_chunk(Calls& calls, ArrayOf array_of, int root, size_t count,
                  DType dtype, ReduceOp op) {
  const size_t size = dtype_bytes(dtype);
  const Range chunk = chunk_of(count, size, calls.rank(), calls.world());
  if (chunk.size() == 0) return;
  double storage[kMaxRanks];
  void* arrays[kMaxRanks];
  for (int r = 0; r < calls.world(); ++r)
    arrays[r] = array_of(r) + chunk.begin * size;
  fault_point(Point::kBeforeReduce);
  void** outputs = root < 0 ? arrays : arrays + root;
  paceline::reduce(dtype, op, arrays, calls.world(), outputs,
                   root < 0 ? calls.world() : 1, chunk.size(),
                   calls.weights(storage), nullptr);
  fault_point(Point::kAfterReduce);
}

void reduce_through_pieces(Calls& calls, int root, std::byte* data,
                           size_t count, DType dtype, ReduceOp op) {
  const size_t size = dtype_bytes(dtype);
  const size_t piece_count = kPieceBytes / size;
  const uint64_t pieces = (count + piece_count - 1) / piece_count;
  const uint64_t first_piece = calls.piece_number();
  const auto range = [&](uint64_t k) {
    return Range{k * piece_count, std::min(count, (k + 1) * piece_count)};
  };
  const auto copy_out = [&](uint64_t k) {
    if (root >= 0 && root != calls.rank()) return;
    fault_point(Point::kCopyOut);
    memcpy(data + range(k).begin * size,
           calls.piece(calls.rank(), first_piece + k), range(k).size() * size);
  };
  for (uint64_t k = 0; k < pieces; ++k, calls.next_piece()) {
    memcpy(calls.piece(calls.rank()), data + range(k).begin * size,
           range(k).size() * size);
    calls.barrier();
    reduce_chunk(
        calls, [&](int r) { return calls.piece(r); }, root, range(k).size(),
        dtype, op);
    if (k > 0) copy_out(k - 1);
  }
  calls.barrier();
  copy_out(pieces - 1);
}

void reduce_everywhere_or_at(Calls& calls, int root, void* data, size_t count,
                             DType dtype, ReduceOp op) {
  const size_t bytes = count * dtype_bytes(dtype);
  // Below kTinyBytes the second barrier costs more than a copy.
  const uint64_t place = bytes <= kTinyBytes ? 0 : calls.place_of(data, bytes);
  if (bytes <= kSmallSumBytes && place == 0)
    memcpy(calls.small(calls.rank()), data, bytes);
  const Places places = calls.barrier(place);
  if (places == Places::kInRegion) {
    reduce_chunk(
        calls, [&](int r) { return calls.slab(r) + place; }, root, count, dtype,
        op);
    calls.barrier();
  } else if (places == Places::kOutside && bytes <= kSmallSumBytes) {
    if (root < 0 || root == calls.rank())
      reduce_all(
          calls, [&](int r) { return calls.small(r); }, data, count, dtype, op);
  } else {
    reduce_through_pieces(calls, root, static_cast<std::byte*>(data), count,
                          dtype, op);
  }
}

}  // namespace

void all_reduce(Calls& calls, void* data, size_t count, DType dtype,
                ReduceOp op, double weight, double timeout_s) {
  calls.begin(CallKind::kAllReduce, count, dtype, op, 0, weight, timeout_s);
  reduce_everywhere_or_at(calls, -1, data, count, dtype, op);
}

void reduce(Calls& calls, void* data, size_t count, DType dtype, ReduceOp op,
            int root, double timeout_s) {
  calls.begin(CallKind::kReduce, count, dtype, op, root, 1, timeout_s);
  reduce_everywhere_or_at(calls, root, data, count, dtype, op);
}

}  // namespace paceline

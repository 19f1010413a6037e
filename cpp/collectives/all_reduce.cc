// all_reduce and reduce.
//
// Words: N ranks, each with B bytes. A chunk is the share of an array that one
// rank reduces.
//
// Small (B <= kSmallBytes), one synchronisation:
//   1. copy own data to own small buffer;
//   2. meet;
//   3. every rank reduces all N small buffers by itself.
//   Bytes read per rank: B + N * B, all in cache.
//
// In the region, two synchronisations and no copy:
//   1. meet;
//   2. rank r reduces chunk r of everybody's array and writes the result into
//      everybody's array;
//   3. meet.
//   Over all ranks, each byte of each array is read once and written once.
//
// Any other array, in pieces of kPieceBytes through two staging buffers, one
// synchronisation a piece. What costs is not the copies but the cache lines
// that change owner between cores:
//   N <= kDirectRanks, step k:
//     copy piece k in;  meet;
//     reduce all of everybody's piece k straight into the own array.
//     N - 1 lines travel per line of result.
//   Else, step k:
//     copy piece k in;  meet;
//     reduce own chunk of piece k in place;  copy piece k - 1 out.
//     About 2 lines travel per line of result, but more is copied.
//   Two buffers are enough: piece k + 1 goes where piece k - 1 was, and nobody
//   needs that any more once all have arrived in step k.
#include <string.h>

#include "collectives/host_group.h"

namespace paceline {
namespace {

constexpr size_t kTinyBytes = 2048 / kSmaller;
constexpr int kDirectRanks = 2;  // more were not measured: 2 cores

struct Range {
  size_t begin;
  size_t end;
  size_t size() const { return end - begin; }
};

// Chunk `index` of `parts` of `count` elements; chunks begin on cache lines, so
// that no two ranks write one.
Range chunk_of(size_t count, size_t element_bytes, int index, int parts) {
  const size_t line = kLinePairBytes / element_bytes;
  const size_t lines = (count + line - 1) / line;
  const auto at = [&](int i) {
    return std::min(count, lines * static_cast<size_t>(i) /
                               static_cast<size_t>(parts) * line);
  };
  return {at(index), at(index + 1)};
}

}  // namespace

void HostGroup::all_reduce(void* data, size_t count, DType dtype, ReduceOp op,
                           double weight, double timeout_s) {
  begin(CallKind::kAllReduce, count, dtype, op, 0, weight, timeout_s);
  reduce_everywhere_or_at(-1, data, count, dtype, op);
}

void HostGroup::reduce(void* data, size_t count, DType dtype, ReduceOp op,
                       int root, double timeout_s) {
  begin(CallKind::kReduce, count, dtype, op, root, 1, timeout_s);
  reduce_everywhere_or_at(root, data, count, dtype, op);
}

void HostGroup::reduce_everywhere_or_at(int root, void* data, size_t count,
                                        DType dtype, ReduceOp op) {
  const size_t bytes = count * dtype_bytes(dtype);
  // Below kTinyBytes the second synchronisation costs more than a copy.
  const uint64_t place = bytes <= kTinyBytes ? 0 : place_of(data, bytes);
  if (bytes <= kSmallBytes && place == 0) memcpy(small(rank_), data, bytes);
  const Places places = meet(place);
  if (places == Places::kInRegion) {
    reduce_chunk([&](int r) { return slab(r) + place; }, root, count, dtype,
                 op);
    meet();
  } else if (places == Places::kOutside && bytes <= kSmallBytes) {
    if (root < 0 || root == rank_)
      reduce_all([&](int r) { return small(r); }, data, count, dtype, op);
  } else if (world() <= kDirectRanks) {
    reduce_from_pieces(root, static_cast<std::byte*>(data), count, dtype, op);
  } else {
    reduce_through_pieces(root, static_cast<std::byte*>(data), count, dtype,
                          op);
  }
}

// Everybody's array at array_of(rank), whole, into `out`.
template <class ArrayOf>
void HostGroup::reduce_all(ArrayOf array_of, void* out, size_t count,
                           DType dtype, ReduceOp op) {
  double storage[kMaxRanks];
  const void* inputs[kMaxRanks];
  for (int r = 0; r < world(); ++r) inputs[r] = array_of(r);
  fault_point(Point::kBeforeReduce);
  paceline::reduce(dtype, op, inputs, world(), &out, 1, count, weights(storage),
                   nullptr);
  fault_point(Point::kAfterReduce);
}

// This rank's chunk of the arrays at array_of(rank), in place; root < 0: the
// result goes to all of them.
template <class ArrayOf>
void HostGroup::reduce_chunk(ArrayOf array_of, int root, size_t count,
                             DType dtype, ReduceOp op) {
  const size_t size = dtype_bytes(dtype);
  const Range chunk = chunk_of(count, size, rank_, world());
  if (chunk.size() == 0) return;
  double storage[kMaxRanks];
  void* arrays[kMaxRanks];
  for (int r = 0; r < world(); ++r)
    arrays[r] = array_of(r) + chunk.begin * size;
  fault_point(Point::kBeforeReduce);
  void** outputs = root < 0 ? arrays : arrays + root;
  paceline::reduce(dtype, op, arrays, world(), outputs, root < 0 ? world() : 1,
                   chunk.size(), weights(storage), nullptr);
  fault_point(Point::kAfterReduce);
}

void HostGroup::reduce_from_pieces(int root, std::byte* data, size_t count,
                                   DType dtype, ReduceOp op) {
  const size_t size = dtype_bytes(dtype);
  const size_t most = kPieceBytes / size;
  for (size_t begin = 0; begin < count; begin += most, ++step_) {
    const size_t elements = std::min(most, count - begin);
    std::byte* own = data + begin * size;
    memcpy(piece(rank_, step_), own, elements * size);
    meet();
    if (root >= 0 && root != rank_) continue;
    // The own array rather than its copy: it is in the cache just as well.
    reduce_all([&](int r) { return r == rank_ ? own : piece(r, step_); }, own,
               elements, dtype, op);
  }
}

void HostGroup::reduce_through_pieces(int root, std::byte* data, size_t count,
                                      DType dtype, ReduceOp op) {
  const size_t size = dtype_bytes(dtype);
  const size_t piece_count = kPieceBytes / size;
  const uint64_t pieces = (count + piece_count - 1) / piece_count;
  const uint64_t first_step = step_;
  const auto range = [&](uint64_t k) {
    return Range{k * piece_count, std::min(count, (k + 1) * piece_count)};
  };
  const auto copy_out = [&](uint64_t k) {
    if (root >= 0 && root != rank_) return;
    fault_point(Point::kCopyOut);
    memcpy(data + range(k).begin * size, piece(rank_, first_step + k),
           range(k).size() * size);
  };
  for (uint64_t k = 0; k < pieces; ++k, ++step_) {
    memcpy(piece(rank_, step_), data + range(k).begin * size,
           range(k).size() * size);
    meet();
    reduce_chunk([&](int r) { return piece(r, step_); }, root, range(k).size(),
                 dtype, op);
    if (k > 0) copy_out(k - 1);
  }
  meet();
  copy_out(pieces - 1);
}

}  // namespace paceline

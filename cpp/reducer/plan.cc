// Divides parameters and buckets into segments and chunks, and allocates their
// memory; see the words in reducer.h.
#include <algorithm>
#include <string>
#include <utility>

#include "core/failure.h"
#include "core/region_layout.h"
#include "kernels/kernels.h"
#include "reducer/reducer.h"

namespace paceline {
namespace {

// Chunks are so large that claiming costs next to nothing, and so small that
// two ranks can share the work of the last bucket.
constexpr size_t kChunkBytes = 128 * 1024 / kSmaller;
constexpr uint32_t kAssignedChunksPerRank = 2;

}  // namespace

// Divides parameters into segments, and groups segments into buckets and
// chunks.
void Reducer::plan(const std::vector<BucketSpan>& spans,
                   std::vector<OwnedBytes> owned) {
  std::vector<Segment> all;
  uint32_t order = 0;
  for (uint32_t p = 0; p < parameters_.size(); ++p) {
    const auto [offset, count, dtype] = parameters_[p].span;
    const size_t size = dtype_bytes(dtype);
    if (offset + count * size > buffer_bytes_)
      misuse("parameter " + std::to_string(p) +
             " ends outside the gradient buffer");
    if (!is_supported(dtype, ReduceOp::kMean))
      misuse("parameter " + std::to_string(p) + " is not of a floating type");
    for (size_t at = 0; at < count; at += kSegmentElements) {
      const size_t length = std::min(kSegmentElements, count - at);
      all.push_back({offset + at * size, static_cast<uint32_t>(length), p,
                     order++, dtype});
    }
  }
  std::sort(all.begin(), all.end(), [](const Segment& a, const Segment& b) {
    return a.offset < b.offset;
  });
  for (size_t i = 1; i < all.size(); ++i) {
    if (all[i - 1].offset + all[i - 1].bytes() > all[i].offset) {
      misuse("parameters " + std::to_string(all[i - 1].parameter) + " and " +
             std::to_string(all[i].parameter) +
             " overlap in the gradient buffer");
    }
  }

  if (scatters_) find_receivers(all, std::move(owned));

  std::vector<std::vector<uint32_t>> buckets_of(parameters_.size());
  for (uint32_t b = 0; b < spans.size(); ++b) {
    Bucket bucket{};
    bucket.first_chunk = static_cast<uint32_t>(chunks_.size());
    // "Full", so that the first segment opens a chunk.
    size_t chunk_bytes = kChunkBytes;
    // Each bucket from its own beginning: buckets are in the order in which
    // they become complete, which with several dtypes is not that of the
    // gradient buffer.
    auto next = std::lower_bound(
        all.begin(), all.end(), spans[b].begin,
        [](const Segment& s, size_t begin) { return s.offset < begin; });
    for (; next != all.end() && next->offset < spans[b].end; ++next) {
      const Segment& segment = *next;
      const size_t bytes = segment.bytes();
      if (segment.offset + bytes > spans[b].end) {
        misuse("bucket " + std::to_string(b) +
               " ends within a segment of parameter " +
               std::to_string(segment.parameter));
      }
      const auto index = static_cast<uint32_t>(segments_.size());
      const bool is_another_rank_s =
          index > 0 && segments_.back().owner != segment.owner;
      if (chunk_bytes >= kChunkBytes || is_another_rank_s) {
        chunks_.push_back({index, index});
        chunk_bytes = 0;
      }
      chunk_bytes += bytes;
      chunks_.back().end_segment = index + 1;
      std::vector<uint32_t>& owners = buckets_of[segment.parameter];
      if (owners.empty() || owners.back() != b) {
        owners.push_back(b);
        ++bucket.parameters;
      }
      segments_.push_back(segment);
    }
    bucket.end_chunk = static_cast<uint32_t>(chunks_.size());
    if (bucket.first_chunk == bucket.end_chunk)
      misuse("bucket " + std::to_string(b) + " is empty");
    buckets_.push_back(bucket);
  }
  if (segments_.size() != all.size())
    misuse("the buckets do not cover the gradient buffer");
  total_chunks_ = chunks_.size();
  segments_in_order_.resize(segments_.size());
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    segments_in_order_[segments_[i].order] = i;
    ++parameters_[segments_[i].parameter].end_segment;
  }
  uint32_t first_segment = 0;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    Parameter& parameter = parameters_[p];
    parameter.first_segment = first_segment;
    first_segment = parameter.end_segment += first_segment;
    parameter.first_part = static_cast<uint32_t>(bucket_of_part_.size());
    bucket_of_part_.insert(bucket_of_part_.end(), buckets_of[p].begin(),
                           buckets_of[p].end());
    parameter.end_part = static_cast<uint32_t>(bucket_of_part_.size());
  }
  unused_words_ = (parameters_.size() + 63) / 64;
  reduced_in_backward_.assign(segments_.size(), 0);
  weights_.assign(static_cast<size_t>(session_.world()), 1.0);
}

// `segments` are in the order of the gradient buffer.
void Reducer::find_receivers(std::vector<Segment>& segments,
                             std::vector<OwnedBytes> owned) {
  std::sort(owned.begin(), owned.end(),
            [](const OwnedBytes& a, const OwnedBytes& b) {
              return a.begin < b.begin;
            });
  auto range = owned.begin();
  for (Segment& segment : segments) {
    size_t at = segment.offset;
    const size_t end = at + segment.bytes();
    while (range != owned.end() && range->end <= at) ++range;
    segment.first_receiver = static_cast<uint32_t>(receivers_.size());
    for (auto next = range; at < end; ++next) {
      if (next == owned.end() || next->begin > at || next->end <= at ||
          next->rank < 0 || next->rank >= session_.world()) {
        misuse("byte " + std::to_string(at) +
               " of the gradient buffer, in the gradient of parameter " +
               std::to_string(segment.parameter) + ", has no owner");
      }
      at = next->end;
      const auto first =
          receivers_.begin() + static_cast<ptrdiff_t>(segment.first_receiver);
      if (std::find(first, receivers_.end(), next->rank) == receivers_.end())
        receivers_.push_back(next->rank);
    }
    segment.end_receiver = static_cast<uint32_t>(receivers_.size());
    segment.owner = receivers_[segment.first_receiver];
  }
}

void Reducer::allocate(bool assigns_chunks) {
  layout_.buckets_at = round_up(sizeof(BackwardControl), kLinePairBytes);
  layout_.stats_at =
      layout_.buckets_at + buckets_.size() * sizeof(BucketControl);
  layout_.headers_at =
      round_up(layout_.stats_at + 2 * segments_.size() * sizeof(SegmentStats),
               kLinePairBytes);
  layout_.unused_at = layout_.headers_at + 2 * sizeof(BackwardHeader);
  layout_.bytes = layout_.unused_at + 2 * unused_words_ * sizeof(uint64_t);
  control_at_ = heap_.allocate(layout_.bytes, -1);
  // The next allocation, which is a collective, publishes it to the others.
  if (session_.rank() == 0)
    control().assigns_chunks = assigns_chunks && session_.has_core_per_rank();
  try {
    buffer_at_ = heap_.allocate(buffer_bytes_, -1);
  } catch (...) {
    heap_.free(control_at_);
    throw;
  }
}

// Small buckets are not assigned: any rank that has time reduces them. If means
// are scattered, the segments have owners already.
void Reducer::assign_chunks() {
  if (!scatters_ && control().assigns_chunks == 0) return;
  const auto world = static_cast<uint32_t>(session_.world());
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    const uint32_t count = bucket.end_chunk - bucket.first_chunk;
    if (!scatters_ && count < kAssignedChunksPerRank * world) continue;
    bucket.is_assigned = true;
    bucket.first_own = static_cast<uint32_t>(own_chunks_.size());
    for (uint32_t c = bucket.first_chunk; c < bucket.end_chunk; ++c) {
      const uint32_t first = chunks_[c].first_segment;
      // Begins with another rank in each bucket, so that no rank gets all the
      // odd chunks.
      if (!scatters_) {
        const auto owner =
            static_cast<int>((c - bucket.first_chunk + b) % world);
        for (uint32_t s = first; s < chunks_[c].end_segment; ++s)
          segments_[s].owner = owner;
      }
      if (segments_[first].owner == session_.rank()) own_chunks_.push_back(c);
    }
    bucket.end_own = static_cast<uint32_t>(own_chunks_.size());
  }
}

}  // namespace paceline

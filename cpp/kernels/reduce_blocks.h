// All reductions of one instruction set. kernels_<set>.cc defines PACELINE_ISA,
// the namespace, and includes this; its compile flags make the difference.
//
// Arrays are processed in blocks that fit the L1 cache. For each block, the
// tree over ranks computes the result in a local buffer, the statistics are
// taken, and only then is the result copied to every output, so that an output
// may be an input. In the tree, neighbours are combined four at a time,
// ((0+1)+(2+3)), which is two levels of the binary tree; sixteen ranks are four
// such groups, combined in the same way; and so on.
//
// Standard library functions are not used: they are inline, and the linker
// keeps one copy of each, which might be the one compiled for a newer
// processor.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/vectorized_loops.h"

namespace paceline::PACELINE_ISA {
namespace {

/// The block of every rank's array that is being reduced; it fits the L1 cache.
template <class Format>
struct Block {
  using Stored = typename Format::Stored;
  using Compute = typename Format::Compute;

  const Request& request;
  size_t offset;
  size_t count;

  const Stored* stored(int rank) const {
    return static_cast<const Stored*>(request.inputs[rank]) + offset;
  }

  // A weight of 0 excludes a rank, whatever its array holds: 0 * NaN would not.
  bool has_input(int rank) const {
    return request.weights == nullptr ||
           static_cast<Compute>(request.weights[rank]) != 0;
  }

  // Returns the rank's (weighted) values: in its array if possible, else in
  // `scratch`.
  const Compute* values(int rank, Compute* scratch) const {
    if (!has_input(rank)) {
      __builtin_memset(scratch, 0, count * sizeof(Compute));
      return scratch;
    }
    const Compute* found = scratch;
    if constexpr (Converted<Format>) {
      Format::widen(stored(rank), count, scratch);
    } else {
      found = stored(rank);
    }
    if constexpr (Floating<Format>) {
      if (request.weights == nullptr) return found;
      const auto weight = static_cast<Compute>(request.weights[rank]);
      for (size_t i = 0; i < count; ++i) scratch[i] = found[i] * weight;
      found = scratch;
    }
    return found;
  }
};

// Reduces ranks first .. first + num_ranks - 1.
template <class Op, class Format, class Finish>
void reduce_tree(const Block<Format>& block, int first, int num_ranks,
                 typename Format::Compute* out, Finish finish) {
  using Compute = typename Format::Compute;
  alignas(64) Compute scratch[kFanIn][kBlock<Compute>];
  const Compute* parts[kFanIn] = {};
  int ranks_per_part = 1;
  while (ranks_per_part * kFanIn < num_ranks) ranks_per_part *= kFanIn;
  int num_parts = 0;
  for (int begin = 0; begin < num_ranks; begin += ranks_per_part, ++num_parts) {
    const int rest = num_ranks - begin;
    if (ranks_per_part == 1 || rest == 1) {
      parts[num_parts] = block.values(first + begin, scratch[num_parts]);
    } else {
      const int part_ranks = rest < ranks_per_part ? rest : ranks_per_part;
      reduce_tree<Op>(block, first + begin, part_ranks, scratch[num_parts],
                      Keep());
      parts[num_parts] = scratch[num_parts];
    }
  }
  combine<Op>(parts, num_parts, block.count, out, finish);
}

template <class Format>
void note_nonfinite(const Block<Format>& block, ReduceStats* stats) {
  for (int rank = 0; rank < block.request.num_inputs; ++rank) {
    const uint64_t bit = uint64_t{1} << (rank % 64);
    if ((stats->nonfinite_ranks[rank / 64] & bit) != 0 ||
        !block.has_input(rank))
      continue;
    if (has_nonfinite<Format>(block.stored(rank), block.count)) {
      stats->nonfinite_ranks[rank / 64] |= bit;
    }
  }
}

// Fills the ReduceStats of reduce(), if there are any to fill. Inputs have the
// format In, the result Out.
template <class Op, class In, class Out>
class NormObserver {
 public:
  explicit NormObserver(ReduceStats* stats) : stats_(stats) {}

  // Call before the block's inputs are overwritten. Returns whether they may
  // be.
  bool see(const Block<In>& block, const typename Out::Stored* result) {
    using Compute = typename Out::Compute;
    if (stats_ == nullptr) return true;
    if constexpr (Converted<Out>) {
      Compute widened[kBlock<Compute>];
      Out::widen(result, block.count, widened);
      add_squares(widened, block.count, lanes_);
    } else {
      add_squares(result, block.count, lanes_);
    }
    squared_norm_ = sum_lanes(lanes_);
    // An infinity or a NaN stays one in sums and products, but not in a
    // minimum.
    constexpr bool kShows = __is_same(Op, Sum) || __is_same(Op, Product);
    if (!kShows || !(squared_norm_ <= __DBL_MAX__)) {
      note_nonfinite(block, stats_);
    }
    return true;
  }

  void finish() {
    if (stats_ == nullptr) return;
    stats_->squared_norm = Canonical<double>()(squared_norm_);
  }

 private:
  ReduceStats* stats_;
  double squared_norm_ = 0;
  alignas(64) double lanes_[kLanes] = {};
};

// Fills the ReduceStats of sums between hosts, without the norm: squares in
// float64 take longer than the sum itself, and are not used there.
template <class Op, class In, class Out>
class FiniteObserver {
 public:
  explicit FiniteObserver(ReduceStats* stats) : stats_(stats) {}

  // As in NormObserver.
  bool see(const Block<In>& block, const typename Out::Stored* result) {
    if (stats_ == nullptr || !has_nonfinite<Out>(result, block.count))
      return true;
    stats_->has_nonfinite = true;
    // An infinity or a NaN of an input stays one in a sum.
    note_nonfinite(block, stats_);
    return !block.request.stops_at_nonfinite;
  }

  void finish() {}

 private:
  ReduceStats* stats_;
};

template <class Op, class In, class Out,
          template <class, class, class> class Observer = NormObserver,
          class Finish>
size_t reduce_blocks(const Request& request, Finish finish) {
  using Stored = typename Out::Stored;
  using Compute = typename Out::Compute;
  static_assert(__is_same(Compute, typename In::Compute));
  alignas(64) Compute result[kBlock<Compute>];
  alignas(64) Stored narrowed[Converted<Out> ? kBlock<Compute> : 1];
  Observer<Op, In, Out> observer(request.stats);
  for (size_t offset = 0; offset < request.count; offset += kBlock<Compute>) {
    const size_t rest = request.count - offset;
    const Block<In> block{request, offset,
                          rest < kBlock<Compute> ? rest : kBlock<Compute>};
    reduce_tree<Op>(block, 0, request.num_inputs, result, finish);
    const Stored* stored;
    if constexpr (Converted<Out>) {
      Out::narrow(result, block.count, narrowed);
      stored = narrowed;
    } else {
      stored = result;
    }
    if constexpr (Floating<Out>) {
      if (!observer.see(block, stored)) return offset;
    }
    for (int i = 0; i < request.num_outputs; ++i) {
      copy(stored, block.count,
           static_cast<Stored*>(request.outputs[i]) + offset);
    }
  }
  if constexpr (Floating<Out>) observer.finish();
  return request.count;
}

template <class Op, class Format>
size_t reduce_array(const Request& request) {
  if constexpr (Floating<Format>) {
    return reduce_blocks<Op, Format, Format>(
        request, Canonical<typename Format::Compute>());
  } else {
    return reduce_blocks<Op, Format, Format>(request, Keep());
  }
}

// Dividing by a power of two gives the same bits as multiplying by its inverse,
// which takes a tenth of the work.
bool is_power_of_two(double x) {
  constexpr int kNonMantissaBits = 12;
  return x >= 1 && x <= 0x1p64 &&
         __builtin_bit_cast(uint64_t, x) << kNonMantissaBits == 0;
}

// The sum over the inputs, divided by the total weight, or by 1 if that is 0.
template <class In, class Out, template <class, class, class> class Observer>
size_t divide_sum(const Request& request, bool has_input) {
  using Compute = typename Out::Compute;
  const auto total = static_cast<Compute>(request.total_weight);
  if (!has_input || is_power_of_two(request.total_weight)) {
    return reduce_blocks<Sum, In, Out, Observer>(
        request, Multiply<Compute>{has_input ? 1 / total : 1});
  }
  return reduce_blocks<Sum, In, Out, Observer>(request, Divide<Compute>{total});
}

template <class Format>
size_t reduce_mean(const Request& request) {
  using Compute = typename Format::Compute;
  bool has_input = request.weights == nullptr;
  for (int rank = 0; rank < request.num_inputs && !has_input; ++rank) {
    has_input = static_cast<Compute>(request.weights[rank]) != 0;
  }
  // If every weight is 0, the sum is 0, and the mean must be, too.
  return divide_sum<Format, Format, NormObserver>(request, has_input);
}

/// The format of the sums of a type: see sum_type().
template <class T>
struct SumFormat {
  using Type = Float32;
};
template <>
struct SumFormat<double> {
  using Type = Float64;
};
template <class Format>
using SumOf = typename SumFormat<typename Format::Compute>::Type;

template <class Format>
size_t sum_weighted(const Request& request) {
  return reduce_blocks<Sum, Format, SumOf<Format>, FiniteObserver>(
      request, Canonical<typename Format::Compute>());
}

template <class Format>
size_t mean_of_sums(const Request& request) {
  using Compute = typename Format::Compute;
  return divide_sum<SumOf<Format>, Format, FiniteObserver>(
      request, static_cast<Compute>(request.total_weight) != 0);
}

// Gives the same bits as sum_weighted() followed by mean_of_sums().
template <class Format>
size_t weighted_mean(const Request& request) {
  using Compute = typename Format::Compute;
  return divide_sum<Format, Format, FiniteObserver>(
      request, static_cast<Compute>(request.total_weight) != 0);
}

}  // namespace

// Columns: sum, mean, min, max, product. Rows: the order of DType.
constinit const KernelTable kKernels = {
    {
        {reduce_array<Sum, Float32>, reduce_mean<Float32>,
         reduce_array<Min, Float32>, reduce_array<Max, Float32>,
         reduce_array<Product, Float32>},
        {reduce_array<Sum, Float64>, reduce_mean<Float64>,
         reduce_array<Min, Float64>, reduce_array<Max, Float64>,
         reduce_array<Product, Float64>},
        {reduce_array<Sum, Float16>, reduce_mean<Float16>,
         reduce_array<Min, Float16>, reduce_array<Max, Float16>,
         reduce_array<Product, Float16>},
        {reduce_array<Sum, BFloat16>, reduce_mean<BFloat16>,
         reduce_array<Min, BFloat16>, reduce_array<Max, BFloat16>,
         reduce_array<Product, BFloat16>},
        {reduce_array<Sum, Plain<uint8_t>>, nullptr,
         reduce_array<Min, Plain<int8_t>>, reduce_array<Max, Plain<int8_t>>,
         reduce_array<Product, Plain<uint8_t>>},
        {reduce_array<Sum, Plain<uint16_t>>, nullptr,
         reduce_array<Min, Plain<int16_t>>, reduce_array<Max, Plain<int16_t>>,
         reduce_array<Product, Plain<uint16_t>>},
        {reduce_array<Sum, Plain<uint32_t>>, nullptr,
         reduce_array<Min, Plain<int32_t>>, reduce_array<Max, Plain<int32_t>>,
         reduce_array<Product, Plain<uint32_t>>},
        {reduce_array<Sum, Plain<uint64_t>>, nullptr,
         reduce_array<Min, Plain<int64_t>>, reduce_array<Max, Plain<int64_t>>,
         reduce_array<Product, Plain<uint64_t>>},
        {reduce_array<Sum, Plain<uint8_t>>, nullptr,
         reduce_array<Min, Plain<uint8_t>>, reduce_array<Max, Plain<uint8_t>>,
         reduce_array<Product, Plain<uint8_t>>},
        {reduce_array<Max, Bool>, nullptr, reduce_array<Min, Bool>,
         reduce_array<Max, Bool>, reduce_array<Min, Bool>},
    },
    {sum_weighted<Float32>, sum_weighted<Float64>, sum_weighted<Float16>,
     sum_weighted<BFloat16>},
    {mean_of_sums<Float32>, mean_of_sums<Float64>, mean_of_sums<Float16>,
     mean_of_sums<BFloat16>},
    {weighted_mean<Float32>, weighted_mean<Float64>, weighted_mean<Float16>,
     weighted_mean<BFloat16>},
};

}  // namespace paceline::PACELINE_ISA

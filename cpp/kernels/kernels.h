// Reductions over the arrays of several ranks, element by element.
//
// One idea: an element is reduced over ranks in a fixed binary tree over rank
// order, ((0+1)+(2+3))+..., an odd one out at a level being carried up
// unchanged. 16-bit floats are widened to float32 first and rounded once at the
// end. Nothing depends on vector width: every instruction set gives the same
// bits, which is why this folder is compiled without contraction and without
// fast-math; and nothing on the caller's rounding mode or its treatment of
// subnormals (default_floats.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/sizes.h"

namespace paceline {

enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kInt8 = 4,
  kInt16 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kUInt8 = 8,
  kBool = 9,
};

enum class ReduceOp : uint8_t {
  kSum = 0,  ///< bool: logical or; integers wrap
  /// sum / number of ranks, or sum(w_r * x_r) / sum(w_r); floating types only
  kMean = 1,
  kMin = 2,      ///< NaN wins; bool: logical and
  kMax = 3,      ///< NaN wins; bool: logical or
  kProduct = 4,  ///< bool: logical and
};

/// What one reduction saw on its way, without a further pass.
struct ReduceStats {
  /// of the result of reduce(); summed in fixed 16 lanes, independent of Isa
  double squared_norm = 0;
  /// Whether the result of sum_weighted(), mean_of_sums() or weighted_mean()
  /// holds an infinity or a NaN.
  bool has_nonfinite = false;
  /// bit r: rank r's input held an infinity or a NaN (and its weight was not 0)
  uint64_t nonfinite_ranks[2] = {0, 0};
};

size_t dtype_bytes(DType dtype);
/// As numpy knows it; null: no such type.
const char* name_of(DType dtype);
/// As Python knows it; null: no such reduction.
const char* name_of(ReduceOp op);

/// Floating types take every op, integers and bool all but kMean.
bool is_supported(DType dtype, ReduceOp op);

/// Reduces `count` elements of `num_inputs` arrays (1..kMaxRanks) and writes
/// the result to each of `num_outputs` arrays. An output may be one of the
/// inputs (in place); partial overlap is not allowed. `weights`: one per input,
/// or null for all 1; only with kMean. `stats`: may be null; filled for
/// floating types, and set rather than added to. `total_weight`: what a mean is
/// divided by; 0: the sum of the weights.
void reduce(DType dtype, ReduceOp op, const void* const* inputs, int num_inputs,
            void* const* outputs, int num_outputs, size_t count,
            const double* weights, ReduceStats* stats, double total_weight = 0);

/// Multiplies `count` elements of a floating type by `factor`, in place, in the
/// type in which reduce() computes: 16-bit floats are rounded once. A factor of
/// 0 makes zeros of whatever was there.
void scale(DType dtype, void* array, size_t count, double factor);

/// Whether no element of a floating type is an infinity or a NaN.
bool is_finite(DType dtype, const void* array, size_t count);

// A mean over ranks of several hosts, in two steps. Each host sums over its own
// ranks, and the sums of all hosts give the mean. Where every host holds an
// aligned block of 2^k ranks, its sum is a node of the tree over all of them,
// and the mean has the bits that reduce() gives.

/// The type in which sums are computed and sent: float32 for 16-bit types, else
/// `dtype` itself. It is defined for floating-point types only.
DType sum_type(DType dtype);

/// Writes the sum of w_r * x_r over `num_inputs` arrays, undivided, to `sum`,
/// which is of sum_type(dtype). `weights`: one per input, or null for all 1.
/// `stats`: may be null; without the norm.
void sum_weighted(DType dtype, const void* const* inputs, int num_inputs,
                  void* sum, size_t count, const double* weights,
                  ReduceStats* stats);

/// Writes the sum over `num_sums` arrays of sum_type(dtype), divided by
/// `total_weight`, to each of `num_outputs` arrays of `dtype`. A total of 0
/// divides by 1: the sums are zeros. `stats`: may be null; without the norm.
void mean_of_sums(DType dtype, const void* const* sums, int num_sums,
                  void* const* outputs, int num_outputs, size_t count,
                  double total_weight, ReduceStats* stats);

/// The same in one step, for hosts of one rank: writes the sum of w_r * x_r,
/// divided by `total_weight`, to each of `num_outputs` arrays, one of which may
/// be an input. `weights`: as in sum_weighted(); `total_weight`, and `stats`:
/// as in mean_of_sums(). `stops_at_nonfinite`: write nothing from the first
/// block on whose mean holds an infinity or a NaN; with `stats`. Returns how
/// many elements are written.
size_t weighted_mean(DType dtype, const void* const* inputs, int num_inputs,
                     void* const* outputs, int num_outputs, size_t count,
                     const double* weights, double total_weight,
                     bool stops_at_nonfinite, ReduceStats* stats);

/// Adds weights in the same order in which reduce() adds elements, so that the
/// total over hosts has the bits of the total over all their ranks.
double sum_of_weights(const double* weights, int num_weights);

}  // namespace paceline

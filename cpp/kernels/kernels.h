// Reductions over the arrays of several ranks, element by element.
//
// An element is reduced over ranks in a fixed binary tree in rank order,
// ((0+1)+(2+3))+..., where an odd one out at a level is carried up unchanged.
// 16-bit floats are widened to float32 first and rounded once at the end. The
// result does not depend on the vector width: every instruction set gives the
// same bits, which is why this folder is compiled without contraction and
// without fast-math. Nor does it depend on the caller's rounding mode or
// treatment of subnormals (default_floats.h).
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

/// Statistics of one reduction, taken in the same pass over the data.
struct ReduceStats {
  /// Of the result of reduce(); summed in 16 fixed lanes, independent of Isa.
  double squared_norm = 0;
  /// Whether the result of sum_weighted(), mean_of_sums() or weighted_mean()
  /// holds an infinity or a NaN.
  bool has_nonfinite = false;
  /// Bit r: rank r's input held an infinity or a NaN (and its weight was not
  /// 0).
  uint64_t nonfinite_ranks[2] = {0, 0};
};

size_t dtype_bytes(DType dtype);
/// numpy's name; null: no such type.
const char* name_of(DType dtype);
/// The name that Python sees; null: no such reduction.
const char* name_of(ReduceOp op);

/// Floating types support every op, integers and bool all but kMean.
bool is_supported(DType dtype, ReduceOp op);

/// Reduces `count` elements of `num_inputs` arrays (1..kMaxRanks) and writes
/// the result to each of `num_outputs` arrays. An output may be one of the
/// inputs (in place); partial overlap is not allowed. `weights`: one per input,
/// or null for all 1; only with kMean. `stats`: may be null; overwritten, and
/// filled for floating types only. `total_weight`: the divisor of a mean; 0:
/// the sum of the weights.
void reduce(DType dtype, ReduceOp op, const void* const* inputs, int num_inputs,
            void* const* outputs, int num_outputs, size_t count,
            const double* weights, ReduceStats* stats, double total_weight = 0);

/// Multiplies `count` elements of a floating type by `factor`, in place, in the
/// type in which reduce() computes: 16-bit floats are rounded once. A factor of
/// 0 gives zeros, whatever the elements were.
void scale(DType dtype, void* array, size_t count, double factor);

/// Whether no element of a floating type is an infinity or a NaN.
bool is_finite(DType dtype, const void* array, size_t count);

// A mean over ranks of several hosts takes two steps. Each host sums over its
// own ranks, and the sums of all hosts give the mean. If every host holds an
// aligned block of 2^k ranks, its sum is a node of the tree over all ranks, and
// the mean has the same bits as that of reduce().

/// The type in which sums are computed and sent: float32 for 16-bit types, else
/// `dtype` itself. Defined for floating types only.
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
/// be an input. `weights`: as in sum_weighted(); `total_weight` and `stats`: as
/// in mean_of_sums(). `stops_at_nonfinite`: writes nothing from the first block
/// on whose mean holds an infinity or a NaN; needs `stats`. Returns the number
/// of elements written.
size_t weighted_mean(DType dtype, const void* const* inputs, int num_inputs,
                     void* const* outputs, int num_outputs, size_t count,
                     const double* weights, double total_weight,
                     bool stops_at_nonfinite, ReduceStats* stats);

/// Adds weights in the same order in which reduce() adds elements, so that the
/// total over hosts has the same bits as the total over all their ranks.
double sum_of_weights(const double* weights, int num_weights);

}  // namespace paceline

// Calls the set of loops for this processor.
#include "kernels/kernels.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstring>

#include "core/isa.h"
#include "kernels/default_floats.h"
#include "kernels/kernel_table.h"

namespace paceline {
namespace {

constexpr PerIsa<const KernelTable> kTables = {PACELINE_VERSIONS_OF(kKernels)};

/// Whether no element has all bits of `exponent` set, as infinities and NaNs
/// have.
template <typename Bits>
bool is_free_of(Bits exponent, const void* array, size_t count) {
  const auto* bytes = static_cast<const std::byte*>(array);
  constexpr size_t kBlock = 4096;  // the inner loop runs without an exit
  for (size_t i = 0; i < count;) {
    const size_t end = std::min(count, i + kBlock);
    Bits found = 0;  // as wide as the elements, to vectorise
    for (; i < end; ++i) {
      Bits bits;
      std::memcpy(&bits, bytes + i * sizeof(Bits), sizeof(Bits));
      found |= static_cast<Bits>((bits & exponent) == exponent);
    }
    if (found != 0) return false;
  }
  return true;
}

// Not inlined, so that its arithmetic stays within the scope of DefaultFloats.
[[gnu::noinline]] void reduce_with_default_floats(DType dtype, ReduceOp op,
                                                  Request request) {
  if (request.total_weight == 0) {  // not given
    request.total_weight =
        request.weights != nullptr
            ? sum_of_weights(request.weights, request.num_inputs)
            : static_cast<double>(request.num_inputs);
  }
  kTables.current().reduce[static_cast<int>(dtype)][static_cast<int>(op)](
      request);
}

[[gnu::noinline]] size_t run_with_default_floats(ReduceFunction loops,
                                                 const Request& request) {
  return loops(request);
}

}  // namespace

// The order is that of reduce(): level by level over neighbours, and an odd one
// is carried up.
double sum_of_weights(const double* weights, int num_weights) {
  double sums[kMaxRanks];
  std::memcpy(sums, weights, static_cast<size_t>(num_weights) * sizeof(double));
  for (int n = num_weights; n > 1; n = (n + 1) / 2) {
    for (int i = 0; i < n / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    if (n % 2 != 0) sums[n / 2] = sums[n - 1];
  }
  return sums[0];
}

size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
      return 2;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool:
      return 1;
  }
  return 0;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt8:
      return "int8";
    case DType::kInt16:
      return "int16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kBool:
      return "bool";
  }
  return nullptr;
}

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMean:
      return "mean";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
  }
  return nullptr;
}

bool is_supported(DType dtype, ReduceOp op) {
  const auto row = static_cast<int>(dtype);
  const auto column = static_cast<int>(op);
  return row < kNumDTypes && column < kNumOps &&
         kTables.portable().reduce[row][column] != nullptr;
}

void reduce(DType dtype, ReduceOp op, const void* const* inputs, int num_inputs,
            void* const* outputs, int num_outputs, size_t count,
            const double* weights, ReduceStats* stats, double total_weight) {
  assert(is_supported(dtype, op));
  assert(num_inputs >= 1 && num_inputs <= kMaxRanks);
  if (stats != nullptr) *stats = ReduceStats{};
  if (op != ReduceOp::kMean) weights = nullptr;
  const DefaultFloats default_floats;
  reduce_with_default_floats(dtype, op,
                             {inputs, num_inputs, outputs, num_outputs, count,
                              weights, total_weight, stats});
}

void scale(DType dtype, void* array, size_t count, double factor) {
  assert(is_supported(dtype, ReduceOp::kMean));
  // The mean of one array with the weight `factor`, divided by a total weight
  // of 1.
  const void* input = array;
  const DefaultFloats default_floats;
  reduce_with_default_floats(
      dtype, ReduceOp::kMean,
      {&input, 1, &array, 1, count, &factor, 1, nullptr});
}

bool is_finite(DType dtype, const void* array, size_t count) {
  switch (dtype) {
    case DType::kFloat64:
      return is_free_of<uint64_t>(0x7ff0000000000000, array, count);
    case DType::kFloat32:
      return is_free_of<uint32_t>(0x7f800000, array, count);
    case DType::kBFloat16:
      return is_free_of<uint16_t>(0x7f80, array, count);
    case DType::kFloat16:
      return is_free_of<uint16_t>(0x7c00, array, count);
    default:
      return true;  // integers
  }
}

DType sum_type(DType dtype) {
  const bool is_wide = dtype == DType::kFloat32 || dtype == DType::kFloat64;
  return is_wide ? dtype : DType::kFloat32;
}

void sum_weighted(DType dtype, const void* const* inputs, int num_inputs,
                  void* sum, size_t count, const double* weights,
                  ReduceStats* stats) {
  assert(is_supported(dtype, ReduceOp::kMean));
  assert(num_inputs >= 1 && num_inputs <= kMaxRanks);
  if (stats != nullptr) *stats = ReduceStats{};
  const DefaultFloats default_floats;
  run_with_default_floats(
      kTables.current().sum_weighted[static_cast<int>(dtype)],
      {inputs, num_inputs, &sum, 1, count, weights, 0, stats});
}

void mean_of_sums(DType dtype, const void* const* sums, int num_sums,
                  void* const* outputs, int num_outputs, size_t count,
                  double total_weight, ReduceStats* stats) {
  assert(is_supported(dtype, ReduceOp::kMean));
  assert(num_sums >= 1 && num_sums <= kMaxRanks);
  if (stats != nullptr) *stats = ReduceStats{};
  const DefaultFloats default_floats;
  run_with_default_floats(
      kTables.current().mean_of_sums[static_cast<int>(dtype)],
      {sums, num_sums, outputs, num_outputs, count, nullptr, total_weight,
       stats});
}

size_t weighted_mean(DType dtype, const void* const* inputs, int num_inputs,
                     void* const* outputs, int num_outputs, size_t count,
                     const double* weights, double total_weight,
                     bool stops_at_nonfinite, ReduceStats* stats) {
  assert(is_supported(dtype, ReduceOp::kMean));
  assert(num_inputs >= 1 && num_inputs <= kMaxRanks);
  assert(stats != nullptr || !stops_at_nonfinite);
  if (stats != nullptr) *stats = ReduceStats{};
  const DefaultFloats default_floats;
  return run_with_default_floats(
      kTables.current().weighted_mean[static_cast<int>(dtype)],
      {inputs, num_inputs, outputs, num_outputs, count, weights, total_weight,
       stats, stops_at_nonfinite});
}

}  // namespace paceline

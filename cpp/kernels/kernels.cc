// Chooses the set of loops that this processor runs, and forwards to it.
#include "kernels/kernels.h"

#include <atomic>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/failure.h"
#include "kernels/default_floats.h"
#include "kernels/kernel_table.h"

namespace paceline {
namespace {

const KernelTable& table_of(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return avx512::kKernels;
  if (isa == Isa::kAvx2) return avx2::kKernels;
#endif
  (void)isa;
  return portable::kKernels;
}

// __builtin_cpu_supports asks the operating system too: it must save the wide
// registers.
bool is_runnable(Isa isa) {
  if (isa == Isa::kPortable) return true;
#if defined(__x86_64__)
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (isa == Isa::kAvx2) return has_avx2;
  if (isa == Isa::kAvx512) {
    return has_avx2 && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
#endif
  return false;
}

Isa highest_allowed() {
  const char* name = std::getenv("PACELINE_ISA");
  if (name == nullptr || *name == '\0') return Isa::kAvx512;
  if (std::strcmp(name, "portable") == 0) return Isa::kPortable;
  if (std::strcmp(name, "avx2") == 0) return Isa::kAvx2;
  if (std::strcmp(name, "avx512") == 0) return Isa::kAvx512;
  misuse(std::string("PACELINE_ISA must be portable, avx2 or avx512, not '") +
         name + "'");
}

Isa find_best_isa() {
  const Isa highest = highest_allowed();
  if (highest >= Isa::kAvx512 && is_runnable(Isa::kAvx512)) return Isa::kAvx512;
  if (highest >= Isa::kAvx2 && is_runnable(Isa::kAvx2)) return Isa::kAvx2;
  return Isa::kPortable;
}

// Relaxed suffices: each set gives the same bits, and the tables are constants.
std::atomic<Isa>& chosen_isa() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

// In the order of reduce(): level by level over neighbours, an odd one carried
// up.
double sum_weights(const double* weights, int num_weights) {
  double sums[kMaxRanks];
  std::memcpy(sums, weights, static_cast<size_t>(num_weights) * sizeof(double));
  for (int n = num_weights; n > 1; n = (n + 1) / 2) {
    for (int i = 0; i < n / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
    if (n % 2 != 0) sums[n / 2] = sums[n - 1];
  }
  return sums[0];
}

// Not inlined: its arithmetic stays between the two ends of DefaultFloats.
[[gnu::noinline]] void reduce_with_default_floats(DType dtype, ReduceOp op,
                                                  Request request) {
  request.total_weight = request.weights != nullptr
                             ? sum_weights(request.weights, request.num_inputs)
                             : static_cast<double>(request.num_inputs);
  const KernelTable& kernels = table_of(current_isa());
  kernels.reduce[static_cast<int>(dtype)][static_cast<int>(op)](request);
}

}  // namespace

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

bool is_supported(DType dtype, ReduceOp op) {
  const auto row = static_cast<int>(dtype);
  const auto column = static_cast<int>(op);
  return row < kNumDTypes && column < kNumOps &&
         portable::kKernels.reduce[row][column] != nullptr;
}

Isa best_isa() {
  static const Isa isa = find_best_isa();
  return isa;
}

bool set_isa(Isa isa) {
  if (!is_runnable(isa)) return false;
  chosen_isa().store(isa, std::memory_order_relaxed);
  return true;
}

Isa current_isa() { return chosen_isa().load(std::memory_order_relaxed); }

void reduce(DType dtype, ReduceOp op, const void* const* inputs, int num_inputs,
            void* const* outputs, int num_outputs, size_t count,
            const double* weights, ReduceStats* stats) {
  assert(is_supported(dtype, op));
  assert(num_inputs >= 1 && num_inputs <= kMaxRanks);
  if (stats != nullptr) *stats = ReduceStats{};
  if (op != ReduceOp::kMean) weights = nullptr;
  const DefaultFloats default_floats;
  reduce_with_default_floats(
      dtype, op,
      {inputs, num_inputs, outputs, num_outputs, count, weights, 0, stats});
}

}  // namespace paceline

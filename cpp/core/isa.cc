#include "core/isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/failure.h"

namespace paceline {
namespace {

// __builtin_cpu_supports also checks the operating system, which must save the
// wide registers.
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
#elif defined(__aarch64__)
  if (isa == Isa::kNeon) return true;
#endif
  return false;
}

constexpr Isa kFromBest[] = {Isa::kAvx512, Isa::kAvx2, Isa::kNeon,
                             Isa::kPortable};

Isa highest_allowed() {
  const char* name = std::getenv("PACELINE_ISA");
  if (name == nullptr || *name == '\0') return kFromBest[0];
  for (const Isa isa : kFromBest) {
    if (std::strcmp(name, name_of(isa)) == 0) return isa;
  }
  misuse(std::string(
             "PACELINE_ISA must be portable, avx2, avx512 or neon, not '") +
         name + "'");
}

Isa find_best_isa() {
  const Isa highest = highest_allowed();
  bool is_allowed = false;
  for (const Isa isa : kFromBest) {
    is_allowed |= isa == highest;
    if (is_allowed && is_runnable(isa)) return isa;
  }
  return Isa::kPortable;
}

// Relaxed suffices: each set gives the same bits, and the tables are constants.
std::atomic<Isa>& chosen_isa() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

}  // namespace

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

}  // namespace paceline

// Which vector instructions this processor supports, and how to choose among
// loops that are compiled once for each of them.
//
// Such loops (kernels/, compression/, data/) are headers that are compiled in
// the namespace PACELINE_ISA, once per instruction set, and give the same bits
// in each. The flags are in cpp/CMakeLists.txt.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

enum class Isa : uint8_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kNeon = 3 };

/// The name in PACELINE_ISA and in Python; null: no such set.
constexpr const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kNeon:
      return "neon";
  }
  return nullptr;
}

/// The first of avx512, avx2, neon and portable that this processor runs.
/// PACELINE_ISA names the first one to try, so it can only lower the choice. A
/// value that names no set throws a Failure.
Isa best_isa();
/// For tests: uses `isa` from now on. Returns false if this processor lacks it.
bool set_isa(Isa isa);
Isa current_isa();

/// The versions of one symbol, by Isa; null where the compiler's architecture
/// has no such set.
template <class T>
struct PerIsa {
  T* versions[4];

  T& portable() const { return *versions[0]; }
  T& current() const { return *versions[static_cast<size_t>(current_isa())]; }
};

}  // namespace paceline

/// The initialiser of a PerIsa with the versions of `name`, one per namespace.
#if defined(__x86_64__)
#define PACELINE_VERSIONS_OF(name) \
  {&portable::name, &avx2::name, &avx512::name, nullptr}
#elif defined(__aarch64__)
#define PACELINE_VERSIONS_OF(name) \
  {&portable::name, nullptr, nullptr, &neon::name}
#else
#define PACELINE_VERSIONS_OF(name) {&portable::name, nullptr, nullptr, nullptr}
#endif

// Every floating-point environment in which a program may call the core.
#pragma once

#include <cfenv>
#include <cstdint>
#include <string>
#include <vector>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace paceline::testing {

/// Of the calling thread, and different from the one of a new process.
struct StrangeFloats {
  std::string name;
  int rounding = FE_TONEAREST;
  unsigned flush = 0;  ///< bits of MXCSR or FPCR; nothing elsewhere
};

inline std::vector<StrangeFloats> strange_floats() {
#if defined(__aarch64__)
  // One bit flushes operands and results. The alternative 16-bit floats have no
  // infinities and no NaNs.
  constexpr unsigned kFlushToZero = 1u << 24, kAlternativeHalves = 1u << 26;
  return {{"upward", FE_UPWARD, 0},
          {"downward", FE_DOWNWARD, 0},
          {"towards zero", FE_TOWARDZERO, 0},
          {"flush to zero", FE_TONEAREST, kFlushToZero},
          {"alternative halves", FE_TONEAREST, kAlternativeHalves}};
#else
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
  return {{"upward", FE_UPWARD, 0},
          {"downward", FE_DOWNWARD, 0},
          {"towards zero", FE_TOWARDZERO, 0},
          {"flush to zero", FE_TONEAREST, kFlushToZero},
          {"denormals are zero", FE_TONEAREST, kDenormalsAreZero},
          {"fast-math", FE_TONEAREST, kFlushToZero | kDenormalsAreZero}};
#endif
}

#if defined(__aarch64__)
inline uint64_t read_fpcr() {
  uint64_t word;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}
#endif

inline unsigned float_flags() {
#if defined(__x86_64__)
  return _mm_getcsr() & ~0x3fu;
#elif defined(__aarch64__)
  return static_cast<unsigned>(read_fpcr());
#else
  return static_cast<unsigned>(std::fegetround());
#endif
}

/// Runs `body` in that environment, and restores the previous one. Returns
/// whether `body` left it unchanged.
template <class Body>
bool with_floats(const StrangeFloats& floats, Body body) {
  std::fenv_t before;
  std::fegetenv(&before);
  std::fesetround(floats.rounding);
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | floats.flush);
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(read_fpcr() | floats.flush) : "memory");
#endif
  const unsigned set = float_flags();
  body();
  const bool kept = float_flags() == set;
  std::fesetenv(&before);
  return kept;
}

}  // namespace paceline::testing

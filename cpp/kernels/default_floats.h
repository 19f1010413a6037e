// Floating-point arithmetic as a process starts with it, for as long as an
// object of this class lives on this thread.
//
// A processor rounds, flushes subnormals to zero and traps as a register of the
// thread says, and anybody may write that register: torch.set_flush_denormal(),
// a library that was linked with -ffast-math, fesetround(), feenableexcept().
// Each rank reduces some elements, and small arrays are reduced by every rank
// for itself; so ranks, or threads of one rank, would get different bits.
//
// Reading the register takes some 2 ns. It is written, and written back, only
// where it differs. The compiler may move arithmetic across both, so what is to
// be protected stands in a function that is not inlined. Only for files that
// are compiled for every processor; see kernel_table.h.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace paceline {

#if defined(__x86_64__)
/// MXCSR.
struct FloatControl {
  uint32_t word = 0x1f80;  ///< nearest, subnormals kept, exceptions masked

  static FloatControl read() { return {_mm_getcsr()}; }
  void write() const { _mm_setcsr(word); }
  bool is_default() const {
    constexpr uint32_t kStatus = 0x3f;  // only tells what has happened so far
    return (word & ~kStatus) == FloatControl{}.word;
  }
};
#elif defined(__aarch64__)
/// FPCR.
struct FloatControl {
  uint64_t word = 0;  ///< nearest, subnormals kept, exceptions masked

  static FloatControl read() {
    FloatControl control;
    asm volatile("mrs %0, fpcr" : "=r"(control.word));
    return control;
  }
  void write() const { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
  bool is_default() const { return word == 0; }
};
#else
/// The standard library's way, which is slower and so is always taken.
struct FloatControl {
  std::fenv_t word = *FE_DFL_ENV;

  static FloatControl read() {
    FloatControl control;
    std::fegetenv(&control.word);
    return control;
  }
  void write() const { std::fesetenv(&word); }
  bool is_default() const { return false; }
};
#endif

class DefaultFloats {
 public:
  DefaultFloats() : found_(FloatControl::read()) {
    if (!found_.is_default()) FloatControl{}.write();
  }
  ~DefaultFloats() {
    if (!found_.is_default()) found_.write();
  }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  const FloatControl found_;
};

}  // namespace paceline

// Gives this thread the floating-point settings of a new process, for as long
// as an object of this class lives.
//
// A register of the thread decides how the processor rounds, whether it flushes
// subnormals to zero, and whether it traps. Any code may write that register:
// torch.set_flush_denormal(), a library that was linked with -ffast-math,
// fesetround(), feenableexcept(). Each rank reduces some elements, and every
// rank reduces small arrays by itself, so ranks, or threads of one rank, would
// get different bits.
//
// Reading the register takes some 2 ns. It is only written, and restored, if it
// differs. The compiler may move arithmetic across both, so the arithmetic to
// be protected must be in a function that is not inlined. Only for files that
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
    constexpr uint32_t kStatus = 0x3f;  // only records past exceptions
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
/// The standard library's functions are slower, so nothing is checked before
/// writing.
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

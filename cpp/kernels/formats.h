// How each element type is stored in memory (Stored) and reduced (Compute), and
// the loops that convert between the two.
//
// Included once per instruction set by reduce_blocks.h, and by
// compression/code_loops.h; hence everything is in an unnamed namespace.
// Results hold one NaN, the positive quiet one: which NaN a sum of two NaNs
// gives depends on the order of a processor's operands, and results would not
// have the same bits everywhere.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(PACELINE_NEON)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <cstdint>

namespace paceline::PACELINE_ISA {
namespace {

/// A type that is reduced as it is stored.
template <class T>
struct Plain {
  using Stored = T;
  using Compute = T;
};

struct Float32 : Plain<float> {
  using Bits = uint32_t;
  static constexpr Bits kExponent = 0x7f800000;
};

struct Float64 : Plain<double> {
  using Bits = uint64_t;
  static constexpr Bits kExponent = 0x7ff0000000000000;
};

struct BFloat16 {
  using Stored = uint16_t;
  using Compute = float;
  using Bits = uint16_t;
  static constexpr Bits kExponent = 0x7f80;

  static void widen(const uint16_t* from, size_t count, float* __restrict to) {
    for (size_t i = 0; i < count; ++i) {
      to[i] = __builtin_bit_cast(float, static_cast<uint32_t>(from[i]) << 16);
    }
  }

  // Rounds to nearest even: adds half a unit, less one bit if the kept half is
  // even. NaNs arrive as the canonical one, which keeps its top half.
  static void narrow(const float* from, size_t count, uint16_t* __restrict to) {
    for (size_t i = 0; i < count; ++i) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, from[i]);
      const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
      to[i] = static_cast<uint16_t>(rounded >> 16);
    }
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Compute = float;
  using Bits = uint16_t;
  static constexpr Bits kExponent = 0x7c00;

#if defined(__F16C__)
  // GCC 12 does not vectorise these conversions by itself.
  static constexpr size_t kStep = 8;

  static void widen(const uint16_t* from, size_t count, float* __restrict to) {
    size_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      _mm256_storeu_ps(to + i,
                       _mm256_cvtph_ps(_mm_loadu_si128(
                           reinterpret_cast<const __m128i*>(from + i))));
    }
    for (; i < count; ++i) to[i] = _cvtsh_ss(from[i]);
  }

  static void narrow(const float* from, size_t count, uint16_t* __restrict to) {
    size_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i),
                                       _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < count; ++i)
      to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
  }
#elif defined(PACELINE_NEON)
  // Every NEON has these two conversions; they round according to FPCR, which
  // default_floats.h has set. GCC 12 uses them only one element at a time.
  static constexpr size_t kStep = 4;

  static void widen(const uint16_t* from, size_t count, float* __restrict to) {
    size_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
    }
    for (; i < count; ++i) to[i] = __builtin_bit_cast(__fp16, from[i]);
  }

  static void narrow(const float* from, size_t count, uint16_t* __restrict to) {
    size_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
    }
    for (; i < count; ++i)
      to[i] = __builtin_bit_cast(uint16_t, static_cast<__fp16>(from[i]));
  }
#else
  static void widen(const uint16_t* from, size_t count, float* __restrict to) {
    for (size_t i = 0; i < count; ++i) to[i] = widen_one(from[i]);
  }

  static void narrow(const float* from, size_t count, uint16_t* __restrict to) {
    for (size_t i = 0; i < count; ++i) to[i] = narrow_one(from[i]);
  }

 private:
  // Branch-free, so that the loops above vectorise. Subnormals go through an
  // integer, because a program may have set the processor to flush subnormal
  // float32s to zero.
  static float widen_one(uint16_t half) {
    const uint32_t magnitude = half & 0x7fff;
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t normal = (magnitude << 13) + ((127 - 15) << 23);
    const uint32_t nonfinite = (magnitude << 13) | 0x7f800000;
    const float small =
        static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    const uint32_t subnormal = __builtin_bit_cast(uint32_t, small);
    const uint32_t finite = magnitude < 0x0400 ? subnormal : normal;
    return __builtin_bit_cast(float,
                              sign | (magnitude < 0x7c00 ? finite : nonfinite));
  }

  // Rounds to nearest even. Adding 0.5 to a value that will be subnormal leaves
  // it, in units of 2^-24, in the lowest bits, rounded by the processor.
  static uint16_t narrow_one(float value) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t sign = (bits & 0x80000000) >> 16;
    const uint32_t rounded =
        magnitude - ((127 - 15) << 23) + 0x0fff + ((magnitude >> 13) & 1);
    const uint32_t normal = rounded >> 13;
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    const uint32_t subnormal =
        __builtin_bit_cast(uint32_t, shifted) - 0x3f000000;
    uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
    half = magnitude < 0x47800000 ? half : 0x7c00;
    half = magnitude > 0x7f800000 ? 0x7e00 : half;
    return static_cast<uint16_t>(sign | half);
  }
#endif
};

struct Bool {
  using Stored = uint8_t;
  using Compute = uint8_t;

  static void widen(const uint8_t* from, size_t count, uint8_t* __restrict to) {
    for (size_t i = 0; i < count; ++i) to[i] = from[i] != 0;
  }

  static void narrow(const uint8_t* from, size_t count,
                     uint8_t* __restrict to) {
    __builtin_memcpy(to, from, count);
  }
};

template <class Format>
concept Converted = requires { &Format::widen; };

template <class Format>
concept Floating = requires { Format::kExponent; };

// Elements that are reduced at a time: the blocks of a few ranks fit the L1
// cache together. Whole multiples of 16, for add_squares(). Of 0.5 to 8 KiB, 2
// KiB was fastest on a Xeon (Skylake), and 4 KiB for 8-byte types.
template <class T>
constexpr size_t kBlock = sizeof(T) == 8 ? 512 : 2048 / sizeof(T);

}  // namespace
}  // namespace paceline::PACELINE_ISA

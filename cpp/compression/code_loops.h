// The loops behind code_table.h. codes_<set>.cc defines PACELINE_ISA, the
// namespace, and includes this.
//
// Values are processed in blocks of kCodeBlock: prepared in a local buffer,
// then stored as codes. The standard library is not used, for the reason given
// in kernels/reduce_blocks.h.
#pragma once

#include "compression/code_table.h"
#include "kernels/formats.h"

namespace paceline::PACELINE_ISA {
namespace {

constexpr float kNan = __builtin_nanf("");
// Sums and their codes stay below this limit, so that 127 times a rounded 127th
// of them is still finite.
constexpr float kHuge = 0x1p127f;

bool is_finite(float x) { return __builtin_fabsf(x) <= __FLT_MAX__; }

float clamp(float x, float limit) {
  x = x < limit ? x : limit;
  return x > -limit ? x : -limit;
}

/// 16-bit floats: one code per value.
template <class Format, uint32_t kLargestBits>
struct Rounded {
  static constexpr float kLargest = __builtin_bit_cast(float, kLargestBits);
  static constexpr size_t kBlockBytes = kCodeBlock * sizeof(uint16_t);

  static void store(const float* x, size_t count, void* codes) {
    Format::narrow(x, count, static_cast<uint16_t*>(codes));
  }
  static void load(const void* codes, size_t count, float* x) {
    Format::widen(static_cast<const uint16_t*>(codes), count, x);
  }
};

using HalfCodes = Rounded<Float16, 0x477fe000>;
using BFloatCodes = Rounded<BFloat16, 0x7f7f0000>;

/// A scale, and one byte per value.
struct ByteCodes {
  static constexpr float kLargest = kHuge;
  static constexpr size_t kBlockBytes = sizeof(float) + kCodeBlock;
  static constexpr int8_t kNanCode = -128;
  static constexpr float kLargestCode = 127;

  static void store(const float* x, size_t count, void* codes) {
    const float largest = largest_finite(x, count);
    float scale = largest / kLargestCode;
    // Below this, 1 / scale is infinite, or the processor may treat `scale` as
    // 0.
    if (scale < __FLT_MIN__) scale = 0;
    const float inverse = scale == 0 ? 0 : 1 / scale;
    __builtin_memcpy(codes, &scale, sizeof(scale));
    int8_t* const bytes = static_cast<int8_t*>(codes) + sizeof(scale);
    for (size_t i = 0; i < count; ++i) {
      const bool finite = is_finite(x[i]);
      // Beyond 2^23 a float32's lowest bit is worth 1: adding this rounds to
      // the nearest integer, ties to even, and leaves it in the lowest bits.
      constexpr float kRounder = 0x1.8p23f;
      const float rounded = (finite ? x[i] * inverse : 0.0f) + kRounder;
      const int32_t code = __builtin_bit_cast(int32_t, rounded) -
                           __builtin_bit_cast(int32_t, kRounder);
      bytes[i] = finite ? static_cast<int8_t>(code) : kNanCode;
    }
  }

  static void load(const void* codes, size_t count, float* x) {
    float scale;
    __builtin_memcpy(&scale, codes, sizeof(scale));
    const int8_t* const bytes =
        static_cast<const int8_t*>(codes) + sizeof(scale);
    for (size_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(bytes[i]) * scale;
      x[i] = bytes[i] == kNanCode ? kNan : value;
    }
  }

 private:
  // As integers, because a maximum of floats is only vectorised with fast-math:
  // without their sign, floats are in the order of their bits.
  static float largest_finite(const float* x, size_t count) {
    int32_t largest = 0;
    for (size_t i = 0; i < count; ++i) {
      const int32_t bits = __builtin_bit_cast(int32_t, x[i]) & 0x7fffffff;
      const int32_t finite = bits < 0x7f800000 ? bits : 0;
      largest = finite > largest ? finite : largest;
    }
    return __builtin_bit_cast(float, largest);
  }
};

/// The largest values of a block, and their places.
struct TopCodes {
  static constexpr float kLargest = BFloatCodes::kLargest;
  static constexpr size_t kBlockBytes =
      kTopValues * (sizeof(uint16_t) + sizeof(uint8_t));
  static constexpr size_t kPlacesAt = kTopValues * sizeof(uint16_t);
  static constexpr int32_t kPlaceBits = 0xff;
  static constexpr int32_t kTaken = -1;

  static void store(const float* x, size_t count, void* codes) {
    alignas(64) int32_t keys[kCodeBlock];
    size_t num_lost = 0;
    for (size_t i = 0; i < kCodeBlock; ++i) keys[i] = kTaken;
    for (size_t i = 0; i < count; ++i) {
      // Without their sign, floats are in the order of their bits, and values
      // that are not finite come first. The place is in the lowest bits, so
      // that one maximum finds both; the first of equal values has the larger
      // key.
      const int32_t bits = __builtin_bit_cast(int32_t, x[i]) & 0x7fffffff;
      num_lost += bits >= 0x7f800000 ? 1 : 0;
      keys[i] = (bits & ~kPlaceBits) | (kPlaceBits - static_cast<int32_t>(i));
    }
    alignas(64) float values[kTopValues];
    auto* const places = static_cast<uint8_t*>(codes) + kPlacesAt;
    for (size_t k = 0; k < kTopValues; ++k) {
      int32_t largest = kTaken;
      for (size_t i = 0; i < kCodeBlock; ++i)
        largest = keys[i] > largest ? keys[i] : largest;
      // If a short last block has no value left, a zero is added to its first
      // place.
      const int32_t place =
          largest == kTaken ? 0 : kPlaceBits - (largest & kPlaceBits);
      values[k] = largest == kTaken ? 0.0f : x[place];
      keys[place] = kTaken;
      places[k] = static_cast<uint8_t>(place);
    }
    if (num_lost > kTopValues) {  // two NaNs for one place: see load()
      for (size_t k = 0; k < kTopValues; ++k) {
        values[k] = kNan;
        places[k] = 0;
      }
    }
    BFloatCodes::store(values, kTopValues, codes);
  }

  static void load(const void* codes, size_t count, float* x) {
    alignas(64) float values[kTopValues];
    BFloatCodes::load(codes, kTopValues, values);
    const auto* const places = static_cast<const uint8_t*>(codes) + kPlacesAt;
    const bool lost = places[0] == places[1] && values[1] != values[1];
    for (size_t i = 0; i < count; ++i) x[i] = lost ? kNan : 0.0f;
    for (size_t k = 0; k < kTopValues; ++k) x[places[k]] += values[k];
  }
};

size_t block_length(size_t first, size_t count) {
  return count - first < kCodeBlock ? count - first : kCodeBlock;
}

// Computes in `sum` what is to be sent of finite values. A value that is not
// finite stays as it is (every NaN as the same one).
void add_error(const float* values, const float* error, float factor,
               size_t count, float* __restrict sum) {
  for (size_t i = 0; i < count; ++i) {
    const float value = clamp(values[i] * factor, kHuge);
    const float whole =
        error == nullptr ? value : clamp(value + error[i], kHuge);
    const float lost = values[i] != values[i] ? kNan : values[i];
    sum[i] = is_finite(values[i]) ? whole : lost;
  }
}

// Limits values to the range of the codes; infinities and NaNs stay.
template <class Codes>
void limit(const float* sum, size_t count, float* __restrict x) {
  for (size_t i = 0; i < count; ++i) {
    const float kept = clamp(sum[i], Codes::kLargest);
    x[i] = is_finite(sum[i]) ? kept : sum[i];
  }
}

template <class Codes>
void encode_blocks(const float* values, const float* error, float* next_error,
                   float factor, size_t count, void* codes) {
  alignas(64) float sum[kCodeBlock];
  alignas(64) float x[kCodeBlock];
  auto* to = static_cast<unsigned char*>(codes);
  for (size_t i = 0; i < count; i += kCodeBlock, to += Codes::kBlockBytes) {
    const size_t length = block_length(i, count);
    const float* const kept = error == nullptr ? nullptr : error + i;
    add_error(values + i, kept, factor, length, sum);
    limit<Codes>(sum, length, x);
    Codes::store(x, length, to);
    if (kept == nullptr) continue;
    Codes::load(to, length, x);
    for (size_t k = 0; k < length; ++k) {
      const float next = sum[k] - x[k];
      // A finite value does not lose its error because of a neighbour's NaN.
      next_error[i + k] = is_finite(next) ? next : kept[k];
    }
  }
}

template <class Codes>
void decode_blocks(const void* const* codes, const float* weights,
                   int num_ranks, size_t count, float* mean) {
  alignas(64) float x[kCodeBlock];
  alignas(64) float sum[kCodeBlock];
  const float divisor = static_cast<float>(num_ranks);
  size_t offset = 0;
  for (size_t i = 0; i < count; i += kCodeBlock, offset += Codes::kBlockBytes) {
    const size_t length = block_length(i, count);
    for (size_t k = 0; k < length; ++k) sum[k] = 0;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const float weight = weights[rank];
      if (weight == 0) continue;
      Codes::load(static_cast<const unsigned char*>(codes[rank]) + offset,
                  length, x);
      for (size_t k = 0; k < length; ++k) sum[k] += weight * x[k];
    }
    for (size_t k = 0; k < length; ++k) {
      const float quotient = sum[k] / divisor;
      mean[i + k] = quotient != quotient ? kNan : quotient;
    }
  }
}

template <class Codes>
constexpr Codec kCodec = {encode_blocks<Codes>, decode_blocks<Codes>};

}  // namespace

constinit const CodecTable kCodecs = {{kCodec<HalfCodes>, kCodec<BFloatCodes>,
                                       kCodec<ByteCodes>, kCodec<TopCodes>}};

}  // namespace paceline::PACELINE_ISA

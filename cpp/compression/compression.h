// Compresses gradients into fewer bytes, with error feedback.
//
// Words: *values* are a rank's float32 gradients, already multiplied by its
// weight. Its *error* is what the other ranks have not yet received of earlier
// gradients.
//
//   encode:       sum = values / weight + error
//                 code = rounded(sum), next error = sum - code
//   decode_mean:  mean = sum over ranks of weight * code, / number of ranks
//
// So weights are applied in float32, to the decoded values, and an error does
// not grow when weights change. A finite value has a finite code: what exceeds
// the largest code stays in the error. An infinity or a NaN arrives as one
// (with 8 bits: as NaN) and does not change its error and its neighbours. Each
// instruction set gives the same bits, as in kernels/.
//
// Eight bits: blocks of 256 values, each as a float32 scale, which is the
// largest magnitude / 127, then a signed byte per value; -128 is NaN.
//
// Top k: of each block of 256 values the 8 of the largest magnitude, as
// bfloat16, then their places as bytes; all others count as 0. Magnitudes that
// differ only after the first 15 bits of their mantissa count as equal, and the
// first of equal ones is taken. A block with more than 8 infinities and NaNs
// arrives as NaNs: otherwise a parameter in it might look finite.
//
// Source: error feedback, Seide et al., "1-Bit Stochastic Gradient Descent",
// Interspeech 2014.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

enum class Encoding : uint8_t {
  kFloat16 = 0,
  kBFloat16 = 1,
  kEightBit = 2,
  kTopK = 3
};

inline constexpr int kNumEncodings = 4;
inline constexpr size_t kCodeBlock = 256;
/// The number of values of a block that kTopK sends.
inline constexpr size_t kTopValues = 8;

/// The name that Python sees; null: no such encoding.
const char* name_of(Encoding encoding);

/// The size of `count` encoded values.
size_t encoded_bytes(Encoding encoding, size_t count);

/// `factor` is 1 / weight. `next_error` is the error after this call; it may be
/// `error`. Both null: no error is kept.
void encode(Encoding encoding, const float* values, const float* error,
            float* next_error, float factor, size_t count, void* codes);

/// Adds up in rank order, in float32. Codes are aligned to 2 bytes. A rank of
/// weight 0 is left out, whatever its codes.
void decode_mean(Encoding encoding, const void* const* codes,
                 const float* weights, int num_ranks, size_t count,
                 float* mean);

}  // namespace paceline

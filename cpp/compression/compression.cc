// Forwards to the set of loops that this processor runs.
#include "compression/compression.h"

#include "compression/code_table.h"
#include "kernels/default_floats.h"
#include "kernels/kernels.h"

namespace paceline {
namespace {

const Codec& codec_of(Encoding encoding) {
  const auto row = static_cast<size_t>(encoding);
#if defined(__x86_64__)
  const Isa isa = current_isa();
  if (isa == Isa::kAvx512) return avx512::kCodecs.of[row];
  if (isa == Isa::kAvx2) return avx2::kCodecs.of[row];
#endif
  return portable::kCodecs.of[row];
}

}  // namespace

size_t encoded_bytes(Encoding encoding, size_t count) {
  if (encoding != Encoding::kEightBit) return count * sizeof(uint16_t);
  return count + (count + kCodeBlock - 1) / kCodeBlock * sizeof(float);
}

void encode(Encoding encoding, const float* values, float* error, float factor,
            size_t count, void* codes) {
  const DefaultFloats default_floats;
  codec_of(encoding).encode(values, error, factor, count, codes);
}

void decode_mean(Encoding encoding, const void* const* codes,
                 const float* weights, int num_ranks, size_t count,
                 float* mean) {
  const DefaultFloats default_floats;
  codec_of(encoding).decode_mean(codes, weights, num_ranks, count, mean);
}

}  // namespace paceline

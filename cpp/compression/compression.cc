// Forwards to the set of loops that this processor runs.
#include "compression/compression.h"

#include "compression/code_table.h"
#include "core/isa.h"
#include "kernels/default_floats.h"

namespace paceline {
namespace {

constexpr PerIsa<const CodecTable> kTables = {PACELINE_VERSIONS_OF(kCodecs)};

const Codec& codec_of(Encoding encoding) {
  return kTables.current().of[static_cast<size_t>(encoding)];
}

}  // namespace

const char* name_of(Encoding encoding) {
  switch (encoding) {
    case Encoding::kFloat16:
      return "float16";
    case Encoding::kBFloat16:
      return "bfloat16";
    case Encoding::kEightBit:
      return "eight_bit";
  }
  return nullptr;
}

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

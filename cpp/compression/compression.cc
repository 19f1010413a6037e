// Calls the set of loops for this processor.
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
    case Encoding::kTopK:
      return "top_k";
  }
  return nullptr;
}

size_t encoded_bytes(Encoding encoding, size_t count) {
  const size_t blocks = (count + kCodeBlock - 1) / kCodeBlock;
  switch (encoding) {
    case Encoding::kEightBit:
      return count + blocks * sizeof(float);
    case Encoding::kTopK:
      return blocks * kTopValues * (sizeof(uint16_t) + sizeof(uint8_t));
    default:
      return count * sizeof(uint16_t);
  }
}

void encode(Encoding encoding, const float* values, const float* error,
            float* next_error, float factor, size_t count, void* codes) {
  const DefaultFloats default_floats;
  codec_of(encoding).encode(values, error, next_error, factor, count, codes);
}

void decode_mean(Encoding encoding, const void* const* codes,
                 const float* weights, int num_ranks, size_t count,
                 float* mean) {
  const DefaultFloats default_floats;
  codec_of(encoding).decode_mean(codes, weights, num_ranks, count, mean);
}

}  // namespace paceline

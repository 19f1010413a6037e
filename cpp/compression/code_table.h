// Declarations shared by the dispatcher (compression.cc) and the compiled sets
// of loops (codes_*). Only plain data and declarations, as in
// kernels/kernel_table.h.
#pragma once

#include "compression/compression.h"

namespace paceline {

/// The loops of one encoding; the arguments are those of compression.h.
struct Codec {
  void (*encode)(const float* values, const float* error, float* next_error,
                 float factor, size_t count, void* codes);
  void (*decode_mean)(const void* const* codes, const float* weights,
                      int num_ranks, size_t count, float* mean);
};

struct CodecTable {
  Codec of[kNumEncodings];
};

namespace portable {
extern const CodecTable kCodecs;
}
namespace avx2 {
extern const CodecTable kCodecs;
}
namespace avx512 {
extern const CodecTable kCodecs;
}
namespace neon {
extern const CodecTable kCodecs;
}

}  // namespace paceline

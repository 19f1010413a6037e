#include "core/region_words.h"

namespace paceline {
namespace {

// The finalizer of MurmurHash3: every input bit reaches every output bit.
constexpr uint64_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return x ^ x >> 33;
}

}  // namespace

uint64_t CallRecord::fingerprint() const {
  const uint64_t shape =
      static_cast<uint64_t>(kind) | uint64_t{dtype} << 8 | uint64_t{op} << 16 |
      static_cast<uint64_t>(static_cast<uint32_t>(root)) << 32;
  // Never 0, which means that no rank has arrived.
  return mix(number ^ mix(shape ^ mix(count))) | 1;
}

}  // namespace paceline

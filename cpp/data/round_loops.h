// The loops behind rounds.h; PACELINE_ISA names the instruction set.
#include "data/rounds.h"

namespace paceline::PACELINE_ISA {
namespace {

// Without a branch, so that it vectorises. `range` may exceed 2^31, so the sum
// of two digits might not fit.
void add_hash(uint32_t* __restrict changed, const uint32_t* __restrict read,
              size_t count, uint32_t range, RoundKey key) {
  for (size_t i = 0; i < count; ++i) {
    uint32_t h = read[i] ^ key.before_first;
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= (h >> 13) ^ key.before_second;
    h *= 0xc2b2ae35u;
    h ^= h >> 16;
    const auto added = static_cast<uint32_t>((uint64_t{h} * range) >> 32);
    const uint32_t gap = range - added;
    const uint32_t digit = changed[i];
    changed[i] = digit >= gap ? digit - gap : digit + added;
  }
}

}  // namespace

void apply_rounds(const Digits& d, const RoundKey* keys) {
  for (int round = 0; round < kNumRounds; round += 2) {
    add_hash(d.left, d.right, d.count, d.rows, keys[round]);
    add_hash(d.right, d.left, d.count, d.columns, keys[round + 1]);
  }
}

}  // namespace paceline::PACELINE_ISA

// A permutation of [0, length) that is computed, not stored.
//
// Words: a *place* is a position in the shuffled order, an *index* the value at
// that place. Up to kMaxTable places are shuffled in a table, so that all
// orders are equally likely. Beyond that, a place is split into two digits,
// left of [0, rows) and right of [0, columns), with rows * columns just above
// length. kNumRounds times, a keyed hash of one digit is added to the other,
// modulo its range. Each round can be undone, so no two places get the same
// result. A result outside [0, length), at most one in rows, goes through the
// rounds again until it is inside ("cycle walking").
//
// Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
// 2002 (generalised Feistel and cycle walking); the hash is MurmurHash3's
// finaliser with a key before each multiplication.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "data/rounds.h"

namespace paceline {

inline constexpr uint64_t kMaxTable = 4096;

class Permutation {
 public:
  /// `length` up to 2^63; each key gives another permutation.
  Permutation(uint64_t length, uint64_t key);

  uint64_t length() const { return length_; }

  /// out[i] = index at place start + i * stride; all places must be below
  /// length().
  void fill(int64_t* out, size_t count, uint64_t start, uint64_t stride) const;

  /// Replaces each place by its index; all places must be below length().
  void map(int64_t* places, size_t count) const;

 private:
  void shuffle_table(uint64_t key);
  void permute(uint32_t* left, uint32_t* right, size_t count,
               int64_t* out) const;
  uint64_t walk(uint64_t outside) const;

  uint64_t length_;
  uint32_t rows_ = 0;
  uint64_t columns_ = 0;  ///< fits 32 bits; wide because it multiplies
  RoundKey keys_[kNumRounds];
  std::vector<uint16_t> table_;
};

}  // namespace paceline

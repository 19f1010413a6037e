// The rounds of a permutation, compiled once per instruction set.
//
// Only plain data and declarations, as in kernels/kernel_table.h: a function
// defined here would be compiled for several instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

inline constexpr int kNumRounds = 8;

struct RoundKey {
  uint32_t before_first;   ///< mixed in before the first multiplication
  uint32_t before_second;  ///< mixed in before the second one
};

/// The digits of `count` places; all left[i] < rows and right[i] < columns.
struct Digits {
  uint32_t* left;
  uint32_t* right;
  size_t count;
  uint32_t rows;
  uint32_t columns;
};

using ApplyRounds = void(const Digits& digits, const RoundKey* keys);

namespace portable {
void apply_rounds(const Digits& digits, const RoundKey* keys);
}
namespace avx2 {
void apply_rounds(const Digits& digits, const RoundKey* keys);
}
namespace avx512 {
void apply_rounds(const Digits& digits, const RoundKey* keys);
}
namespace neon {
void apply_rounds(const Digits& digits, const RoundKey* keys);
}

}  // namespace paceline

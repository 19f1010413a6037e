#include "data/permutation.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/isa.h"

namespace paceline {
namespace {

// The digits of a block stay in the first-level cache.
constexpr size_t kBlock = 512;

// Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
// OOPSLA 2014.
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// A number below `bound`, all equally likely: Lemire, "Fast random integer
  /// generation in an interval", TOMACS 29(1), 2019.
  uint64_t below(uint32_t bound) {
    const uint32_t rejected = -bound % bound;
    for (;;) {
      const uint64_t product = (next() >> 32) * bound;
      if (static_cast<uint32_t>(product) >= rejected) return product >> 32;
    }
  }

 private:
  uint64_t state_;
};

uint64_t ceil_sqrt(uint64_t n) {
  auto root = static_cast<uint64_t>(std::sqrt(static_cast<long double>(n)));
  while (root * root >= n) --root;
  while (root * root < n) ++root;
  return root;
}

constexpr PerIsa<ApplyRounds> kRounds = {PACELINE_VERSIONS_OF(apply_rounds)};

}  // namespace

Permutation::Permutation(uint64_t length, uint64_t key) : length_(length) {
  assert(length <= uint64_t{1} << 63);
  if (length <= kMaxTable) {
    shuffle_table(key);
    return;
  }
  rows_ = static_cast<uint32_t>(ceil_sqrt(length));
  columns_ = (length + rows_ - 1) / rows_;
  SplitMix64 random(key);
  for (RoundKey& round : keys_) {
    const uint64_t bits = random.next();
    round = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
  }
}

void Permutation::shuffle_table(uint64_t key) {
  table_.resize(length_);
  std::iota(table_.begin(), table_.end(), uint16_t{0});
  SplitMix64 random(key);
  for (size_t left = table_.size(); left > 1; --left)
    std::swap(table_[left - 1],
              table_[random.below(static_cast<uint32_t>(left))]);
}

void Permutation::fill(int64_t* out, size_t count, uint64_t start,
                       uint64_t stride) const {
  if (!table_.empty()) {
    for (size_t i = 0; i < count; ++i) out[i] = table_[start + i * stride];
    return;
  }
  if (count == 0) return;
  uint32_t left[kBlock];
  uint32_t right[kBlock];
  // Both digits are incremented; a division for each place would take longer
  // than all rounds.
  uint64_t l = start / columns_;
  uint64_t r = start % columns_;
  const uint64_t step_l = stride / columns_;
  const uint64_t step_r = stride % columns_;
  while (count > 0) {
    const size_t n = std::min(count, kBlock);
    for (size_t i = 0; i < n; ++i) {
      left[i] = static_cast<uint32_t>(l);
      right[i] = static_cast<uint32_t>(r);
      r += step_r;
      const bool carries = r >= columns_;
      r -= carries ? columns_ : 0;
      l += step_l + carries;
    }
    permute(left, right, n, out);
    out += n;
    count -= n;
  }
}

void Permutation::map(int64_t* places, size_t count) const {
  if (!table_.empty()) {
    for (size_t i = 0; i < count; ++i) places[i] = table_[places[i]];
    return;
  }
  uint32_t left[kBlock];
  uint32_t right[kBlock];
  while (count > 0) {
    const size_t n = std::min(count, kBlock);
    for (size_t i = 0; i < n; ++i) {
      const auto place = static_cast<uint64_t>(places[i]);
      left[i] = static_cast<uint32_t>(place / columns_);
      right[i] = static_cast<uint32_t>(place % columns_);
    }
    permute(left, right, n, places);
    places += n;
    count -= n;
  }
}

void Permutation::permute(uint32_t* left, uint32_t* right, size_t count,
                          int64_t* out) const {
  const auto columns = static_cast<uint32_t>(columns_);
  kRounds.current()({left, right, count, rows_, columns}, keys_);
  for (size_t i = 0; i < count; ++i)
    out[i] = static_cast<int64_t>(left[i] * columns_ + right[i]);
  for (size_t i = 0; i < count; ++i) {
    const auto index = static_cast<uint64_t>(out[i]);
    if (index >= length_) out[i] = static_cast<int64_t>(walk(index));
  }
}

// This ends: the rounds are a bijection, so the walk from a place inside must
// come back inside.
uint64_t Permutation::walk(uint64_t outside) const {
  const auto columns = static_cast<uint32_t>(columns_);
  while (outside >= length_) {
    auto left = static_cast<uint32_t>(outside / columns_);
    auto right = static_cast<uint32_t>(outside % columns_);
    kRounds.portable()({&left, &right, 1, rows_, columns}, keys_);
    outside = left * columns_ + right;
  }
  return outside;
}

}  // namespace paceline

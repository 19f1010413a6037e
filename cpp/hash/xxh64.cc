#include "hash/xxh64.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace paceline {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the hash reads little-endian numbers");

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5;

template <class T>
T read(const std::byte* at) {
  T value;
  memcpy(&value, at, sizeof(value));
  return value;
}

uint64_t round(uint64_t lane, uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

uint64_t merge(uint64_t hash, uint64_t lane) {
  return (hash ^ round(0, lane)) * kPrime1 + kPrime4;
}

}  // namespace

uint64_t xxh64(const void* data, size_t nbytes, uint64_t seed) {
  const auto* at = static_cast<const std::byte*>(data);
  const std::byte* const end = at + nbytes;
  uint64_t hash = seed + kPrime5;
  if (nbytes >= 32) {
    uint64_t a = seed + kPrime1 + kPrime2;
    uint64_t b = seed + kPrime2;
    uint64_t c = seed;
    uint64_t d = seed - kPrime1;
    for (; end - at >= 32; at += 32) {
      a = round(a, read<uint64_t>(at));
      b = round(b, read<uint64_t>(at + 8));
      c = round(c, read<uint64_t>(at + 16));
      d = round(d, read<uint64_t>(at + 24));
    }
    hash =
        std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
    for (const uint64_t lane : {a, b, c, d}) hash = merge(hash, lane);
  }
  hash += nbytes;
  for (; end - at >= 8; at += 8) {
    hash ^= round(0, read<uint64_t>(at));
    hash = std::rotl(hash, 27) * kPrime1 + kPrime4;
  }
  for (; end - at >= 4; at += 4) {
    hash ^= read<uint32_t>(at) * kPrime1;
    hash = std::rotl(hash, 23) * kPrime2 + kPrime3;
  }
  for (; at < end; ++at) {
    hash ^= static_cast<uint64_t>(*at) * kPrime5;
    hash = std::rotl(hash, 11) * kPrime1;
  }
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

uint64_t sample_hash(const void* data, size_t nbytes, uint64_t seed) {
  constexpr size_t kLine = 64;
  if (nbytes <= 4 * kLine) return xxh64(data, nbytes, seed);
  const auto* begin = static_cast<const std::byte*>(data);
  uint64_t hash = xxh64(begin, kLine, seed);
  for (size_t piece = 0; piece < nbytes; piece += kSampleEvery) {
    // Not at the same place in each block, because rows may be as long as a
    // block.
    const size_t lines = (std::min(kSampleEvery, nbytes - piece)) / kLine;
    if (lines == 0) break;
    const size_t line = (piece / kSampleEvery * kPrime1 >> 32) % lines;
    hash = xxh64(begin + piece + line * kLine, kLine, hash);
  }
  return xxh64(begin + nbytes - kLine, kLine, hash);
}

}  // namespace paceline

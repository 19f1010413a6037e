// 64-bit hashes of memory: of all of it, to compare replicas, and of samples,
// to see whether it was written to.
//
// The hash is XXH64, by Yann Collet, according to its specification
// (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md): the same on
// every machine, and in one thread about as fast as memory is read. It detects
// accidents, not forgeries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

uint64_t xxh64(const void* data, size_t nbytes, uint64_t seed = 0);

/// A hash of sampled lines of 64 bytes: one in each block of kSampleEvery
/// bytes, always the same ones, and the first and the last line. If all of the
/// memory changes, so does the hash; if only some places change, it may not.
uint64_t sample_hash(const void* data, size_t nbytes, uint64_t seed = 0);

inline constexpr size_t kSampleEvery = 16384;

}  // namespace paceline

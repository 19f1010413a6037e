// Hashes of memory as Python calls them.
#pragma once

#include <vector>

#include "bind/call.h"
#include "bind/py_host_group.h"
#include "hash/xxh64.h"

namespace paceline {

inline std::vector<uint64_t> hash_all(const std::vector<Pointer>& pointers,
                                      const std::vector<size_t>& sizes) {
  if (pointers.size() != sizes.size())
    misuse("hash_all: pointers and sizes must have one entry per piece");
  const nb::object nobody = nb::none();
  CallHooks hooks(nullptr, nobody, nullptr, /*unlock_now=*/true);
  std::vector<uint64_t> hashes;
  for (size_t i = 0; i < sizes.size(); ++i)
    hashes.push_back(xxh64(as_pointer(pointers[i]), sizes[i]));
  return hashes;
}

inline uint64_t sample_all(const std::vector<Pointer>& pointers,
                           const std::vector<size_t>& sizes) {
  if (pointers.size() != sizes.size())
    misuse("sample_all: pointers and sizes must have one entry per piece");
  uint64_t hash = 0;
  for (size_t i = 0; i < sizes.size(); ++i)
    hash = sample_hash(as_pointer(pointers[i]), sizes[i], hash);
  return hash;
}

/// Adds them to the module.
inline void bind_hash(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "hash_bytes",
      [](nb::bytes bytes) { return xxh64(bytes.c_str(), bytes.size()); },
      "bytes"_a);
  m.def("hash_all", &hash_all, "pointers"_a, "sizes"_a,
        "The XXH64 of each piece of memory.");
  m.def("sample_all", &sample_all, "pointers"_a, "sizes"_a,
        "A hash of a few lines of each piece of memory.");
}

}  // namespace paceline

// Hashes of memory as Python calls them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bind/bindings.h"
#include "bind/call.h"
#include "bind/pointer.h"
#include "hash/xxh64.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

std::vector<uint64_t> hash_all(const std::vector<Pointer>& pointers,
                               const std::vector<size_t>& sizes) {
  if (pointers.size() != sizes.size())
    misuse("hash_all: pointers and sizes must have one entry per piece");
  check_memory(pointers, sizes, "hash_all");
  std::vector<uint64_t> hashes;
  without_lock([&] {
    for (size_t i = 0; i < sizes.size(); ++i)
      hashes.push_back(xxh64(as_pointer(pointers[i]), sizes[i]));
  });
  return hashes;
}

uint64_t sample_all(const std::vector<Pointer>& pointers,
                    const std::vector<size_t>& sizes) {
  if (pointers.size() != sizes.size())
    misuse("sample_all: pointers and sizes must have one entry per piece");
  check_memory(pointers, sizes, "sample_all");
  uint64_t hash = 0;
  for (size_t i = 0; i < sizes.size(); ++i)
    hash = sample_hash(as_pointer(pointers[i]), sizes[i], hash);
  return hash;
}

}  // namespace

void bind_hash(nb::module_& m) {
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

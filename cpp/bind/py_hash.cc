// Python functions that hash memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bind/bindings.h"
#include "bind/call.h"
#include "bind/dlpack.h"
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

/// A hash of the addresses and layouts of tensors, but not of their values; 0:
/// one of them cannot be read.
uint64_t hash_layouts(nb::list tensors) {
  if (tensors.size() == 0) return 0;
  const dlpack::Borrow borrow = dlpack::find_borrow(tensors[0]);
  std::vector<int64_t> facts;
  facts.reserve(8 * tensors.size());
  for (const nb::handle each : tensors) {
    dlpack::Tensor tensor;
    if (borrow(each.ptr(), &tensor) != 0) {
      PyErr_Clear();
      return 0;
    }
    const auto [code, bits, lanes] = tensor.dtype;
    facts.push_back(reinterpret_cast<intptr_t>(Py_TYPE(each.ptr())));
    facts.push_back(reinterpret_cast<intptr_t>(tensor.begin()));
    facts.push_back(int64_t{tensor.device.type} << 32 | tensor.device.id);
    facts.push_back(int64_t{code} << 32 | int64_t{bits} << 16 | lanes);
    facts.push_back(tensor.ndim);
    for (int32_t i = 0; i < tensor.ndim; ++i) {
      facts.push_back(tensor.shape[i]);
      if (tensor.strides != nullptr) facts.push_back(tensor.strides[i]);
    }
  }
  return xxh64(facts.data(), facts.size() * sizeof(int64_t));
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
  m.def("hash_layouts", &hash_layouts, "tensors"_a,
        "A hash of where tensors of one framework lie, and in which form.");
}

}  // namespace paceline

// The Python class for Permutation: checks places, and takes numpy arrays.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "bind/array_buffer.h"
#include "bind/bindings.h"
#include "data/permutation.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

class PyPermutation {
 public:
  PyPermutation(uint64_t length, uint64_t key)
      : permutation_(checked(length), key) {}

  uint64_t length() const { return permutation_.length(); }

  void fill(nb::handle out, uint64_t start, uint64_t stride) const {
    const ArrayBuffer array = int64_array(out);
    if (array.count == 0) return;
    const auto last =
        start + static_cast<unsigned __int128>(array.count - 1) * stride;
    if (last >= length())
      throw nb::index_error("fill: a place is beyond the permutation");
    permutation_.fill(static_cast<int64_t*>(array.data), array.count, start,
                      stride);
  }

  void map(nb::handle places) const {
    const ArrayBuffer array = int64_array(places);
    auto* values = static_cast<int64_t*>(array.data);
    for (size_t i = 0; i < array.count; ++i) {
      if (static_cast<uint64_t>(values[i]) >= length())
        throw nb::index_error("map: a place is beyond the permutation");
    }
    permutation_.map(values, array.count);
  }

 private:
  static uint64_t checked(uint64_t length) {
    if (length > uint64_t{1} << 63)
      throw nb::value_error("a permutation has at most 2**63 places");
    return length;
  }
  static ArrayBuffer int64_array(nb::handle object) {
    const auto array = array_buffer(object.ptr());
    if (!array || array->dtype != DType::kInt64)
      throw nb::type_error("expected a C-contiguous, writable int64 array");
    return *array;
  }

  Permutation permutation_;
};

}  // namespace

void bind_permutation(nb::module_& m) {
  nb::class_<PyPermutation>(m, "Permutation")
      .def(nb::init<uint64_t, uint64_t>(), "length"_a, "key"_a)
      .def_prop_ro("length", &PyPermutation::length)
      .def("fill", &PyPermutation::fill, "out"_a, "start"_a, "stride"_a = 1,
           "out[i] = the index at place start + i * stride.")
      .def("map", &PyPermutation::map, "places"_a,
           "Replaces each place by its index.");
}

}  // namespace paceline

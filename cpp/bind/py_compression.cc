// Python functions for the compression of gradients. They take addresses, and
// release Python's lock while the loops run.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bind/bindings.h"
#include "bind/call.h"
#include "bind/pointer.h"
#include "compression/compression.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

Encoding checked_encoding(int encoding) {
  if (encoding < 0 || encoding >= kNumEncodings)
    throw nb::value_error("no such encoding");
  return static_cast<Encoding>(encoding);
}

size_t encoded_bytes_of(int encoding, size_t count) {
  return encoded_bytes(checked_encoding(encoding), count);
}

void encode_at(int encoding, Pointer values, Pointer error, Pointer next_error,
               float factor, size_t count, Pointer codes) {
  const Encoding chosen = checked_encoding(encoding);
  memory_at(values, count * sizeof(float), "encode");
  memory_at(codes, encoded_bytes(chosen, count), "encode");
  without_lock([&] {
    encode(chosen, static_cast<const float*>(as_pointer(values)),
           static_cast<const float*>(as_pointer(error)),
           static_cast<float*>(as_pointer(next_error)), factor, count,
           as_pointer(codes));
  });
}

void decode_mean_at(int encoding, const std::vector<Pointer>& codes,
                    const std::vector<float>& weights, size_t count,
                    Pointer mean) {
  const Encoding chosen = checked_encoding(encoding);
  if (codes.size() != weights.size())
    throw nb::value_error("codes and weights must have one entry per rank");
  check_memory(codes, encoded_bytes(chosen, count), "decode_mean");
  memory_at(mean, count * sizeof(float), "decode_mean");
  std::vector<const void*> parts;
  for (const Pointer p : codes) parts.push_back(as_pointer(p));
  without_lock([&] {
    decode_mean(chosen, parts.data(), weights.data(),
                static_cast<int>(parts.size()), count,
                static_cast<float*>(as_pointer(mean)));
  });
}

}  // namespace

void bind_compression(nb::module_& m) {
  m.def("encoded_bytes", &encoded_bytes_of, "encoding"_a, "count"_a);
  m.def("encode", &encode_at, "encoding"_a, "values"_a, "error"_a,
        "next_error"_a, "factor"_a, "count"_a, "codes"_a,
        "`error` and `next_error` may be 0: no error is kept.");
  m.def("decode_mean", &decode_mean_at, "encoding"_a, "codes"_a, "weights"_a,
        "count"_a, "mean"_a);
}

}  // namespace paceline

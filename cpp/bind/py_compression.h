// The compression of gradients as Python calls it: addresses, and Python's lock
// given away while the loops run.
#pragma once

#include <vector>

#include "bind/call.h"
#include "bind/py_host_group.h"
#include "compression/compression.h"

namespace paceline {

inline Encoding checked_encoding(int encoding) {
  if (encoding < 0 || encoding >= kNumEncodings)
    throw nb::value_error("no such encoding");
  return static_cast<Encoding>(encoding);
}

template <class Call>
void without_lock(Call&& call) {
  const nb::object nobody = nb::none();
  CallHooks hooks(nullptr, nobody, nullptr, /*unlock_now=*/true);
  call();
}

inline size_t py_encoded_bytes(int encoding, size_t count) {
  return encoded_bytes(checked_encoding(encoding), count);
}

inline void py_encode(int encoding, Pointer values, Pointer error, float factor,
                      size_t count, Pointer codes) {
  const Encoding chosen = checked_encoding(encoding);
  without_lock([&] {
    encode(chosen, static_cast<const float*>(as_pointer(values)),
           static_cast<float*>(as_pointer(error)), factor, count,
           as_pointer(codes));
  });
}

inline void py_decode_mean(int encoding, const std::vector<Pointer>& codes,
                           const std::vector<float>& weights, size_t count,
                           Pointer mean) {
  const Encoding chosen = checked_encoding(encoding);
  if (codes.size() != weights.size())
    throw nb::value_error("codes and weights must have one entry per rank");
  std::vector<const void*> parts;
  for (const Pointer p : codes) parts.push_back(as_pointer(p));
  without_lock([&] {
    decode_mean(chosen, parts.data(), weights.data(),
                static_cast<int>(parts.size()), count,
                static_cast<float*>(as_pointer(mean)));
  });
}

}  // namespace paceline

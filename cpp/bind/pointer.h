// Addresses, which Python holds as integers.
#pragma once

#include <cstdint>

namespace paceline {

using Pointer = uintptr_t;

inline void* as_pointer(Pointer pointer) {
  return reinterpret_cast<void*>(pointer);
}

}  // namespace paceline

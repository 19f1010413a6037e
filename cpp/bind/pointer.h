// Addresses, which Python holds as integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/failure.h"

namespace paceline {

using Pointer = uintptr_t;

inline void* as_pointer(Pointer pointer) {
  return reinterpret_cast<void*>(pointer);
}

/// The memory of `bytes` bytes that an argument of `call` points to. Refuses an
/// address of 0 with a size above 0, which is what a tensor without memory of
/// its own reports, because it consists of other tensors, or of none.
inline void* memory_at(Pointer pointer, size_t bytes, const char* call) {
  if (pointer == 0 && bytes > 0) [[unlikely]] {
    misuse(std::string(call) + " got an address of 0 with " +
           std::to_string(bytes) +
           " bytes behind it, as of a tensor without memory of its own");
  }
  return as_pointer(pointer);
}

inline void check_memory(const std::vector<Pointer>& pointers,
                         const std::vector<size_t>& sizes, const char* call) {
  for (size_t i = 0; i < pointers.size(); ++i)
    memory_at(pointers[i], sizes[i], call);
}

inline void check_memory(const std::vector<Pointer>& pointers, size_t bytes,
                         const char* call) {
  for (const Pointer each : pointers) memory_at(each, bytes, call);
}

}  // namespace paceline

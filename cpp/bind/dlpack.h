// The parts of DLPack 1.x that we use: the layout of a tensor, and the table of
// C functions that a framework offers as `__dlpack_c_exchange_api__`. See
// https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "bind/failures.h"

namespace paceline::dlpack {

inline constexpr uint32_t kMajorVersion = 1;
inline constexpr int32_t kCpu = 1;
inline constexpr const char* kCapsuleName = "dlpack_exchange_api";

struct Device {
  int32_t type;
  int32_t id;

  bool operator==(const Device&) const = default;
};

struct DType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;

  bool operator==(const DType&) const = default;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;

  void* begin() const { return static_cast<char*>(data) + byte_offset; }
  /// The size of the array in bytes if its elements are contiguous, else 0.
  size_t nbytes_in_a_row() const {
    int64_t count = 1;
    for (int32_t i = ndim; i-- > 0;) {
      if (strides != nullptr && shape[i] != 1 && strides[i] != count) return 0;
      count *= shape[i];
    }
    return static_cast<size_t>(count) * dtype.bits * dtype.lanes / 8;
  }
};

/// Borrows the tensor of a Python object; -1: a Python exception is set.
using Borrow = int (*)(void* py_object, Tensor* out);

struct ExchangeApi {
  uint32_t major_version;
  uint32_t minor_version;
  ExchangeApi* prev_api;
  void* allocate;
  void* export_managed;
  void* import_managed;
  Borrow borrow;  ///< may be null
  void* current_stream;
};

/// The function that reads tensors of the framework that made this one.
inline Borrow find_borrow(nanobind::handle tensor) {
  const nanobind::object capsule = tensor.attr("__dlpack_c_exchange_api__");
  auto* api = static_cast<ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), kCapsuleName));
  while (api != nullptr && api->major_version > kMajorVersion)
    api = api->prev_api;
  if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
  if (api == nullptr || api->borrow == nullptr)
    misuse("the framework has no DLPack exchange API of version 1");
  return api->borrow;
}

}  // namespace paceline::dlpack

// What we use of DLPack 1.x: the layout of a tensor, and the table of C
// functions that a framework offers as `__dlpack_c_exchange_api__`.
// See https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace paceline::dlpack {

inline constexpr uint32_t kMajorVersion = 1;
inline constexpr int32_t kCpu = 1;
inline constexpr const char* kCapsuleName = "dlpack_exchange_api";

struct Device {
  int32_t type;
  int32_t id;
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
};

struct ExchangeApi {
  uint32_t major_version;
  uint32_t minor_version;
  ExchangeApi* prev_api;
  void* allocate;
  void* export_managed;
  void* import_managed;
  /// Borrows what the Python object holds; -1: a Python exception is set. May
  /// be null.
  int (*borrow)(void* py_object, Tensor* out);
  void* current_stream;
};

}  // namespace paceline::dlpack

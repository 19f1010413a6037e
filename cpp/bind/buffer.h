// numpy arrays by the buffer protocol: a tenth of the time that asking the
// array's attributes takes in Python.
#pragma once

#include <Python.h>

#include <optional>

#include "kernels/kernels.h"

namespace paceline {

/// A writable, C-contiguous array of a type that the kernels know, for as long
/// as this object lives.
class ArrayBuffer {
 public:
  explicit ArrayBuffer(PyObject* array) {
    constexpr int kFlags = PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT;
    if (PyObject_GetBuffer(array, &view_, kFlags) != 0) {
      PyErr_Clear();  // the caller finds out what is wrong, and says so better
      return;
    }
    is_held_ = true;
    dtype_ = parse(view_.format, view_.itemsize);
  }
  ~ArrayBuffer() {
    if (is_held_) PyBuffer_Release(&view_);
  }
  ArrayBuffer(const ArrayBuffer&) = delete;
  ArrayBuffer& operator=(const ArrayBuffer&) = delete;

  /// Nothing: it is no such array.
  const std::optional<DType>& dtype() const { return dtype_; }
  void* data() const { return view_.buf; }
  size_t count() const {
    return static_cast<size_t>(view_.len) / dtype_bytes(*dtype_);
  }

 private:
  // One letter in native byte order; everything else takes the slow way.
  static std::optional<DType> parse(const char* format, Py_ssize_t bytes) {
    if (format == nullptr || format[0] == '\0' || format[1] != '\0') return {};
    switch (format[0]) {
      case 'f':
        return DType::kFloat32;
      case 'd':
        return DType::kFloat64;
      case 'e':
        return DType::kFloat16;
      case 'b':
        return DType::kInt8;
      case 'B':
        return DType::kUInt8;
      case '?':
        return DType::kBool;
      case 'h':
      case 'i':
      case 'l':
      case 'q':
        return bytes == 2   ? DType::kInt16
               : bytes == 4 ? DType::kInt32
                            : DType::kInt64;
      default:
        return {};
    }
  }

  Py_buffer view_{};
  bool is_held_ = false;
  std::optional<DType> dtype_;
};

}  // namespace paceline

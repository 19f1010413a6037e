// The only file that includes numpy, because each file that does must import
// numpy's function table.
#include "bind/array_buffer.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

namespace paceline {
namespace {

std::optional<DType> dtype_of(PyArrayObject* array) {
  switch (PyArray_TYPE(array)) {
    case NPY_FLOAT:
      return DType::kFloat32;
    case NPY_DOUBLE:
      return DType::kFloat64;
    case NPY_HALF:
      return DType::kFloat16;
    case NPY_BYTE:
      return DType::kInt8;
    case NPY_UBYTE:
      return DType::kUInt8;
    case NPY_BOOL:
      return DType::kBool;
    case NPY_SHORT:
      return DType::kInt16;
    case NPY_INT:
      return DType::kInt32;
    case NPY_LONG:
    case NPY_LONGLONG:
      return PyArray_ITEMSIZE(array) == 4 ? DType::kInt32 : DType::kInt64;
    default:  // types of other packages, bfloat16 among them
      return {};
  }
}

}  // namespace

bool import_numpy() { return PyArray_ImportNumPyAPI() == 0; }

std::optional<ArrayBuffer> array_buffer(PyObject* object) {
  if (!PyArray_Check(object)) return {};
  auto* array = reinterpret_cast<PyArrayObject*>(object);
  const std::optional<DType> dtype = dtype_of(array);
  if (!dtype || !PyArray_ISCARRAY(array)) return {};
  return ArrayBuffer{PyArray_DATA(array),
                     static_cast<size_t>(PyArray_SIZE(array)), *dtype};
}

}  // namespace paceline

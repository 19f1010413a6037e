// How many tensors lie in one storage, without a call of their framework.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace paceline {

namespace nb = nanobind;

/// Tells how often the storage of a tensor is used.
///
/// torch has only calls for this that take as long as the rest of a hook (they
/// make a Python object for each storage). But the number lies in memory at a
/// fixed distance: in a tensor's Python object there is the address of torch's
/// own object, in that one the address of the storage, and in that one the
/// count. Where these lie is not written down anywhere, so it is learned from
/// tensors whose addresses and counts torch tells (see `uses_of_storages` in
/// paceline/torch). If they lie nowhere, the slow call is asked instead.
class StorageUses {
 public:
  struct Use {
    uintptr_t storage;  ///< its address; 0: the tensor has none
    size_t count;       ///< the tensors that lie in it
  };

  /// `samples` are tensors; `tell(tensor)` returns the addresses of torch's
  /// object and of the storage, and the count.
  StorageUses(const nb::list& samples, nb::object tell);

  /// A tensor of another class than the samples counts as one without storage.
  /// Throws if torch raises.
  Use of(PyObject* tensor) const;
  /// Whether the numbers are read where they lie.
  bool is_direct() const { return is_direct_; }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(tell_.ptr());
    Py_VISIT(type_.ptr());
    return 0;
  }
  void clear() { tell_.reset(); }

 private:
  struct Told {
    uintptr_t tensor;
    Use use;
  };
  Told told_of(nb::handle tensor) const;
  Use read(PyObject* tensor) const {
    const uintptr_t storage =
        word_at(word_at(reinterpret_cast<uintptr_t>(tensor) + of_tensor_) +
                of_storage_);
    if (storage == 0) return {0, 0};
    const uint64_t counts = word_at(storage + kOfCount);
    return {storage, static_cast<uint32_t>(counts) - (counts >> 63)};
  }
  static uintptr_t word_at(uintptr_t address) {
    uintptr_t word;
    std::memcpy(&word, reinterpret_cast<const void*>(address), sizeof(word));
    return word;
  }

  /// Behind the pointer to the table of virtual functions: the count is the low
  /// half of a word. Its highest bit says that a Python object of the storage
  /// counts, too.
  static constexpr size_t kOfCount = sizeof(void*);

  nb::object tell_;
  nb::object type_;
  bool is_direct_ = false;
  size_t of_tensor_ = 0;   ///< in the Python object
  size_t of_storage_ = 0;  ///< in torch's object
};

}  // namespace paceline

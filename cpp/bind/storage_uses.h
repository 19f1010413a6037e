// Counts the tensors that share a storage, without a call into their framework.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace paceline {

namespace nb = nanobind;

/// Counts the tensors that use a tensor's storage.
class StorageUses {
 public:
  struct Use {
    uintptr_t storage;  ///< its address; 0: the tensor has none
    size_t count;       ///< the number of tensors that use it
  };

  virtual ~StorageUses() = default;
  /// Throws if the framework raises.
  virtual Use of(PyObject* tensor) const = 0;

 protected:
  static uintptr_t word_at(uintptr_t address) {
    uintptr_t word;
    std::memcpy(&word, reinterpret_cast<const void*>(address), sizeof(word));
    return word;
  }
};

/// For storages that count their uses themselves.
///
/// torch offers only calls for this that take as long as the rest of a hook
/// (they make a Python object for each storage). But the count can be read from
/// memory at fixed offsets: a tensor's Python object holds the address of
/// torch's own object, which holds the address of the storage, which holds the
/// count. These offsets are not documented, so they are learned from tensors
/// whose addresses and counts torch returns (see `uses_of_storages` in
/// paceline/torch). If they are not found, the slow call is used.
class CountedStorageUses final : public StorageUses {
 public:
  /// `samples` are tensors; `describe(tensor)` returns the addresses of torch's
  /// object and of the storage, and the count.
  CountedStorageUses(const nb::list& samples, nb::object describe);

  /// A tensor of a class other than that of the samples counts as one without
  /// storage.
  Use of(PyObject* tensor) const override;
  /// Whether the counts are read directly from memory.
  bool is_direct() const { return is_direct_; }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(describe_.ptr());
    Py_VISIT(type_.ptr());
    return 0;
  }
  void clear() { describe_.reset(); }

 private:
  struct Facts {
    uintptr_t tensor;
    Use use;
  };
  Facts facts_of(nb::handle tensor) const;
  Use read(PyObject* tensor) const {
    const uintptr_t storage =
        word_at(word_at(reinterpret_cast<uintptr_t>(tensor) + of_tensor_) +
                of_storage_);
    if (storage == 0) return {0, 0};
    const uint64_t counts = word_at(storage + kOfCount);
    return {storage, static_cast<uint32_t>(counts) - (counts >> 63)};
  }

  /// After the pointer to the virtual table: the count is the low half of a
  /// word. Its highest bit says that a Python object of the storage is included
  /// in the count.
  static constexpr size_t kOfCount = sizeof(void*);

  nb::object describe_;
  nb::object type_;
  bool is_direct_ = false;
  size_t of_tensor_ = 0;   ///< in the Python object
  size_t of_storage_ = 0;  ///< in torch's object
};

/// For memory that std::shared_ptr counts, as Paddle's is.
///
/// A Paddle tensor is a shared_ptr to an object that describes it, which holds
/// a shared_ptr to its memory: detach() copies the first, and a view makes a
/// new description of the same memory. Paddle exposes neither count, but both
/// are at fixed offsets (a pointer, then the block with the count), which are
/// learned from tensors.
class SharedPointerUses final : public StorageUses {
 public:
  struct Samples {
    nb::handle tensor;     ///< with one detach() and one view that are alive
    nb::handle view;       ///< of `tensor`
    nb::handle other;      ///< of the same kind, in memory of its own
    nb::handle described;  ///< Python's object for the description of `tensor`
    uintptr_t memory;      ///< of `tensor`
    nb::handle parameter;  ///< a leaf that has a gradient
    nb::handle gradient;   ///< its gradient
  };

  explicit SharedPointerUses(const Samples& samples);

  /// Whether the counts were found. If not, every tensor counts as one without
  /// memory.
  bool is_known() const { return is_known_; }
  /// 1 for a gradient that its parameter and one Python object hold.
  Use of(PyObject* tensor) const override;
  /// The memory of a parameter's gradient; 0: it has none.
  uintptr_t of_gradient(PyObject* parameter) const;

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(type_.ptr());
    return 0;
  }
  void clear() {}

 private:
  bool learn(const Samples& samples);
  bool is_tensor(PyObject* object) const {
    return is_known_ &&
           PyObject_TypeCheck(
               object, reinterpret_cast<PyTypeObject*>(type_.ptr())) != 0;
  }
  /// The address of the shared_ptr to the memory; 0: none, or another kind of
  /// tensor (a sparse one, for example).
  uintptr_t holder_in(uintptr_t description) const {
    if (description == 0 || word_at(description) != kind_) return 0;
    const uintptr_t holder = description + of_holder_;
    return word_at(holder) == 0 ? 0 : holder;
  }
  /// The number of copies of this shared_ptr: the low half of a word, whose
  /// other half counts the weak ones.
  static size_t count_of(uintptr_t shared_pointer) {
    const uintptr_t block = word_at(shared_pointer + sizeof(void*));
    return block == 0 ? 1
                      : static_cast<uint32_t>(word_at(block + sizeof(void*)));
  }

  nb::object type_;
  bool is_known_ = false;
  uintptr_t kind_ = 0;    ///< its virtual table
  size_t of_tensor_ = 0;  ///< in the Python object
  size_t of_holder_ = 0;  ///< in the description
};

}  // namespace paceline

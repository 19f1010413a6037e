#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/dlpack.h"
#include "bind/garbage_collected.h"
#include "bind/tensor_attribute.h"
#include "hash/xxh64.h"

namespace paceline {
namespace {

/// A buffer of up to this many bytes is hashed as a whole.
constexpr size_t kWhole = 256;
/// The number of bytes sampled at the beginning, in the middle and at the end
/// of a larger buffer.
constexpr size_t kPiece = 64;

/// The dictionaries in which a module and its children keep their buffers, and
/// a snapshot of each buffer: the object, its version, and a sample of its
/// bytes, because numpy and `.data` write without a new version. Every forward
/// asks what has changed since. All bytes are compared if the last snapshot
/// hashed all of them, as the one after a synchronisation does. The one after a
/// forward takes a sample, so that large buffers are read twice in each step,
/// and not four times.
///
/// The bytes of running statistics are not hashed while their layer trains
/// them: every forward writes them, and none reads them.
class BufferSnapshot {
 public:
  /// `owners` has, for each dictionary, another one that maps its keys to the
  /// layers that may train these buffers. `example` is a tensor of the
  /// framework, which gives access to the bytes; None: bytes are not compared.
  BufferSnapshot(nb::list dicts, nb::list owners, const std::string& version,
                 nb::object example)
      : dicts_(std::move(dicts)),
        owners_(std::move(owners)),
        version_(version.c_str()),
        training_("training") {
    if (dicts_.size() != owners_.size())
      misuse("BufferSnapshot: dicts and owners must have the same length");
    if (!example.is_none()) borrow_ = dlpack::find_borrow(example);
    take(/*whole=*/true);
  }

  void note(bool whole) {
    if (!dicts_.is_valid()) return;  // cleared by the garbage collector
    if (!holds_same()) return take(whole);
    for (Held& each : held_)
      each.look = look(each.value.ptr(), each.owner, whole);
  }

  /// The dictionary's number and the key of each buffer that was added,
  /// removed, replaced or written to since.
  std::vector<std::pair<size_t, nb::object>> changed() {
    std::vector<std::pair<size_t, nb::object>> found;
    if (!dicts_.is_valid()) return found;
    size_t number = 0, begin = 0;
    for (const nb::handle dict : dicts_) {
      const size_t end = ends_[number];
      compare(dict.ptr(), number, begin, end, found);
      begin = end;
      ++number;
    }
    return found;
  }

  /// Whether the dictionaries hold the same objects as in the last snapshot.
  bool holds_same() const {
    if (!dicts_.is_valid()) return true;
    size_t number = 0, i = 0;
    for (const nb::handle dict : dicts_) {
      const size_t end = ends_[number++];
      Py_ssize_t at = 0;
      PyObject *key = nullptr, *value = nullptr;
      while (PyDict_Next(dict.ptr(), &at, &key, &value) != 0) {
        if (i == end || held_[i].key.ptr() != key ||
            held_[i].value.ptr() != value)
          return false;
        ++i;
      }
      if (i != end) return false;
    }
    return true;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(dicts_.ptr());
    Py_VISIT(owners_.ptr());
    for (const Held& each : held_) {
      Py_VISIT(each.key.ptr());
      Py_VISIT(each.value.ptr());
      Py_VISIT(each.owner.ptr());
    }
    return 0;
  }
  void clear() {
    dicts_.reset();
    owners_.reset();
    // Destroying them may run Python code, which finds an empty snapshot.
    std::vector<Held> held;
    held.swap(held_);
  }

 private:
  struct Look {
    int64_t version = 0;
    uint64_t sample = 0;
    uint64_t whole = 0;
    bool has_sample = false;
    bool has_whole = false;

    bool operator==(const Look& other) const {
      return version == other.version &&
             (sample == other.sample || !has_sample || !other.has_sample) &&
             (whole == other.whole || !has_whole || !other.has_whole);
    }
  };
  struct Held {
    nb::object key;
    nb::object value;
    nb::object owner;  ///< the layer that may train it; invalid: none
    Look look;
  };

  void take(bool whole) {
    std::vector<Held> held;
    held.reserve(held_.size());
    std::vector<size_t> ends;
    ends.reserve(ends_.size());
    size_t number = 0;
    for (const nb::handle dict : dicts_) {
      const nb::handle owners = owners_[number++];
      Py_ssize_t at = 0;
      PyObject *key = nullptr, *value = nullptr;
      while (PyDict_Next(dict.ptr(), &at, &key, &value) != 0) {
        nb::object owner =
            nb::borrow(PyDict_GetItemWithError(owners.ptr(), key));
        if (PyErr_Occurred() != nullptr) PyErr_Clear();
        const Look now = look(value, owner, whole);
        held.push_back(
            {nb::borrow(key), nb::borrow(value), std::move(owner), now});
      }
      ends.push_back(held.size());
    }
    held_.swap(held);  // destroying the old ones may run Python code
    ends_.swap(ends);
  }

  Look look(PyObject* value, const nb::object& owner, bool whole) {
    Look found;
    if (value == Py_None) return found;
    const nb::object version = nb::steal(version_.get(value));
    if (version.is_valid()) found.version = PyLong_AsLongLong(version.ptr());
    if (PyErr_Occurred() != nullptr) PyErr_Clear();  // it has no version
    found.has_sample = !owner.is_valid() || !is_training(owner);
    if (found.has_sample) look_at_bytes(value, whole, found);
    return found;
  }

  bool is_training(const nb::object& owner) {
    const nb::object flag = nb::steal(training_.get(owner.ptr()));
    if (PyErr_Occurred() != nullptr) PyErr_Clear();
    return flag.is_valid() && flag.is(Py_True);
  }

  void look_at_bytes(PyObject* value, bool whole, Look& found) const {
    dlpack::Tensor tensor;
    if (borrow_ == nullptr) return;
    if (borrow_(value, &tensor) != 0) {
      PyErr_Clear();
      return;
    }
    const size_t size =
        tensor.device.type == dlpack::kCpu ? tensor.nbytes_in_a_row() : 0;
    const auto* begin = static_cast<const std::byte*>(tensor.begin());
    if (size == 0 || begin == nullptr) return;
    if (size <= kWhole) {
      found.sample = sample_hash(begin, size, 0);
      return;
    }
    uint64_t hash = sample_hash(begin, kPiece, 0);
    hash = sample_hash(begin + size / 2, kPiece, hash);
    found.sample = sample_hash(begin + size - kPiece, kPiece, hash);
    found.has_whole = whole;
    if (whole) found.whole = xxh64(begin, size);
  }

  void compare(PyObject* dict, size_t number, size_t begin, size_t end,
               std::vector<std::pair<size_t, nb::object>>& found) {
    size_t i = begin;
    Py_ssize_t at = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(dict, &at, &key, &value) != 0) {
      const Held* before = find(key, i, begin, end);
      if (before == nullptr || before->value.ptr() != value ||
          !(before->look == look(value, before->owner, before->look.has_whole)))
        found.emplace_back(number, nb::borrow(key));
      ++i;
    }
    if (i == end) return;
    for (size_t j = begin; j < end; ++j) {
      const nb::object& held = held_[j].key;
      if (PyDict_GetItemWithError(dict, held.ptr()) == nullptr)
        found.emplace_back(number, held);
      if (PyErr_Occurred() != nullptr) PyErr_Clear();
    }
  }

  /// The snapshot of this key, most probably at place `i`.
  const Held* find(PyObject* key, size_t i, size_t begin, size_t end) const {
    if (i < end && held_[i].key.ptr() == key) return &held_[i];
    for (size_t j = begin; j < end; ++j)
      if (held_[j].key.ptr() == key || held_[j].key.equal(nb::handle(key)))
        return &held_[j];
    return nullptr;
  }

  nb::list dicts_;
  nb::list owners_;
  TensorAttribute version_;
  TensorAttribute training_;
  dlpack::Borrow borrow_ = nullptr;
  std::vector<Held> held_;
  std::vector<size_t> ends_;  ///< of each dictionary, in held_
};

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_slot<BufferSnapshot>)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_slot<BufferSnapshot>)},
    {0, nullptr}};

}  // namespace

void bind_buffer_snapshot(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<BufferSnapshot>(m, "BufferSnapshot", nb::type_slots(slots))
      .def(nb::init<nb::list, nb::list, const std::string&, nb::object>(),
           "dicts"_a, "owners"_a, "version"_a, "example"_a.none())
      .def("note", &BufferSnapshot::note, "whole"_a = false)
      .def("changed", &BufferSnapshot::changed)
      .def("holds_same", &BufferSnapshot::holds_same);
}

}  // namespace paceline

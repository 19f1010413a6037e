#include "bind/storage_uses.h"

#include <fcntl.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/garbage_collected.h"

namespace paceline {
namespace {

/// The bytes searched in torch's object of a tensor, which is larger than this.
constexpr size_t kSearchedBytes = 8 * sizeof(void*);

PyType_Slot slots[] = {
    {Py_tp_traverse,
     reinterpret_cast<void*>(traverse_slot<CountedStorageUses>)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_slot<CountedStorageUses>)},
    {0, nullptr}};

PyType_Slot shared_pointer_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_slot<SharedPointerUses>)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_slot<SharedPointerUses>)},
    {0, nullptr}};

/// The bytes searched in Paddle's description of a tensor, which may be
/// smaller.
constexpr size_t kSearchedDescription = 128 * sizeof(void*);

/// Reads words at any address, even an invalid one: the kernel copies them.
class CarefulReader {
 public:
  CarefulReader() { is_open_ = pipe2(ends_.data(), O_CLOEXEC) == 0; }
  CarefulReader(const CarefulReader&) = delete;
  CarefulReader& operator=(const CarefulReader&) = delete;
  ~CarefulReader() {
    if (!is_open_) return;
    close(ends_[0]);
    close(ends_[1]);
  }
  /// 0 if the word cannot be read.
  uintptr_t word_at(uintptr_t address) const {
    uintptr_t word = 0;
    if (!is_open_ || address == 0 || address % sizeof(word) != 0) return 0;
    if (write(ends_[1], reinterpret_cast<const void*>(address), sizeof(word)) !=
        sizeof(word))
      return 0;
    return read(ends_[0], &word, sizeof(word)) == sizeof(word) ? word : 0;
  }
  /// As `SharedPointerUses::count_of`.
  uint32_t count_of(uintptr_t shared_pointer) const {
    const uintptr_t block = word_at(shared_pointer + sizeof(void*));
    return static_cast<uint32_t>(word_at(block + sizeof(void*)));
  }

 private:
  std::array<int, 2> ends_{};
  bool is_open_;
};

size_t bytes_of(nb::handle object) {
  return static_cast<size_t>(Py_TYPE(object.ptr())->tp_basicsize);
}

uintptr_t address_of(nb::handle object) {
  return reinterpret_cast<uintptr_t>(object.ptr());
}

}  // namespace

CountedStorageUses::CountedStorageUses(const nb::list& samples,
                                       nb::object describe)
    : describe_(std::move(describe)) {
  std::vector<Facts> known;
  size_t object_bytes = SIZE_MAX;
  for (const nb::handle sample : samples) {
    type_ = nb::borrow<nb::object>(sample.type());
    known.push_back(facts_of(sample));
    object_bytes = std::min(
        object_bytes, static_cast<size_t>(Py_TYPE(sample.ptr())->tp_basicsize));
  }
  // The offset at which all of them hold the wanted word; `end` if there is
  // none.
  const auto find = [&](size_t from, size_t end, auto place, auto wanted) {
    for (; from + sizeof(void*) <= end; from += sizeof(void*)) {
      bool is_in_all = true;
      for (size_t i = 0; i < known.size() && is_in_all; ++i)
        is_in_all = word_at(place(i) + from) == wanted(i);
      if (is_in_all) return from;
    }
    return end;
  };
  if (known.size() < 2) return;
  of_tensor_ = find(
      sizeof(PyObject), object_bytes,
      [&](size_t i) { return reinterpret_cast<uintptr_t>(samples[i].ptr()); },
      [&](size_t i) { return known[i].tensor; });
  if (of_tensor_ == object_bytes) return;
  of_storage_ = find(
      sizeof(void*), kSearchedBytes, [&](size_t i) { return known[i].tensor; },
      [&](size_t i) { return known[i].use.storage; });
  if (of_storage_ == kSearchedBytes) return;
  is_direct_ = true;
  for (size_t i = 0; i < known.size(); ++i)
    is_direct_ =
        is_direct_ && read(samples[i].ptr()).count == known[i].use.count;
}

StorageUses::Use CountedStorageUses::of(PyObject* tensor) const {
  if (!Py_IS_TYPE(tensor, reinterpret_cast<PyTypeObject*>(type_.ptr())))
    return {0, 0};
  return is_direct_ ? read(tensor) : facts_of(tensor).use;
}

CountedStorageUses::Facts CountedStorageUses::facts_of(
    nb::handle tensor) const {
  if (!describe_.is_valid()) return {};  // cleared by the garbage collector
  const auto [address, storage, count] =
      nb::cast<std::tuple<uintptr_t, uintptr_t, size_t>>(describe_(tensor));
  return {address, {storage, count}};
}

SharedPointerUses::SharedPointerUses(const Samples& samples)
    : type_(nb::borrow<nb::object>(samples.tensor.type())) {
  is_known_ = learn(samples);
}

bool SharedPointerUses::learn(const Samples& samples) {
  const CarefulReader memory;
  const uintptr_t tensor = address_of(samples.tensor);
  const uintptr_t described = address_of(samples.described);
  const size_t end = bytes_of(samples.tensor);
  uintptr_t description = 0;
  for (of_tensor_ = sizeof(PyObject); of_tensor_ < end && description == 0;
       of_tensor_ += sizeof(void*)) {
    const uintptr_t word = memory.word_at(tensor + of_tensor_);
    for (size_t i = sizeof(PyObject); i < bytes_of(samples.described);
         i += sizeof(void*)) {
      if (word != 0 && word == memory.word_at(described + i))
        description = word;
    }
  }
  of_tensor_ -= sizeof(void*);
  const uintptr_t view = memory.word_at(address_of(samples.view) + of_tensor_);
  const uintptr_t other =
      memory.word_at(address_of(samples.other) + of_tensor_);
  kind_ = memory.word_at(description);
  if (kind_ == 0 || view == description || memory.word_at(view) != kind_ ||
      memory.word_at(other) != kind_ ||
      memory.count_of(tensor + of_tensor_) != 2 ||
      memory.count_of(address_of(samples.other) + of_tensor_) != 1)
    return false;
  const auto is_holder = [&](size_t at) {
    const uintptr_t holder = memory.word_at(description + at);
    return holder != 0 && holder == memory.word_at(view + at) &&
           holder != memory.word_at(other + at) &&
           // After its virtual table it holds the address.
           memory.word_at(holder + sizeof(void*)) == samples.memory &&
           memory.count_of(description + at) == 2 &&
           memory.count_of(other + at) == 1;
  };
  for (of_holder_ = sizeof(void*);
       of_holder_ < kSearchedDescription && !is_holder(of_holder_);
       of_holder_ += sizeof(void*)) {
  }
  if (of_holder_ >= kSearchedDescription) return false;
  // As of_gradient() will do.
  const uintptr_t autograd = memory.word_at(address_of(samples.parameter) +
                                            of_tensor_ + 2 * sizeof(void*));
  const uintptr_t gradient = memory.word_at(autograd + sizeof(void*));
  return gradient != 0 &&
         memory.word_at(gradient) ==
             memory.word_at(address_of(samples.gradient) + of_tensor_);
}

StorageUses::Use SharedPointerUses::of(PyObject* tensor) const {
  if (!is_tensor(tensor)) return {0, 0};
  const uintptr_t pointer = reinterpret_cast<uintptr_t>(tensor) + of_tensor_;
  const uintptr_t holder = holder_in(word_at(pointer));
  if (holder == 0) return {0, 0};
  return {word_at(holder), count_of(holder) - 1 + count_of(pointer) - 1};
}

uintptr_t SharedPointerUses::of_gradient(PyObject* parameter) const {
  if (!is_tensor(parameter)) return 0;
  // After the description there is a shared_ptr to the parameter's autograd
  // data, whose first member is a shared_ptr to the gradient, a tensor without
  // a Python object.
  const uintptr_t autograd = word_at(reinterpret_cast<uintptr_t>(parameter) +
                                     of_tensor_ + 2 * sizeof(void*));
  const uintptr_t gradient =
      autograd == 0 ? 0 : word_at(autograd + sizeof(void*));
  const uintptr_t holder = gradient == 0 ? 0 : holder_in(word_at(gradient));
  return holder == 0 ? 0 : word_at(holder);
}

void bind_storage_uses(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<StorageUses>(m, "StorageUses")
      .def(
          "of",
          [](const StorageUses& uses, nb::handle tensor) {
            const StorageUses::Use use = uses.of(tensor.ptr());
            return std::pair(use.storage, use.count);
          },
          "tensor"_a);
  nb::class_<CountedStorageUses, StorageUses>(m, "CountedStorageUses",
                                              nb::type_slots(slots))
      .def(nb::init<const nb::list&, nb::object>(), "samples"_a, "tell"_a)
      .def_prop_ro("is_direct", &CountedStorageUses::is_direct);
  nb::class_<SharedPointerUses, StorageUses>(
      m, "SharedPointerUses", nb::type_slots(shared_pointer_slots))
      .def(
          "__init__",
          [](SharedPointerUses* self, nb::handle tensor, nb::handle view,
             nb::handle other, nb::handle described, uintptr_t memory,
             nb::handle parameter, nb::handle gradient) {
            new (self) SharedPointerUses(
                {tensor, view, other, described, memory, parameter, gradient});
          },
          "tensor"_a, "view"_a, "other"_a, "described"_a, "memory"_a,
          "parameter"_a, "gradient"_a)
      .def_prop_ro("is_known", &SharedPointerUses::is_known)
      .def(
          "of_gradient",
          [](const SharedPointerUses& uses, nb::handle parameter) {
            return uses.of_gradient(parameter.ptr());
          },
          "parameter"_a);
}

}  // namespace paceline

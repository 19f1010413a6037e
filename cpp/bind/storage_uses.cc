#include "bind/storage_uses.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/garbage_collected.h"

namespace paceline {
namespace {

/// Of torch's object of a tensor, which is larger.
constexpr size_t kSearchedBytes = 8 * sizeof(void*);

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_slot<StorageUses>)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_slot<StorageUses>)},
    {0, nullptr}};

}  // namespace

StorageUses::StorageUses(const nb::list& samples, nb::object tell)
    : tell_(std::move(tell)) {
  std::vector<Told> told;
  size_t object_bytes = SIZE_MAX;
  for (const nb::handle sample : samples) {
    type_ = nb::borrow<nb::object>(sample.type());
    told.push_back(told_of(sample));
    object_bytes = std::min(
        object_bytes, static_cast<size_t>(Py_TYPE(sample.ptr())->tp_basicsize));
  }
  // The distance at which the word wanted lies in all of them; the end if none.
  const auto find = [&](size_t from, size_t end, auto place, auto wanted) {
    for (; from + sizeof(void*) <= end; from += sizeof(void*)) {
      bool is_in_all = true;
      for (size_t i = 0; i < told.size() && is_in_all; ++i)
        is_in_all = word_at(place(i) + from) == wanted(i);
      if (is_in_all) return from;
    }
    return end;
  };
  if (told.size() < 2) return;
  of_tensor_ = find(
      sizeof(PyObject), object_bytes,
      [&](size_t i) { return reinterpret_cast<uintptr_t>(samples[i].ptr()); },
      [&](size_t i) { return told[i].tensor; });
  if (of_tensor_ == object_bytes) return;
  of_storage_ = find(
      sizeof(void*), kSearchedBytes, [&](size_t i) { return told[i].tensor; },
      [&](size_t i) { return told[i].use.storage; });
  if (of_storage_ == kSearchedBytes) return;
  is_direct_ = true;
  for (size_t i = 0; i < told.size(); ++i)
    is_direct_ =
        is_direct_ && read(samples[i].ptr()).count == told[i].use.count;
}

StorageUses::Use StorageUses::of(PyObject* tensor) const {
  if (!Py_IS_TYPE(tensor, reinterpret_cast<PyTypeObject*>(type_.ptr())))
    return {0, 0};
  return is_direct_ ? read(tensor) : told_of(tensor).use;
}

StorageUses::Told StorageUses::told_of(nb::handle tensor) const {
  if (!tell_.is_valid()) return {};  // the garbage collector was here
  const auto [address, storage, count] =
      nb::cast<std::tuple<uintptr_t, uintptr_t, size_t>>(tell_(tensor));
  return {address, {storage, count}};
}

void bind_storage_uses(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<StorageUses>(m, "StorageUses", nb::type_slots(slots))
      .def(nb::init<const nb::list&, nb::object>(), "samples"_a, "tell"_a)
      .def_prop_ro("is_direct", &StorageUses::is_direct)
      .def(
          "of",
          [](const StorageUses& uses, nb::handle tensor) {
            const StorageUses::Use use = uses.of(tensor.ptr());
            return std::pair(use.storage, use.count);
          },
          "tensor"_a);
}

}  // namespace paceline

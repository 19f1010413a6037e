// The Python class for the single copy of a model's values on a host.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/call.h"
#include "bind/pointer.h"
#include "core/model_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

using Runs = std::vector<std::pair<size_t, size_t>>;

/// Called after a stray write. Never freed, because a stray write may occur at
/// any time, even while the interpreter finalizes.
PyObject* stray_write_callback = nullptr;
std::atomic<bool> is_report_pending{false};

int report(void*) {
  is_report_pending.store(false);
  if (stray_write_callback == nullptr) return 0;
  PyObject* const result = PyObject_CallNoArgs(stray_write_callback);
  if (result == nullptr) return -1;
  Py_DECREF(result);
  return 0;
}

/// Runs within a signal handler. The main thread calls report() when it returns
/// from the kernel that has written, or at its next line of Python.
void on_stray_write() {
  if (!is_report_pending.exchange(true) &&
      Py_AddPendingCall(report, nullptr) != 0)
    is_report_pending.store(false);
}

std::vector<ModelMemory::Run> as_runs(const Runs& pairs) {
  std::vector<ModelMemory::Run> runs;
  for (const auto& [begin, bytes] : pairs) runs.push_back({begin, bytes});
  return runs;
}

}  // namespace

void bind_model_memory(nb::module_& m) {
  m.def(
      "tell_stray_writes",
      [](nb::object listener) {
        PyObject* const before = stray_write_callback;
        stray_write_callback = listener.release().ptr();
        Py_XDECREF(before);
        set_stray_write_listener(&on_stray_write);
      },
      "listener"_a,
      "From now on, an unannounced write to `ModelMemory.values` goes to "
      "private pages, and `listener()` is called to undo it and raise.");
  m.def("create_model_memory", &ModelMemory::create, "nbytes"_a,
        "Returns the descriptor of a sealed memfd without reserved memory.");
  nb::class_<ModelMemory>(m, "ModelMemory")
      .def(nb::init<int>(), "fd"_a)
      .def_prop_ro("nbytes", &ModelMemory::size)
      .def_prop_ro("values",
                   [](const ModelMemory& memory) {
                     return reinterpret_cast<Pointer>(memory.values());
                   })
      .def_prop_ro("writable",
                   [](const ModelMemory& memory) {
                     return reinterpret_cast<Pointer>(memory.writable());
                   })
      .def(
          "reserve_share",
          [](ModelMemory& memory, size_t index, size_t count) {
            without_lock([&] { memory.reserve_share(index, count); });
          },
          "index"_a, "count"_a)
      .def("begin_writing", &ModelMemory::begin_writing)
      .def("changes",
           [](const ModelMemory& memory) {
             Runs pairs;
             without_lock([&] {
               for (const ModelMemory::Run& run : memory.changes())
                 pairs.emplace_back(run.begin, run.bytes);
             });
             return pairs;
           })
      .def(
          "publish",
          [](ModelMemory& memory, const Runs& changes) {
            without_lock([&] { memory.publish(as_runs(changes)); });
          },
          "changes"_a)
      .def("end_writing", &ModelMemory::end_writing)
      .def("take_stray_write", &ModelMemory::take_stray_write);
}

}  // namespace paceline

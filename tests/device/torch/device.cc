// A device for tests: memory of the host, and streams that are threads. It runs work asynchronously, as a GPU
// does, so that code which forgets to wait for a stream reads data that is not there yet. The headers beside
// this file explain how; this file registers it with PyTorch and Python.

#include "device.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <string>
#include <thread>

#include "collectives.h"
#include "memory.h"
#include "operators.h"
#include "streams.h"

namespace later {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(kType, &device_memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    Guard().setDevice({kType, index});
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kType, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedMemory::all().holds(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &PinnedMemory::all();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage,
                              std::size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

static void sleep_on_stream(int milliseconds) {
  current_queue(on(-1)).add([=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_memory);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_stream);
  library.impl("convolution_overrideable",
               torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// Operators on many tensors are one kernel (or a few), as on a GPU. torch's own for other devices make a call
// for each tensor.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0) continue;
    const auto full = name.name.substr(6) +
                      (name.overload_name.empty() ? "" : ".") +
                      name.overload_name;
    m.impl(full.c_str(),
           torch::CppFunction::makeFromBoxedFunction<&run_many_later>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_later>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp);
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("device_count", [] { return kDevices; });
  module.def("current_device", [] { return current_device; });
  module.def("set_device", [](int index) {
    Guard().setDevice({kType, static_cast<c10::DeviceIndex>(index)});
  });
  module.def("synchronize", [](int index) {
    Guard().synchronizeDevice(static_cast<c10::DeviceIndex>(index));
  });
  module.def("max_memory_allocated", [] { return most_held_bytes.load(); });
  module.def("reset_peak_memory_stats", forget_most_held);
  module.def(
      "sleep", sleep_on_stream,
      "Give the current stream something to do, for so many milliseconds.");
  module.def(
      "forbid_waiting", [](bool is) { waiting_is_forbidden = is; },
      "Let whatever waits raise.");
  module.def(
      "group",
      [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size,
         std::string name) {
        return c10::intrusive_ptr<c10d::Backend>(
            c10::make_intrusive<Group>(gloo, rank, size, name));
      },
      "Collectives of tensors on the device, by a group of Gloo.");
}

}  // namespace later

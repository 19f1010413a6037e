// The devices that PyTorch sees: memory of the host, and streams that are threads. Each thread of the host
// has a current device, and a current stream on each of them. PyTorch calls this kind of device PrivateUse1;
// tests/device/torch/__init__.py gives it a name. The host may wait for a stream, unless a test forbids that.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <string>
#include <utility>

#include "streams.h"

namespace later {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr int kStreams = 32;  // of a device; then they are reused in turn

inline std::atomic<bool> waiting_is_forbidden{false};

// As with a GPU, a later call reports the error.
inline void raise_error() {
  const std::string text = first_error.take();
  TORCH_CHECK(text.empty(), "an operator on the test device failed: ", text);
}

// Without Python's lock: a stream may need it to release a tensor.
inline void wait_on_host(Mark& mark) {
  if (mark.is_set()) return;
  TORCH_CHECK(!waiting_is_forbidden, "the host waits for the test device");
  if (PyGILState_Check()) {
    pybind11::gil_scoped_release release;
    mark.wait();
  } else {
    mark.wait();
  }
}

// The host waits for all earlier work on the stream.
inline void drain(Queue& queue) { wait_on_host(*queue.mark()); }

inline Queue& queue_of(c10::Stream stream) {
  static auto* queues = new Queue[kDevices * kStreams];
  return queues[stream.device_index() * kStreams + stream.id()];
}

inline thread_local int current_device = 0;
inline thread_local c10::StreamId current_streams[kDevices] = {};

// The device of that number; of a negative one: the current device.
inline c10::Device on(c10::DeviceIndex index) {
  return {kType,
          index < 0 ? static_cast<c10::DeviceIndex>(current_device) : index};
}

inline c10::Stream stream_of(c10::Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

inline c10::Stream current_stream(c10::Device device) {
  auto index = on(device.index());
  return stream_of(index, current_streams[index.index()]);
}

inline Queue& current_queue(c10::Device device) {
  return queue_of(current_stream(device));
}

// One kernel or one copy of a GPU. Profilers of torch see each, by this name.
template <class Task>
void launch(Queue& queue, Task task) {
  RECORD_USER_SCOPE("later::launch");
  queue.add(std::move(task));
}

struct Event {
  MarkPointer mark;
};

// The interface through which PyTorch uses all of that.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return on(-1); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(0 <= device.index() && device.index() < kDevices,
                "there is no device ", device);
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(on(device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int> made[kDevices];
    auto index = on(device.index());
    return stream_of(index, 1 + made[index.index()]++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = current_stream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &queue_of(stream);
  }
  void destroyEvent(void* event,
                    const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->mark = queue_of(stream).mark();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto mark = mark_of(event)) queue_of(stream).wait_for(mark);
  }
  bool queryEvent(void* event) const override {
    auto mark = mark_of(event);
    return !mark || mark->is_set();
  }
  void synchronizeEvent(void* event) const override {
    if (auto mark = mark_of(event)) wait_on_host(*mark);
    raise_error();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(stream).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    drain(queue_of(stream));
    raise_error();
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    for (c10::StreamId id = 0; id < kStreams; ++id) {
      drain(queue_of(stream_of(on(index), id)));
    }
    raise_error();
  }
  // In memory.h, which finds the block of the pointer.
  inline void recordDataPtrOnStream(const c10::DataPtr& pointer,
                                    const c10::Stream& stream) const override;

 private:
  // Null for an event that was never recorded.
  static MarkPointer mark_of(void* event) {
    return event ? static_cast<Event*>(event)->mark : nullptr;
  }
};

}  // namespace later

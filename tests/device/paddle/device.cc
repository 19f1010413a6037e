// A device for tests of PaddlePaddle: memory of the host, and streams that are threads. It runs work
// asynchronously, as a GPU does, so that code which forgets to wait for a stream reads data that is not there
// yet.
//
// - Copies that Paddle puts on a stream, and collectives, run in the thread of that stream. A copy without a
//   stream happens at once; Paddle has then waited for the stream of its operators, and for no other.
// - Most operators have no kernel here. Paddle waits for the stream, copies their inputs to the host, and
//   their results back. Operators that write in place have a kernel (operators.h), because results that are
//   copied back get other memory.
// - New memory holds NaNs.
//
// Paddle calls this kind of device a custom one, and loads the libraries in the folder CUSTOM_DEVICE_ROOT.
#include <paddle/phi/backends/device_ext.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives.h"
#include "operators.h"
#include "streams.h"

namespace later {
namespace {

constexpr std::size_t kDevices = 4;
constexpr std::size_t kMemoryBytes = std::size_t{8} << 30;

thread_local int current_device = 0;

struct Event {
  MarkPointer mark;  // null: it was never recorded
};

// All streams that were ever made: freeing memory waits for them.
class Streams {
 public:
  Queue* make() {
    std::lock_guard lock(mutex_);
    return all_.emplace_back(new Queue);  // never deleted, see streams.h
  }
  void drain() {
    std::vector<MarkPointer> marks;
    {
      std::lock_guard lock(mutex_);
      for (auto* each : all_) {
        if (!each->is_idle()) marks.push_back(each->mark());
      }
    }
    for (auto& mark : marks) mark->wait();
  }

 private:
  std::mutex mutex_;
  std::vector<Queue*> all_;
};

Streams& streams() {
  static auto* made = new Streams;
  return *made;
}

Event& event_of(C_Event event) { return *reinterpret_cast<Event*>(event); }

// An exception in a task of a stream is reported by the next wait for a stream.
C_Status drained(Queue& queue) {
  queue.mark()->wait();
  return status_of(first_error.take());
}

C_Status allocate(const C_Device, void** memory, std::size_t nbytes) {
  *memory = std::aligned_alloc(256, (nbytes + 255) / 256 * 256);
  if (*memory == nullptr) return C_FAILED;
  std::memset(*memory, 0xff, nbytes);
  return C_SUCCESS;
}

C_Status deallocate(const C_Device, void* memory, std::size_t) {
  streams().drain();
  std::free(memory);
  return C_SUCCESS;
}

C_Status copy(const C_Device, void* to, const void* from, std::size_t nbytes) {
  std::memcpy(to, from, nbytes);
  return C_SUCCESS;
}

C_Status copy_on(const C_Device, C_Stream stream, void* to, const void* from,
                 std::size_t nbytes) {
  queue_of(stream).add([=] { std::memcpy(to, from, nbytes); });
  return C_SUCCESS;
}

void fill_devices(C_DeviceInterface& device) {
  device.initialize = device.finalize = [] { return C_SUCCESS; };
  device.init_device =
      device.deinit_device = [](const C_Device) { return C_SUCCESS; };
  device.set_device = [](const C_Device device) {
    current_device = device->id;
    return C_SUCCESS;
  };
  device.get_device = [](const C_Device device) {
    device->id = current_device;
    return C_SUCCESS;
  };
  device.get_device_count = [](std::size_t* count) {
    *count = kDevices;
    return C_SUCCESS;
  };
  device.get_device_list = [](std::size_t* devices) {
    for (std::size_t each = 0; each < kDevices; ++each) devices[each] = each;
    return C_SUCCESS;
  };
  device.synchronize_device = [](const C_Device) {
    streams().drain();
    return status_of(first_error.take());
  };
}

void fill_streams(C_DeviceInterface& device) {
  device.create_stream = [](const C_Device, C_Stream* stream) {
    *stream = reinterpret_cast<C_Stream>(streams().make());
    return C_SUCCESS;
  };
  device.destroy_stream = [](const C_Device, C_Stream stream) {
    return drained(queue_of(stream));
  };
  device.query_stream = [](const C_Device, C_Stream stream) {
    return queue_of(stream).is_idle() ? C_SUCCESS : C_FAILED;
  };
  device.synchronize_stream = [](const C_Device, C_Stream stream) {
    return drained(queue_of(stream));
  };
  device.stream_add_callback = [](const C_Device device, C_Stream stream,
                                  C_Callback callback, void* user_data) {
    queue_of(stream).add([=, id = device->id] {
      C_Device_st on{id};
      C_Status status = C_SUCCESS;
      callback(&on, stream, user_data, &status);
    });
    return C_SUCCESS;
  };
  device.create_event = [](const C_Device, C_Event* event) {
    *event = reinterpret_cast<C_Event>(new Event);
    return C_SUCCESS;
  };
  device.destroy_event = [](const C_Device, C_Event event) {
    delete &event_of(event);
    return C_SUCCESS;
  };
  device.record_event = [](const C_Device, C_Stream stream, C_Event event) {
    event_of(event).mark = queue_of(stream).mark();
    return C_SUCCESS;
  };
  device.query_event = [](const C_Device, C_Event event) {
    const auto mark = event_of(event).mark;
    return !mark || mark->is_set() ? C_SUCCESS : C_FAILED;
  };
  device.synchronize_event = [](const C_Device, C_Event event) {
    if (const auto mark = event_of(event).mark) mark->wait();
    return status_of(first_error.take());
  };
  device.stream_wait_event = [](const C_Device, C_Stream stream,
                                C_Event event) {
    if (const auto mark = event_of(event).mark) queue_of(stream).wait_for(mark);
    return C_SUCCESS;
  };
}

void fill_memory(C_DeviceInterface& device) {
  device.device_memory_allocate = device.host_memory_allocate =
      device.unified_memory_allocate = allocate;
  device.device_memory_deallocate = device.host_memory_deallocate =
      device.unified_memory_deallocate = deallocate;
  device.device_memory_set = [](const C_Device, void* memory,
                                unsigned char value, std::size_t nbytes) {
    std::memset(memory, value, nbytes);
    return C_SUCCESS;
  };
  device.memory_copy_h2d = device.memory_copy_d2h = device.memory_copy_d2d =
      copy;
  device.memory_copy_p2p = [](const C_Device to, const C_Device, void* target,
                              const void* from, std::size_t nbytes) {
    return copy(to, target, from, nbytes);
  };
  device.async_memory_copy_h2d = device.async_memory_copy_d2h =
      device.async_memory_copy_d2d = copy_on;
  device.async_memory_copy_p2p = [](const C_Device to, const C_Device,
                                    C_Stream stream, void* target,
                                    const void* from, std::size_t nbytes) {
    return copy_on(to, stream, target, from, nbytes);
  };
  device.device_memory_stats = [](const C_Device, std::size_t* total,
                                  std::size_t* free) {
    *total = *free = kMemoryBytes;
    return C_SUCCESS;
  };
  device.device_min_chunk_size = [](const C_Device, std::size_t* nbytes) {
    *nbytes = 256;
    return C_SUCCESS;
  };
  device.device_max_chunk_size = [](const C_Device, std::size_t* nbytes) {
    *nbytes = 1 << 20;
    return C_SUCCESS;
  };
}

}  // namespace
}  // namespace later

extern "C" __attribute__((visibility("default"))) void InitPlugin(
    CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  static std::string kind = later::kKind, sub_kind = "threads";
  params->device_type = kind.data();
  params->sub_device_type = sub_kind.data();
  auto& device = *params->interface;
  std::memset(&device, 0, sizeof device);
  device.size = sizeof device;
  later::fill_devices(device);
  later::fill_streams(device);
  later::fill_memory(device);
  later::fill_collectives(device);
  later::register_operators();
}

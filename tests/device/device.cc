// A device for tests: memory of the host, and streams that are threads. It runs what it is given later, as a GPU
// does, so that whatever forgets to wait for a stream reads what is not there yet.
//
// - An operator is put into the queue of the current stream and runs there on the CPU; the caller goes on at
//   once. What it allocates is known from its meta kernel. Where an operator has none, or returns numbers, the
//   caller waits for the stream.
// - Memory belongs to the stream that was current when it was allocated. It is freed as by the allocator of
//   CUDA: the next allocation on that stream may get it, as soon as the streams that were recorded
//   (`Tensor.record_stream`) have come to where they were when it was freed. Here that allocation has the stream
//   fill it with NaNs, for whoever still reads it. New memory holds NaNs.
// - A collective runs on a stream of the group's own, in the order of calls, through a group of Gloo. Waiting for
//   it lets the current stream wait, and not the caller: as with NCCL.
// - A copy to memory of the host that is not pinned, or without `non_blocking`, makes the caller wait.
//
// PyTorch calls the kind of device PrivateUse1; tests/device/__init__.py gives it a name.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr int kStreams = 32;  // of a device; then the first come again
constexpr std::size_t kQuarantineBytes = 64 << 20;

std::atomic<int> lag_us{0};
std::atomic<bool> waiting_is_forbidden{false};

// A place in a stream's queue, which others can wait for.
class Mark {
 public:
  void set() {
    std::lock_guard lock(mutex_);
    is_set_ = true;
    changed_.notify_all();
  }
  bool is_set() {
    std::lock_guard lock(mutex_);
    return is_set_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

using MarkPointer = std::shared_ptr<Mark>;

std::mutex error_mutex;
std::string first_error;

void note_error(const std::string& text) {
  std::lock_guard lock(error_mutex);
  if (first_error.empty()) first_error = text;
}

// As a GPU tells of an error: in some later call.
void raise_error() {
  std::string text;
  {
    std::lock_guard lock(error_mutex);
    text.swap(first_error);
  }
  TORCH_CHECK(text.empty(), "an operator on the test device failed: ", text);
}

// Without Python's lock: a stream may need it to let go of a tensor.
void wait_on_host(Mark& mark) {
  if (mark.is_set()) return;
  TORCH_CHECK(!waiting_is_forbidden, "the host waits for the test device");
  if (PyGILState_Check()) {
    pybind11::gil_scoped_release release;
    mark.wait();
  } else {
    mark.wait();
  }
}

// One stream: tasks that run one after the other in a thread. It is never deleted, as threads outlive main().
class Queue {
 public:
  void add(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { run(); }).detach();
    }
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }
  MarkPointer mark() {
    auto made = std::make_shared<Mark>();
    add([made] { made->set(); });
    return made;
  }
  void wait_for(MarkPointer mark) {
    add([mark] { mark->wait(); });
  }
  bool is_idle() {
    std::lock_guard lock(mutex_);
    return tasks_.empty() && !is_running_;
  }
  void drain() { wait_on_host(*mark()); }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
        is_running_ = true;
      }
      if (int us = lag_us)
        std::this_thread::sleep_for(std::chrono::microseconds(us));
      try {
        task();
      } catch (const std::exception& error) {
        note_error(error.what());
      }
      task = nullptr;  // with what it holds
      std::lock_guard lock(mutex_);
      is_running_ = false;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool has_thread_ = false, is_running_ = false;
};

Queue& queue_of(c10::Stream stream) {
  static auto* queues = new Queue[kDevices * kStreams];
  return queues[stream.device_index() * kStreams + stream.id()];
}

thread_local int current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {};

c10::Device on(c10::DeviceIndex index) {
  return {kType,
          index < 0 ? static_cast<c10::DeviceIndex>(current_device) : index};
}

c10::Stream stream_of(c10::Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

c10::Stream current_stream(c10::Device device) {
  auto index = on(device.index());
  return stream_of(index, current_streams[index.index()]);
}

Queue& current_queue(c10::Device device) {
  return queue_of(current_stream(device));
}

struct Event {
  MarkPointer mark;
};

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
    if (event && static_cast<Event*>(event)->mark)
      queue_of(stream).wait_for(static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || !static_cast<Event*>(event)->mark ||
           static_cast<Event*>(event)->mark->is_set();
  }
  void synchronizeEvent(void* event) const override {
    if (event && static_cast<Event*>(event)->mark)
      wait_on_host(*static_cast<Event*>(event)->mark);
    raise_error();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(stream).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue_of(stream).drain();
    raise_error();
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    for (c10::StreamId id = 0; id < kStreams; ++id) {
      queue_of(stream_of(on(index), id)).drain();
    }
    raise_error();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Memory of the device, and the streams that use it.
struct Block {
  void* memory;
  std::size_t nbytes;
  Queue* owner;
  std::mutex mutex;
  std::set<Queue*> used_on;
};

// Freed memory stays as it is for a while, so that whoever still reads it finds NaNs.
void retire(void* memory, std::size_t nbytes) {
  static std::mutex mutex;
  static auto* kept = new std::deque<std::pair<void*, std::size_t>>;
  static std::size_t kept_bytes = 0;
  std::lock_guard lock(mutex);
  kept->emplace_back(memory, nbytes);
  kept_bytes += nbytes;
  while (kept_bytes > kQuarantineBytes && kept->size() > 1) {
    std::free(kept->front().first);
    kept_bytes -= kept->front().second;
    kept->pop_front();
  }
}

struct Freed {
  void* memory;
  std::size_t nbytes;
  std::vector<MarkPointer>
      uses;  // other streams come to these before the memory is used again
};

std::mutex freed_mutex;

std::map<Queue*, std::vector<Freed>>& freed_of() {
  static auto* all = new std::map<Queue*, std::vector<Freed>>;
  return *all;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Freed freed{block->memory, block->nbytes, {}};
  for (auto* queue : block->used_on) freed.uses.push_back(queue->mark());
  std::lock_guard lock(freed_mutex);
  freed_of()[block->owner].push_back(std::move(freed));
  delete block;
}

// The stream allocates again, and gets what was freed before.
void use_again(Queue& owner) {
  std::lock_guard lock(freed_mutex);
  auto& all = freed_of()[&owner];
  std::vector<Freed> later;
  for (auto& each : all) {
    if (!std::all_of(each.uses.begin(), each.uses.end(),
                     [](auto& mark) { return mark->is_set(); })) {
      later.push_back(std::move(each));
      continue;
    }
    owner.add([memory = each.memory, nbytes = each.nbytes] {
      std::memset(memory, 0xff, nbytes);
      retire(memory, nbytes);
    });
  }
  all.swap(later);
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t nbytes) override {
    auto device = on(-1);
    if (nbytes == 0) return {nullptr, device};
    auto& owner = current_queue(device);
    use_again(owner);
    auto* block = new Block{std::aligned_alloc(64, (nbytes + 63) / 64 * 64),
                            nbytes,
                            &owner,
                            {},
                            {}};
    TORCH_CHECK(block->memory, "no memory");
    std::memset(block->memory, 0xff, nbytes);
    return {block->memory, block, free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from,
                 std::size_t nbytes) const override {
    current_queue(on(-1)).drain();
    std::memcpy(to, from, nbytes);
  }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(kType, &device_memory);

void Guard::recordDataPtrOnStream(const c10::DataPtr& pointer,
                                  const c10::Stream& stream) const {
  if (pointer.get_deleter() != free_block) return;
  auto* block = static_cast<Block*>(pointer.get_context());
  auto* queue = &queue_of(stream);
  std::lock_guard lock(block->mutex);
  if (queue != block->owner) block->used_on.insert(queue);
}

// Memory of the host that streams may copy to and from while the caller goes on.
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::DeviceType::CPU};
    void* memory = std::aligned_alloc(64, (nbytes + 63) / 64 * 64);
    TORCH_CHECK(memory, "no memory");
    std::memset(memory, 0xff, nbytes);
    std::lock_guard lock(mutex_);
    ranges_[reinterpret_cast<std::uintptr_t>(memory)] = nbytes;
    return {memory, memory, free_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_pinned; }
  void copy_data(void* to, const void* from,
                 std::size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  bool holds(const void* pointer) {
    auto address = reinterpret_cast<std::uintptr_t>(pointer);
    std::lock_guard lock(mutex_);
    auto next = ranges_.upper_bound(address);
    return next != ranges_.begin() &&
           address < std::prev(next)->first + std::prev(next)->second;
  }

 private:
  static void free_pinned(void* memory);

  std::mutex mutex_;
  std::map<std::uintptr_t, std::size_t> ranges_;
};

PinnedMemory& pinned_memory() {
  static auto* made = new PinnedMemory;
  return *made;
}

void PinnedMemory::free_pinned(void* memory) {
  auto& all = pinned_memory();
  std::lock_guard lock(all.mutex_);
  all.ranges_.erase(reinterpret_cast<std::uintptr_t>(memory));
  std::free(memory);
}

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
    return pinned_memory().holds(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage,
                              std::size_t nbytes) const override {
    auto old = storage.nbytes();
    auto fresh = device_memory.allocate(nbytes);
    current_queue(storage.device())
        .add([to = fresh.get(), from = storage.data(),
              count = std::min(old, nbytes)] {
          if (count) std::memcpy(to, from, count);
        });
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(nbytes);
  }
};

// The memory of a tensor as a tensor of the CPU. It keeps nothing alive, as a kernel of a GPU does not.
struct Alias {
  void* data;
  std::vector<std::int64_t> sizes, strides;
  c10::ScalarType dtype;

  explicit Alias(const at::Tensor& tensor)
      : data(tensor.numel() ? tensor.data_ptr() : nullptr),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()) {}

  at::Tensor on_host() const {
    return at::from_blob(data, sizes, strides,
                         at::TensorOptions().dtype(dtype));
  }
};

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// Replaces every tensor in a value, in lists, too.
c10::IValue replaced(const c10::IValue& value,
                     const std::function<at::Tensor(const at::Tensor&)>& by) {
  if (value.isTensor()) return by(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorVector())
      made.push_back(by(each));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& each : value.toOptionalTensorVector()) {
      made.push_back(each.has_value() ? std::optional<at::Tensor>(by(*each))
                                      : std::nullopt);
    }
    return made;
  }
  return value;
}

c10::IValue at_device(const c10::IValue& value, c10::Device device) {
  return value.isDevice() && value.toDevice().type() == kType
             ? c10::IValue(device)
             : value;
}

void for_each_tensor(const c10::IValue& value,
                     const std::function<void(const at::Tensor&)>& do_it) {
  replaced(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) do_it(tensor);
    return tensor;
  });
}

// What an operator would return, without computing it; nothing: it has no meta kernel.
std::optional<torch::jit::Stack> returned_by(
    const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  torch::jit::Stack stack;
  for (const auto& each : arguments) {
    auto as_meta = [](const at::Tensor& tensor) {
      if (!is_ours(tensor)) return tensor;
      return at::empty_strided(tensor.sizes(), tensor.strides(),
                               tensor.options().device(c10::kMeta));
    };
    stack.push_back(at_device(replaced(each, as_meta), c10::kMeta));
  }
  try {
    op.callBoxed(stack);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  for (const auto& each : stack) {
    bool is_tensor =
        (each.isTensor() && each.toTensor().defined()) || each.isTensorList();
    if (!is_tensor) return std::nullopt;
  }
  return stack;
}

// For operators that cannot be put off: the caller waits.
void run_now(const c10::OperatorHandle& op, torch::jit::Stack* stack,
             c10::Device device) {
  TORCH_CHECK(!waiting_is_forbidden, "the host waits for the test device in ",
              op.operator_name());
  current_queue(device).drain();
  at::native::cpu_fallback(op, stack);
  raise_error();
}

// Runs any operator that has no kernel of its own below.
void run_later(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  torch::jit::Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count),
                              stack->end());
  auto device = on(-1);
  bool has_tensor = false, is_deferrable = true;
  bool may_grow = false;  // what is written to may have to be made larger
  for (std::size_t at = 0; at < count; ++at) {
    const auto* alias = schema.arguments()[at].alias_info();
    for_each_tensor(arguments[at], [&](const at::Tensor& tensor) {
      if (is_ours(tensor)) {
        if (!has_tensor) device = tensor.device();
        has_tensor = true;
        if (alias && alias->isWrite() && tensor.numel() == 0) may_grow = true;
      } else if (tensor.dim() > 0 && tensor.device().is_cpu()) {
        is_deferrable = false;  // indices, say
      }
    });
  }
  std::vector<std::optional<c10::IValue>>
      given;  // what is returned, where it is an argument
  for (const auto& each : schema.returns()) {
    given.emplace_back();
    if (!each.alias_info()) continue;
    for (std::size_t at = 0; at < count; ++at) {
      const auto* alias = schema.arguments()[at].alias_info();
      if (alias && *alias == *each.alias_info()) given.back() = arguments[at];
    }
    if (!given.back() || !each.alias_info()->isWrite())
      is_deferrable = false;  // a view
  }
  c10::DeviceGuard guard(device);
  const bool allocates = std::any_of(given.begin(), given.end(),
                                     [](const auto& each) { return !each; });
  std::optional<torch::jit::Stack> shapes;
  if (is_deferrable && (allocates || may_grow)) {
    shapes = returned_by(op, arguments);
    is_deferrable = shapes.has_value();
  }
  if (!is_deferrable) return run_now(op, stack, device);

  torch::jit::Stack results;
  std::vector<std::optional<std::vector<Alias>>> outputs;
  for (std::size_t at = 0; at < given.size(); ++at) {
    if (given[at]) {
      if (shapes && given[at]->isTensor() &&
          given[at]->toTensor().numel() == 0) {
        given[at]->toTensor().resize_((*shapes)[at].toTensor().sizes());
      }
      results.push_back(*given[at]);
      outputs.emplace_back();
      continue;
    }
    outputs.emplace_back(std::vector<Alias>());
    results.push_back(replaced((*shapes)[at], [&](const at::Tensor& meta) {
      auto made = at::empty_strided(meta.sizes(), meta.strides(),
                                    meta.options().device(device));
      outputs.back()->emplace_back(made);
      return made;
    }));
  }
  // Tensors as they are now, and without holding them.
  std::vector<Alias> aliases;
  for (auto& argument : arguments) {
    argument = at_device(replaced(argument,
                                  [&](const at::Tensor& tensor) {
                                    if (!tensor.defined()) return tensor;
                                    if (!is_ours(tensor)) return tensor.clone();
                                    aliases.emplace_back(tensor);
                                    return at::Tensor();
                                  }),
                         c10::kCPU);
  }
  // Undefined tensors stand for aliases, in order; those that were undefined before have none.
  std::vector<bool> is_alias;
  for (std::size_t at = 0; at < count; ++at) {
    const auto& before = (*stack)[stack->size() - count + at];
    replaced(before, [&](const at::Tensor& tensor) {
      is_alias.push_back(is_ours(tensor));
      return tensor;
    });
  }
  current_queue(device).add([op, arguments, aliases, is_alias, outputs] {
    c10::InferenceMode no_autograd;
    std::size_t number = 0, alias = 0;
    torch::jit::Stack local;
    for (const auto& each : arguments) {
      local.push_back(replaced(each, [&](const at::Tensor& tensor) {
        return is_alias[number++] ? aliases[alias++].on_host() : tensor;
      }));
    }
    op.callBoxed(local);
    for (std::size_t at = 0; at < outputs.size(); ++at) {
      if (!outputs[at]) continue;
      std::size_t place = 0;
      for_each_tensor(local[at], [&](const at::Tensor& found) {
        (*outputs[at])[place++].on_host().copy_(found);
      });
    }
  });
  torch::jit::drop(*stack, count);
  for (auto& each : results) stack->push_back(std::move(each));
}

// A convolution has other names where a device brings its own.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_later(op, stack);
}

void convolution_backward(const c10::OperatorHandle&,
                          torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      "aten::convolution_backward", "");
  auto& arguments = *stack;
  const auto first =
      arguments.size() -
      10;  // gradient, input, weight, then (here) the sizes of the bias
  const std::int64_t outputs = arguments[first].toTensor().size(1);
  arguments.insert(arguments.begin() + static_cast<std::ptrdiff_t>(first) + 3,
                   std::vector<std::int64_t>{outputs});
  run_later(op, stack);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(on(device ? device->index() : -1));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory, keys,
      dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>,
                         std::optional<c10::Device> device,
                         std::optional<bool>) {
  c10::DeviceGuard guard(on(device ? device->index() : -1));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      &device_memory, keys,
      dtype.value_or(at::get_default_dtype_as_scalartype()));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to,
                     bool non_blocking) {
  if (to.numel() == 0) return to;
  auto source = from.expand_as(to);
  if (is_ours(from) && is_ours(to)) {
    auto& reader = current_queue(from.device());
    if (from.device() != to.device())
      reader.wait_for(current_queue(to.device()).mark());
    reader.add(
        [a = Alias(source), b = Alias(to)] { b.on_host().copy_(a.on_host()); });
    if (from.device() != to.device())
      current_queue(to.device()).wait_for(reader.mark());
    return to;
  }
  const auto& host = is_ours(from) ? to : source;
  auto& queue = current_queue(is_ours(from) ? from.device() : to.device());
  const bool is_later = non_blocking && host.is_pinned();
  if (is_ours(from)) {
    queue.add([a = Alias(source), b = Alias(to), kept = to.storage()] {
      b.on_host().copy_(a.on_host());
    });
    if (!is_later) queue.drain();
  } else if (is_later) {
    queue.add([a = Alias(source), b = Alias(to), kept = from.storage()] {
      b.on_host().copy_(a.on_host());
    });
  } else {
    // From a copy, as what is not pinned goes through memory that is.
    queue.add([a = source.clone(), b = Alias(to)] { b.on_host().copy_(a); });
    if (!non_blocking) queue.drain();
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  current_queue(tensor.device()).drain();
  raise_error();
  return Alias(tensor).on_host().item();
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

at::Tensor& set_memory(at::Tensor& tensor, at::Storage storage,
                       std::int64_t offset, at::IntArrayRef sizes,
                       at::IntArrayRef strides) {
  auto* made = tensor.unsafeGetTensorImpl();
  made->set_storage_keep_dtype(std::move(storage));
  if (strides.size() == sizes.size()) {
    made->set_sizes_and_strides(sizes, strides, offset);
  } else {
    made->set_sizes_contiguous(sizes);
    made->set_storage_offset(offset);
  }
  return tensor;
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_memory(tensor, source.storage(), source.storage_offset(),
                    source.sizes(), source.strides());
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat>) {
  auto nbytes = (c10::multiply_integers(sizes) + tensor.storage_offset()) *
                tensor.element_size();
  if (static_cast<std::size_t>(nbytes) > tensor.storage().nbytes()) {
    Hooks().resizePrivateUse1Bytes(tensor.storage(),
                                   static_cast<std::size_t>(nbytes));
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

// A call of a group: the streams of the caller can wait for it.
class Call final : public c10d::Work {
 public:
  Call(c10d::OpType kind, c10::Device device, bool blocks)
      : c10d::Work(-1, kind), device_(device), blocks_(blocks) {}

  bool isCompleted() override { return end->is_set(); }
  bool isSuccess() const override { return end->is_set() && !error(); }
  std::exception_ptr exception() const override { return error(); }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    if (blocks_) wait_on_host(*end);
    if (auto found = error()) std::rethrow_exception(found);
    synchronize();
    return true;
  }
  void synchronize() override { current_queue(device_).wait_for(end); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future;
  }
  void fail(std::exception_ptr error) {
    std::lock_guard lock(mutex_);
    exception_ = std::move(error);
  }

  MarkPointer end = std::make_shared<Mark>();
  c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  std::exception_ptr error() const {
    std::lock_guard lock(mutex_);
    return exception_;
  }

  c10::Device device_;
  bool blocks_;
};

// Collectives on a stream of their own, by a group of Gloo. Waiting for one blocks the caller if its name is
// "gloo", as Gloo's own with tensors of a GPU; else the caller's stream, as NCCL's. `abort` ends all of them.
class Group final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Sums = c10d::ReduceOp;

  Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size,
        std::string name)
      : c10d::Backend(rank, size),
        gloo_(std::move(gloo)),
        name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return 0; }
  void abort() override { is_aborted_ = true; }
  void shutdown() override { is_aborted_ = true; }

  c10::intrusive_ptr<c10d::Work> allreduce(
      Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return later(c10d::OpType::ALLREDUCE, tensors, tensors,
                 [this, options](Tensors host) {
                   finish(gloo_->allreduce(host, options));
                   return host;
                 });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(
      Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return later(c10d::OpType::BROADCAST, tensors, tensors,
                 [this, options](Tensors host) {
                   finish(gloo_->broadcast(host, options));
                   return host;
                 });
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions&) override {
    return later(c10d::OpType::ALLGATHER, outputs[0], inputs,
                 [this](Tensors host) { return rows(host[0]); });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions&) override {
    Tensors outputs = output.view({getSize(), -1}).unbind(),
            inputs = {input.view({-1})};
    return later(c10d::OpType::_ALLGATHER_BASE, outputs, inputs,
                 [this](Tensors host) { return rows(host[0]); });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override {
    Tensors outputs = {output}, inputs = {input};
    c10d::AllreduceOptions sums;
    sums.reduceOp = options.reduceOp;
    return later(c10d::OpType::_REDUCE_SCATTER_BASE, outputs, inputs,
                 [this, sums](Tensors host) {
                   finish(gloo_->allreduce(host, sums));
                   return Tensors{host[0].view({getSize(), -1})[getRank()]};
                 });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    Tensors one = {at::zeros({1}, at::TensorOptions().device(on(-1)))};
    return allreduce(one, {});
  }

 private:
  // The rows of all ranks, from this rank's.
  Tensors rows(const at::Tensor& own) {
    std::vector<Tensors> found(1);
    for (int rank = 0; rank < getSize(); ++rank)
      found[0].push_back(at::empty_like(own));
    Tensors sent = {own};
    finish(gloo_->allgather(found, sent, {}));
    return found[0];
  }

  // Asked now and then, so that `abort` ends it.
  void finish(const c10::intrusive_ptr<c10d::Work>& work) {
    while (!work->isCompleted()) {
      TORCH_CHECK(!is_aborted_, "the group was aborted");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    work->wait();
  }

  c10::intrusive_ptr<c10d::Work> later(c10d::OpType kind, Tensors outputs,
                                       Tensors inputs,
                                       std::function<Tensors(Tensors)> call) {
    auto device = inputs[0].device();
    auto own = stream(device);
    auto& queue = queue_of(
        first_stream());  // one for all devices, as ranks make calls in one order
    auto work = c10::make_intrusive<Call>(kind, device, name_ == "gloo");
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{device});
    queue.wait_for(current_queue(device).mark());
    // The tensors are held until the call is over; it reads what they hold then.
    queue.add([this, work, outputs, inputs, call] {
      try {
        TORCH_CHECK(!is_aborted_, "the group was aborted");
        c10::InferenceMode no_autograd;
        Tensors host;
        for (const auto& each : inputs)
          host.push_back(Alias(each).on_host().clone());
        auto found = call(host);
        for (std::size_t at = 0; at < outputs.size(); ++at)
          Alias(outputs[at]).on_host().copy_(found[at]);
      } catch (...) {
        work->fail(std::current_exception());
      }
      work->end->set();
    });
    queue_of(own).wait_for(work->end);
    c10::StreamGuard guard(
        own);  // whoever waits for the future waits for this stream
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }

  c10::Stream first_stream() {
    std::lock_guard lock(streams_mutex_);
    return streams_.front().second;
  }

  c10::Stream stream(c10::Device device) {
    std::lock_guard lock(
        streams_mutex_);  // autograd has a thread for each device
    for (const auto& [index, stream] : streams_) {
      if (index == device.index()) return stream;
    }
    return streams_
        .emplace_back(device.index(), Guard().getNewStream(device, 0))
        .second;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string name_;
  std::mutex streams_mutex_;
  std::vector<std::pair<c10::DeviceIndex, c10::Stream>>
      streams_;  // one of each device that has made a call
  std::atomic<bool> is_aborted_{false};
};

void sleep_on_stream(int milliseconds) {
  current_queue(on(-1)).add([=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  });
}

}  // namespace

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

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_later>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1,
                   m){KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
                          KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)}

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
  module.def(
      "sleep", sleep_on_stream,
      "Give the current stream something to do, for so many milliseconds.");
  module.def(
      "set_lag", [](int us) { lag_us = us; },
      "Microseconds before each task of a stream.");
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

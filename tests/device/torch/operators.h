// An operator is put into the queue of the current stream and runs there on the CPU; the caller continues at
// once. Its meta kernel gives the shapes of its results. If an operator has no meta kernel, or returns
// numbers, the caller waits for the stream. A copy to memory of the host that is not pinned, or without
// `non_blocking`, makes the caller wait.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "device.h"
#include "memory.h"
#include "streams.h"

namespace later {

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

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// Replaces every tensor in a value, in lists, too.
inline c10::IValue replaced(
    const c10::IValue& value,
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

inline c10::IValue at_device(const c10::IValue& value, c10::Device device) {
  return value.isDevice() && value.toDevice().type() == kType
             ? c10::IValue(device)
             : value;
}

inline void for_each_tensor(
    const c10::IValue& value,
    const std::function<void(const at::Tensor&)>& do_it) {
  replaced(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) do_it(tensor);
    return tensor;
  });
}

// For operators that cannot run later: the caller waits.
inline void run_now(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                    c10::Device device) {
  RECORD_USER_SCOPE("later::launch");
  TORCH_CHECK(!waiting_is_forbidden, "the host waits for the test device in ",
              op.operator_name());
  drain(current_queue(device));
  at::native::cpu_fallback(op, stack);
  raise_error();
}

using Values = c10::ArrayRef<c10::IValue>;

// The properties of a call's arguments that decide how it can run.
struct Given {
  c10::Device device;
  bool needs_host = false;  // the operator reads memory of the host
  bool may_grow = false;    // an output may have to be enlarged
};

inline Given look_at(const c10::FunctionSchema& schema, Values arguments) {
  Given found{on(-1)};
  bool has_tensor = false;
  for (std::size_t at = 0; at < arguments.size(); ++at) {
    const auto* alias = schema.arguments()[at].alias_info();
    for_each_tensor(arguments[at], [&](const at::Tensor& tensor) {
      if (is_ours(tensor)) {
        if (!has_tensor) found.device = tensor.device();
        has_tensor = true;
        if (alias && alias->isWrite() && tensor.numel() == 0)
          found.may_grow = true;
      } else if (tensor.dim() > 0 && tensor.device().is_cpu()) {
        found.needs_host = true;  // indices, for example
      }
    });
  }
  return found;
}

// For each value that an operator returns: the argument that it aliases, or none if it is new. No list at all
// if one is a view.
using Returned = std::vector<std::optional<c10::IValue>>;

inline std::optional<Returned> returned_arguments(
    const c10::FunctionSchema& schema, Values arguments) {
  Returned returned;
  for (const auto& each : schema.returns()) {
    returned.emplace_back();
    if (!each.alias_info()) continue;
    for (std::size_t at = 0; at < arguments.size(); ++at) {
      const auto* alias = schema.arguments()[at].alias_info();
      if (alias && *alias == *each.alias_info())
        returned.back() = arguments[at];
    }
    if (!returned.back() || !each.alias_info()->isWrite()) return std::nullopt;
  }
  return returned;
}

inline bool has_new_value(const Returned& returned) {
  return std::any_of(returned.begin(), returned.end(),
                     [](const auto& each) { return !each; });
}

// The results of an operator, without computing it; nothing: it has no meta kernel, or returns numbers.
inline std::optional<torch::jit::Stack> shapes_from_meta_kernel(
    const c10::OperatorHandle& op, Values arguments) {
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

// Arguments that are written to and are empty get the memory that the operator would give them.
inline void grow(const Returned& returned, const torch::jit::Stack& shapes) {
  for (std::size_t at = 0; at < returned.size(); ++at) {
    if (returned[at] && returned[at]->isTensor() &&
        returned[at]->toTensor().numel() == 0) {
      returned[at]->toTensor().resize_(shapes[at].toTensor().sizes());
    }
  }
}

// What the caller gets at once: arguments, and new tensors that the stream fills later.
struct Results {
  torch::jit::Stack values;
  // The memory of each value's new tensors; none for an argument, because the operator writes to that itself.
  std::vector<std::vector<Alias>> to_fill;
};

inline Results allocate_results(const Returned& returned,
                                const std::optional<torch::jit::Stack>& shapes,
                                c10::Device device) {
  Results results;
  for (std::size_t at = 0; at < returned.size(); ++at) {
    auto& to_fill = results.to_fill.emplace_back();
    if (returned[at]) {
      results.values.push_back(*returned[at]);
      continue;
    }
    auto like = [&](const at::Tensor& meta) {
      auto made = at::empty_strided(meta.sizes(), meta.strides(),
                                    meta.options().device(device));
      to_fill.emplace_back(made);
      return made;
    };
    results.values.push_back(replaced((*shapes)[at], like));
  }
  return results;
}

// The present arguments, without holding the tensors of the device. Those of the host are copied, as the
// caller may write to them before the stream reads them.
class Captured {
 public:
  explicit Captured(Values arguments) {
    for (const auto& each : arguments) {
      auto kept = replaced(each, [&](const at::Tensor& tensor) {
        auto& alias = aliases_.emplace_back();
        if (!tensor.defined()) return tensor;
        if (!is_ours(tensor)) return tensor.clone();
        alias.emplace(tensor);
        return at::Tensor();
      });
      values_.push_back(at_device(kept, c10::kCPU));
    }
  }

  torch::jit::Stack on_host() const {
    torch::jit::Stack made;
    auto alias = aliases_.begin();
    for (const auto& each : values_) {
      made.push_back(replaced(each, [&](const at::Tensor& tensor) {
        const auto& found = *alias++;
        return found ? found->on_host() : tensor;
      }));
    }
    return made;
  }

 private:
  torch::jit::Stack values_;
  // All tensors of the device in them, in order.
  std::vector<std::optional<Alias>> aliases_;
};

// Runs any operator that has no kernel of its own below.
inline void run_later(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const Values arguments = torch::jit::last(stack, count);
  const auto given = look_at(schema, arguments);
  const auto returned = returned_arguments(schema, arguments);
  c10::DeviceGuard guard(given.device);
  if (given.needs_host || !returned) return run_now(op, stack, given.device);
  std::optional<torch::jit::Stack> shapes;
  if (given.may_grow || has_new_value(*returned)) {
    shapes = shapes_from_meta_kernel(op, arguments);
    if (!shapes) return run_now(op, stack, given.device);
    grow(*returned, *shapes);
  }
  auto results = allocate_results(*returned, shapes, given.device);
  launch(current_queue(given.device), [op, arguments = Captured(arguments),
                                       to_fill = std::move(results.to_fill)] {
    c10::InferenceMode no_autograd;
    auto local = arguments.on_host();
    op.callBoxed(local);
    for (std::size_t at = 0; at < to_fill.size(); ++at) {
      if (to_fill[at].empty()) continue;
      auto next = to_fill[at].begin();
      for_each_tensor(local[at], [&](const at::Tensor& found) {
        (next++)->on_host().copy_(found);
      });
    }
  });
  torch::jit::drop(*stack, count);
  for (auto& each : results.values) stack->push_back(std::move(each));
}

// Operators on many tensors count the writes themselves, as CUDA's kernels do: they return no value from
// which torch could.
inline void run_many_later(const c10::OperatorHandle& op,
                           torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const Values arguments = torch::jit::last(stack, count);
  for (std::size_t at = 0; at < count; ++at) {
    const auto* alias = schema.arguments()[at].alias_info();
    if (!alias || !alias->isWrite()) continue;
    for_each_tensor(arguments[at], [](const at::Tensor& tensor) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    });
  }
  run_later(op, stack);
}

// A convolution has other names if a device brings its own.
inline void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_later(op, stack);
}

inline void convolution_backward(const c10::OperatorHandle&,
                                 torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      "aten::convolution_backward", "");
  auto& arguments = *stack;
  // Ten: gradient, input, weight, then (here) the sizes of the bias.
  const auto first = arguments.size() - 10;
  const std::int64_t outputs = arguments[first].toTensor().size(1);
  arguments.insert(arguments.begin() + static_cast<std::ptrdiff_t>(first) + 3,
                   std::vector<std::int64_t>{outputs});
  run_later(op, stack);
}

inline at::Tensor empty(c10::SymIntArrayRef size,
                        std::optional<c10::ScalarType> dtype,
                        std::optional<c10::Layout>,
                        std::optional<c10::Device> device, std::optional<bool>,
                        std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(on(device ? device->index() : -1));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory, keys,
      dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

inline at::Tensor empty_strided(c10::SymIntArrayRef size,
                                c10::SymIntArrayRef stride,
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

// On the stream of the device that is read; before and after, it synchronises with the stream of the other
// one.
inline void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  auto& reader = current_queue(from.device());
  auto& writer = current_queue(to.device());
  const bool is_between_devices = from.device() != to.device();
  if (is_between_devices) reader.wait_for(writer.mark());
  launch(reader,
         [a = Alias(from), b = Alias(to)] { b.on_host().copy_(a.on_host()); });
  if (is_between_devices) writer.wait_for(reader.mark());
}

inline void copy_to_host(const at::Tensor& from, const at::Tensor& to,
                         bool non_blocking) {
  auto& queue = current_queue(from.device());
  launch(queue, [a = Alias(from), b = Alias(to), kept = to.storage()] {
    b.on_host().copy_(a.on_host());
  });
  if (!(non_blocking && to.is_pinned())) drain(queue);
}

inline void copy_from_host(const at::Tensor& from, const at::Tensor& to,
                           bool non_blocking) {
  auto& queue = current_queue(to.device());
  if (non_blocking && from.is_pinned()) {
    launch(queue, [a = Alias(from), b = Alias(to), kept = from.storage()] {
      b.on_host().copy_(a.on_host());
    });
    return;
  }
  // From a copy, because pageable memory goes through pinned memory.
  launch(queue, [a = from.clone(), b = Alias(to)] { b.on_host().copy_(a); });
  if (!non_blocking) drain(queue);
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to,
                            bool non_blocking) {
  if (to.numel() == 0) return to;
  auto source = from.expand_as(to);
  if (is_ours(from) && is_ours(to)) {
    copy_on_device(source, to);
  } else if (is_ours(from)) {
    copy_to_host(source, to, non_blocking);
  } else {
    copy_from_host(source, to, non_blocking);
  }
  return to;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from,
                                       const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

inline at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  drain(current_queue(tensor.device()));
  raise_error();
  return Alias(tensor).on_host().item();
}

inline void record_stream(at::Tensor& tensor, c10::Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

inline at::Tensor& set_memory(at::Tensor& tensor, at::Storage storage,
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

inline at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_memory(tensor, source.storage(), source.storage_offset(),
                    source.sizes(), source.strides());
}

inline const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef sizes,
                                std::optional<at::MemoryFormat>) {
  const auto nbytes = static_cast<std::size_t>(
      (c10::multiply_integers(sizes) + tensor.storage_offset()) *
      tensor.element_size());
  if (nbytes > tensor.storage().nbytes())
    resize_storage(tensor.storage(), nbytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace later

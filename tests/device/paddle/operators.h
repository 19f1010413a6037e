// Operators that write in place. If Paddle finds no kernel of the device, it runs the CPU's on copies, and
// gives the tensor the memory of the result: a gradient that is a slice of a bucket would leave it. So these
// run the CPU's kernels on the memory of the device, after earlier work on the stream.
#pragma once

#include <paddle/phi/backends/context_pool.h>
#include <paddle/phi/backends/cpu/cpu_context.h>
#include <paddle/phi/backends/custom/custom_context.h>
#include <paddle/phi/common/int_array.h>
#include <paddle/phi/common/scalar.h>
#include <paddle/phi/core/dense_tensor.h>
#include <paddle/phi/core/kernel_factory.h>
#include <paddle/phi/core/kernel_utils.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace later {

inline constexpr char kKind[] = "later";

// The memory of the device, as a tensor for the CPU's kernels.
class OnDevice final : public phi::CPUContext {
 public:
  explicit OnDevice(const phi::DeviceContext& device)
      : phi::CPUContext(phi::CPUPlace()), place_(device.GetPlace()) {
    SetAllocator(&device.GetAllocator());
    SetHostAllocator(&device.GetHostAllocator());
    SetZeroAllocator(&device.GetZeroAllocator());
    SetHostZeroAllocator(&device.GetHostZeroAllocator());
  }
  const phi::Place& GetPlace() const override { return place_; }

 private:
  phi::Place place_;
};

inline phi::Backend backend() {
  return phi::TransToPhiBackend(phi::CustomPlace(kKind, 0));
}

// The name of an operator, as an argument of a template.
template <std::size_t size>
struct Name {
  char text[size];
  constexpr Name(const char (&from)[size]) { std::copy_n(from, size, text); }
};

// Makes the device run `run` for an operator, in all dtypes that the CPU has a kernel for.
template <auto run>
void add_kernel(const char* name) {
  auto& kernels = phi::KernelFactory::Instance().kernels()[name];
  std::vector<std::pair<phi::KernelKey, phi::Kernel>> made;
  for (auto& [key, of_cpu] : kernels) {
    if (key.backend() != phi::Backend::CPU) continue;
    using Made = phi::KernelImpl<decltype(run), run>;
    phi::Kernel kernel(&Made::Compute,
                       reinterpret_cast<void*>(&Made::VariadicCompute));
    *kernel.mutable_args_def() = of_cpu.args_def();
    for (auto& each : kernel.mutable_args_def()->input_defs())
      each.SetBackend(backend());
    for (auto& each : kernel.mutable_args_def()->output_defs())
      each.SetBackend(backend());
    made.emplace_back(phi::KernelKey(backend(), key.layout(), key.dtype()),
                      kernel);
  }
  for (auto& [key, kernel] : made) kernels[key] = kernel;
}

template <Name name, typename... Arguments>
class Operator {
 public:
  static void add() { add_kernel<&run>(name.text); }

 private:
  static void run(const phi::CustomContext& device, Arguments... arguments) {
    device.Wait();
    OnDevice here(device);
    phi::DataType dtype = phi::DataType::UNDEFINED;  // of the first output
    auto look = [&](const auto& each) {
      if constexpr (std::is_same_v<std::decay_t<decltype(each)>,
                                   phi::DenseTensor*>) {
        if (each && dtype == phi::DataType::UNDEFINED) dtype = each->dtype();
      }
    };
    (look(arguments), ...);
    const phi::Kernel& kernel = phi::KernelFactory::Instance().SelectKernel(
        name.text, {phi::Backend::CPU, phi::DataLayout::ALL_LAYOUT, dtype});
    using Run = void (*)(const phi::DeviceContext&, Arguments...);
    kernel.GetVariadicKernelFn<Run>()(here, arguments...);
  }
};

// The CPU's kernel would copy from place to place on a stream, and has none.
inline void assign(const phi::CustomContext& device,
                   const phi::DenseTensor& from, phi::DenseTensor* to) {
  device.Wait();
  device.Alloc(to, from.dtype());
  if (from.numel())
    std::memcpy(to->data(), from.data(),
                from.numel() * phi::SizeOf(from.dtype()));
}

inline void register_operators() {
  using In = const phi::DenseTensor&;
  using Maybe = const paddle::optional<phi::DenseTensor>&;
  using Out = phi::DenseTensor*;
  using Number = const phi::Scalar&;
  add_kernel<&assign>("assign");
  Operator<"add", In, In, Out>::add();
  Operator<"subtract", In, In, Out>::add();
  Operator<"multiply", In, In, Out>::add();
  Operator<"scale", In, Number, Number, bool, Out>::add();
  Operator<"fill", In, Number, Out>::add();
  Operator<"full", const phi::IntArray&, Number, phi::DataType, Out>::add();
  Operator<"contiguous", In, Out>::add();
  Operator<"strided_copy", In, const std::vector<std::int64_t>&,
           const std::vector<std::int64_t>&, std::int64_t, Out>::add();
  Operator<"sgd", In, In, In, Maybe, bool, Out, Out>::add();
  Operator<"momentum", In, In, In, In, Maybe, float, bool, const std::string&,
           float, bool, float, Out, Out, Out>::add();
  Operator<"adam", In, In, In, In, In, Maybe, In, In, Maybe, Maybe, Number,
           Number, Number, bool, std::int64_t, bool, bool, bool, Out, Out, Out,
           Out, Out, Out, Out>::add();
}

}  // namespace later

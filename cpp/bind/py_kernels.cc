// The reductions, as single calls, and arithmetic with default floats.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "bind/bindings.h"
#include "bind/call.h"
#include "bind/pointer.h"
#include "core/isa.h"
#include "kernels/default_floats.h"
#include "kernels/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

void scale_array(int dtype, Pointer pointer, size_t count, double factor) {
  const auto type = static_cast<DType>(dtype);
  if (!is_supported(type, ReduceOp::kMean))
    misuse("scale_array: a floating type is needed");
  memory_at(pointer, count * dtype_bytes(type), "scale_array");
  without_lock([&] { scale(type, as_pointer(pointer), count, factor); });
}

bool is_finite_array(int dtype, Pointer pointer, size_t count) {
  const auto type = static_cast<DType>(dtype);
  memory_at(pointer, count * dtype_bytes(type), "is_finite");
  bool is = true;
  without_lock([&] { is = is_finite(type, as_pointer(pointer), count); });
  return is;
}

/// For arithmetic in Python whose result must have the same bits on all ranks.
class PyDefaultFloats {
 public:
  void enter() { floats_.emplace(); }
  void exit() { floats_.reset(); }

 private:
  std::optional<DefaultFloats> floats_;
};

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::class_<PyDefaultFloats>(
      m, "DefaultFloats",
      "A context in which this thread rounds to nearest and keeps subnormals, "
      "as in a new process; at its end, the thread's own setting is restored.")
      .def(nb::init<>())
      .def("__enter__", [](PyDefaultFloats& self) { self.enter(); })
      .def("__exit__",
           [](PyDefaultFloats& self, const nb::args&) { self.exit(); });
  m.def(
      "set_isa", [](int isa) { return set_isa(static_cast<Isa>(isa)); },
      "isa"_a);
  m.def("best_isa", [] { return static_cast<int>(best_isa()); });
  m.def(
      "reduce_arrays",
      [](int dtype, int op, const std::vector<Pointer>& inputs,
         const std::vector<Pointer>& outputs, size_t count,
         const std::optional<std::vector<double>>& weights) {
        const size_t bytes = count * dtype_bytes(static_cast<DType>(dtype));
        check_memory(inputs, bytes, "reduce_arrays");
        check_memory(outputs, bytes, "reduce_arrays");
        std::vector<void*> in;
        std::vector<void*> out;
        for (const Pointer p : inputs) in.push_back(as_pointer(p));
        for (const Pointer p : outputs) out.push_back(as_pointer(p));
        ReduceStats stats;
        reduce(static_cast<DType>(dtype), static_cast<ReduceOp>(op), in.data(),
               static_cast<int>(in.size()), out.data(),
               static_cast<int>(out.size()), count,
               weights ? weights->data() : nullptr, &stats);
        return nb::make_tuple(stats.squared_norm, stats.nonfinite_ranks[0],
                              stats.nonfinite_ranks[1]);
      },
      "dtype"_a, "op"_a, "inputs"_a, "outputs"_a, "count"_a,
      "weights"_a = nb::none(), "Runs one kernel on raw pointers.");
  m.def("is_finite", &is_finite_array, "dtype"_a, "pointer"_a, "count"_a,
        "Whether no element of an array is an infinity or a NaN.");
  m.def("scale_array", &scale_array, "dtype"_a, "pointer"_a, "count"_a,
        "factor"_a,
        "Multiplies an array of a floating type, in place; with the same bits "
        "whatever the caller's rounding mode and treatment of subnormals.");
}

}  // namespace paceline

// The reductions, one call at a time: for tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "bind/bindings.h"
#include "bind/pointer.h"
#include "core/isa.h"
#include "kernels/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {

void bind_kernels(nb::module_& m) {
  m.def(
      "set_isa", [](int isa) { return set_isa(static_cast<Isa>(isa)); },
      "isa"_a);
  m.def("best_isa", [] { return static_cast<int>(best_isa()); });
  m.def(
      "reduce_arrays",
      [](int dtype, int op, const std::vector<Pointer>& inputs,
         const std::vector<Pointer>& outputs, size_t count,
         const std::optional<std::vector<double>>& weights) {
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
      "weights"_a = nb::none(), "Runs one kernel on raw pointers; for tests.");
}

}  // namespace paceline

// Features of this machine's kernel, and the calls that this process is in.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bind/bindings.h"
#include "bind/call.h"
#include "core/cgroup.h"
#include "core/futex.h"
#include "core/liveness_thread.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {

void bind_machine(nb::module_& m) {
  m.def("calls_under_way", [] { return calls_without_lock.load(); });
  m.def("has_futex_waitv", &has_futex_waitv);
  m.def("disable_futex_waitv", &disable_futex_waitv, "disabled"_a);
  m.def("has_robust_list", &has_robust_list);
  m.def(
      "cgroup_limits",
      [](const std::string& root) {
        const CgroupLimits found = read_cgroup_limits(root);
        std::optional<uint64_t> memory;
        if (found.memory_left != UINT64_MAX) memory = found.memory_left;
        std::optional<double> cores;
        if (found.cores != CgroupLimits::kNoCoreLimit) cores = found.cores;
        return nb::make_tuple(memory, cores);
      },
      "root"_a = "");
  m.def("disable_robust_list", &disable_robust_list, "disabled"_a);
}

}  // namespace paceline

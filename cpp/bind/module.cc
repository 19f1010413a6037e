// paceline._core: the Python module of the core. No other folder includes
// Python.
#include <nanobind/nanobind.h>

#include "bind/array_buffer.h"
#include "bind/bindings.h"

NB_MODULE(_core, m) {
  using namespace paceline;
  if (!import_numpy()) throw nanobind::python_error();
  // torch keeps process groups, and so their cores, beyond the interpreter's
  // end. That is not our leak, and a warning would not help users.
  nanobind::set_leak_warnings(false);
  bind_failures(m);
  bind_enumerations(m);
  bind_machine(m);
  bind_threads_at_exit(m);
  bind_kernels(m);
  bind_faults(m);
  bind_region(m);
  bind_model_memory(m);
  bind_step_table(m);
  bind_host_group(m);
  bind_backward_marks(m);
  bind_backward_records(m);
  bind_backward_status(m);
  bind_backward_reports(m);
  bind_recorder(m);
  bind_reducer(m);
  bind_host_sums(m);
  bind_storage_uses(m);
  bind_handed_gradients(m);
  bind_hook_order(m);
  bind_iteration_notes(m);
  bind_gradient_hook(m);
  bind_module_snapshot(m);
  bind_buffer_snapshot(m);
  bind_permutation(m);
  bind_compression(m);
  bind_hash(m);
}

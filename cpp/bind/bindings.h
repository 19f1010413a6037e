// Each file of this folder adds its classes and functions to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline {

void bind_backward_marks(nanobind::module_& m);
void bind_backward_records(nanobind::module_& m);
void bind_backward_reports(nanobind::module_& m);
void bind_backward_status(nanobind::module_& m);
void bind_buffer_snapshot(nanobind::module_& m);
void bind_compression(nanobind::module_& m);
void bind_enumerations(nanobind::module_& m);
void bind_failures(nanobind::module_& m);
void bind_faults(nanobind::module_& m);
void bind_gradient_hook(nanobind::module_& m);
void bind_handed_gradients(nanobind::module_& m);
void bind_hash(nanobind::module_& m);
void bind_hook_order(nanobind::module_& m);
void bind_host_group(nanobind::module_& m);
void bind_host_sums(nanobind::module_& m);
void bind_iteration_notes(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_machine(nanobind::module_& m);
void bind_model_memory(nanobind::module_& m);
void bind_module_snapshot(nanobind::module_& m);
void bind_permutation(nanobind::module_& m);
void bind_recorder(nanobind::module_& m);
void bind_reducer(nanobind::module_& m);
void bind_region(nanobind::module_& m);
void bind_step_table(nanobind::module_& m);
void bind_storage_uses(nanobind::module_& m);
void bind_threads_at_exit(nanobind::module_& m);

}  // namespace paceline

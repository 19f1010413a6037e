// The shared region as plain memory: notes copies, fills, reductions and holes
// in it, for the clocks to judge; and the labelled points that a rank passes.
#pragma once

#include <cstddef>

namespace paceline::schedules {

/// The address at which the shared region is mapped.
void set_region(std::byte* region, size_t bytes);
/// The program itself reads or writes there, one number at a time.
void note_plain_read(const void* from, size_t bytes);
void note_plain_write(const void* to, size_t bytes);

}  // namespace paceline::schedules

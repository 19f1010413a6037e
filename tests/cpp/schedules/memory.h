// Memory of a schedule: given back as a whole at its end, because ranks that
// are killed give nothing back. Deleted memory is filled with junk and not used
// again, so that a late reader is noticed.
#pragma once

namespace paceline::schedules {

/// Whether operator new takes from the schedule's memory.
void use_own_memory(bool use);
void forget_memory();
/// All memory that was taken so far belongs to the process and stays.
void keep_memory();
/// Restores the program's static words, and the memory that was kept, to their
/// state at the first call: a schedule begins in a new process.
void renew_statics();
/// Whether it is a static word; no rank sees those of another.
bool is_static(const void* word);

/// While it lives, operator new takes from the heap: for objects that outlive
/// the schedule.
class LastingMemory {
 public:
  LastingMemory();
  ~LastingMemory();
  LastingMemory(const LastingMemory&) = delete;
  LastingMemory& operator=(const LastingMemory&) = delete;

 private:
  const bool used_own_;
};

}  // namespace paceline::schedules

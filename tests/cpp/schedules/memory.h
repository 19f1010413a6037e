// Memory of a schedule: given back as a whole at its end, because ranks that
// are killed give nothing back. What is deleted is filled with junk and not
// used again, so that a late reader is noticed.
#pragma once

namespace paceline::schedules {

/// Whether operator new takes from the schedule's memory.
void use_own_memory(bool use);
void forget_memory();
/// What was taken so far belongs to the process and stays.
void keep_memory();
/// Puts the program's static words, and the memory that was kept, back to where
/// they were at the first call: a schedule begins in a new process.
void renew_statics();
/// Whether it is one of them; no rank sees those of another.
bool is_static(const void* word);

/// While it lives, operator new takes from the heap: for what outlives the
/// schedule.
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

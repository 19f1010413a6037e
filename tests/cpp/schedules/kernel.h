// The system calls of the core, implemented by a kernel under the scheduler:
// futexes are queues, threads are fibers, time is virtual, and a dead rank's
// robust list is walked some time after its death.
//
// The linker puts these in the place of the C library's (see CMakeLists.txt);
// outside of a schedule they pass every call on.
#pragma once

namespace paceline::schedules {

/// Ends the threads of a rank that was killed: takes them out of all queues and
/// marks the robust futexes that they hold.
void end_threads_of(int rank);
void forget_mutexes();

}  // namespace paceline::schedules

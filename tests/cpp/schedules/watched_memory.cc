#include "watched_memory.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include <optional>
#include <string>

#include "core/faults.h"
#include "kernels/kernels.h"
#include "memory.h"
#include "scheduler.h"

namespace paceline::schedules {
namespace {

Scheduler& scheduler() { return Scheduler::get(); }
bool is_simulated() { return scheduler().is_running(); }

std::byte* region = nullptr;
size_t region_bytes = 0;

bool is_watched(const void* address) {
  return address >= region && address < region + region_bytes &&
         is_simulated() && scheduler().events().watches_races &&
         (scheduler().current().is_main || scheduler().current().is_worker);
}

void report(const std::optional<Clocks::Race>& race, const char* verb) {
  if (!race) return;
  const LastingMemory lasting;
  const Fiber& other =
      *scheduler().fibers()[static_cast<size_t>(race->other_fiber)];
  scheduler().fail(
      "race: " + scheduler().current().name + " " + verb + " byte " +
      std::to_string(race->offset) + " of the region, which " + other.name +
      (race->other_wrote ? " wrote" : " read") +
      ", and no acquire of the one pairs with a release of the other");
}

void note_read(const void* from, size_t bytes) {
  if (!is_watched(from)) return;
  const Fiber& self = scheduler().current();
  report(scheduler().clocks().read(self.index, self.rank, from, bytes),
         "reads");
}

void note_write(const void* to, size_t bytes) {
  if (!is_watched(to)) return;
  report(scheduler().clocks().write(scheduler().current().index, to, bytes),
         "writes");
}

}  // namespace

void set_region(std::byte* at, size_t bytes) {
  region = at;
  region_bytes = bytes;
  scheduler().clocks().watch(at, bytes);
  any_fault_armed.store(true,
                        std::memory_order_relaxed);  // all points are seen
}

void note_plain_read(const void* from, size_t bytes) { note_read(from, bytes); }
void note_plain_write(const void* to, size_t bytes) { note_write(to, bytes); }

}  // namespace paceline::schedules

// The functions below replace those of the C library, and some of the core.
using namespace paceline::schedules;

extern "C" {

void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  note_read(from, bytes);
  note_write(to, bytes);
  return __real_memcpy(to, from, bytes);
}

void* __real_memset(void* to, int value, size_t bytes);
void* __wrap_memset(void* to, int value, size_t bytes) {
  note_write(to, bytes);
  return __real_memset(to, value, bytes);
}

int __real_fallocate(int file, int mode, off_t offset, off_t bytes);
int __wrap_fallocate(int file, int mode, off_t offset, off_t bytes) {
  if (!is_simulated()) return __real_fallocate(file, mode, offset, bytes);
  note_write(region + offset, static_cast<size_t>(bytes));
  memset(region + offset, 0, static_cast<size_t>(bytes));
  return 0;
}

// Ranks share one mapping here: none can map a range of it privately.
void* __real_mmap(void* at, size_t bytes, int protection, int flags, int file,
                  off_t offset);
void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int file,
                  off_t offset) {
  if (is_simulated()) return MAP_FAILED;
  return __real_mmap(at, bytes, protection, flags, file, offset);
}

}  // extern "C"

namespace paceline::schedules {

void backward_point(paceline::Point point) asm(
    "__wrap__ZN8paceline15strike_if_armedENS_5PointE");
void backward_point(paceline::Point point) {
  scheduler().step(paceline::point_name(point), 0);
  if (scheduler().at_point) scheduler().at_point(point);
}

#define REDUCE                                                     \
  "_ZN8paceline6reduceENS_5DTypeENS_8ReduceOpEPKPKviPKPvimPKdPNS_" \
  "11ReduceStatsEd"
void real_reduce(paceline::DType, paceline::ReduceOp, const void* const*, int,
                 void* const*, int, size_t, const double*,
                 paceline::ReduceStats*, double) asm("__real_" REDUCE);
void watched_reduce(paceline::DType, paceline::ReduceOp, const void* const*,
                    int, void* const*, int, size_t, const double*,
                    paceline::ReduceStats*, double) asm("__wrap_" REDUCE);
void watched_reduce(paceline::DType dtype, paceline::ReduceOp op,
                    const void* const* inputs, int num_inputs,
                    void* const* outputs, int num_outputs, size_t count,
                    const double* weights, paceline::ReduceStats* stats,
                    double total_weight) {
  const size_t bytes = count * paceline::dtype_bytes(dtype);
  for (int i = 0; i < num_inputs; ++i) note_read(inputs[i], bytes);
  for (int i = 0; i < num_outputs; ++i) note_write(outputs[i], bytes);
  real_reduce(dtype, op, inputs, num_inputs, outputs, num_outputs, count,
              weights, stats, total_weight);
}

#define SUM_WEIGHTED \
  "_ZN8paceline12sum_weightedENS_5DTypeEPKPKviPvmPKdPNS_11ReduceStatsE"
void real_sum(paceline::DType, const void* const*, int, void*, size_t,
              const double*,
              paceline::ReduceStats*) asm("__real_" SUM_WEIGHTED);
void watched_sum(paceline::DType, const void* const*, int, void*, size_t,
                 const double*,
                 paceline::ReduceStats*) asm("__wrap_" SUM_WEIGHTED);
void watched_sum(paceline::DType dtype, const void* const* inputs,
                 int num_inputs, void* sum, size_t count, const double* weights,
                 paceline::ReduceStats* stats) {
  const size_t bytes = count * paceline::dtype_bytes(dtype);
  for (int i = 0; i < num_inputs; ++i) note_read(inputs[i], bytes);
  real_sum(dtype, inputs, num_inputs, sum, count, weights, stats);
}

#define MEAN_OF_SUMS \
  "_ZN8paceline12mean_of_sumsENS_5DTypeEPKPKviPKPvimdPNS_11ReduceStatsE"
void real_mean(paceline::DType, const void* const*, int, void* const*, int,
               size_t, double,
               paceline::ReduceStats*) asm("__real_" MEAN_OF_SUMS);
void watched_mean(paceline::DType, const void* const*, int, void* const*, int,
                  size_t, double,
                  paceline::ReduceStats*) asm("__wrap_" MEAN_OF_SUMS);
void watched_mean(paceline::DType dtype, const void* const* sums, int num_sums,
                  void* const* outputs, int num_outputs, size_t count,
                  double total_weight, paceline::ReduceStats* stats) {
  const size_t bytes = count * paceline::dtype_bytes(dtype);
  for (int i = 0; i < num_outputs; ++i) note_write(outputs[i], bytes);
  real_mean(dtype, sums, num_sums, outputs, num_outputs, count, total_weight,
            stats);
}

#define WEIGHTED_MEAN                                                   \
  "_ZN8paceline13weighted_meanENS_5DTypeEPKPKviPKPvimPKddbPNS_11Reduce" \
  "StatsE"
size_t real_weighted(paceline::DType, const void* const*, int, void* const*,
                     int, size_t, const double*, double, bool,
                     paceline::ReduceStats*) asm("__real_" WEIGHTED_MEAN);
size_t watched_weighted(paceline::DType, const void* const*, int, void* const*,
                        int, size_t, const double*, double, bool,
                        paceline::ReduceStats*) asm("__wrap_" WEIGHTED_MEAN);
size_t watched_weighted(paceline::DType dtype, const void* const* inputs,
                        int num_inputs, void* const* outputs, int num_outputs,
                        size_t count, const double* weights,
                        double total_weight, bool stops_at_nonfinite,
                        paceline::ReduceStats* stats) {
  const size_t bytes = count * paceline::dtype_bytes(dtype);
  for (int i = 0; i < num_inputs; ++i) note_read(inputs[i], bytes);
  for (int i = 0; i < num_outputs; ++i) note_write(outputs[i], bytes);
  return real_weighted(dtype, inputs, num_inputs, outputs, num_outputs, count,
                       weights, total_weight, stops_at_nonfinite, stats);
}

}  // namespace paceline::schedules

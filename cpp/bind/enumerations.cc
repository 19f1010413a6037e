// The numbers of enumerations, which Python shares with the core, and the
// core's limits. Python reads them here and defines none itself.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "bind/bindings.h"
#include "bind/gradient_taker.h"
#include "compression/compression.h"
#include "core/failure.h"
#include "core/faults.h"
#include "core/isa.h"
#include "core/region_layout.h"
#include "core/region_words.h"
#include "core/sizes.h"
#include "kernels/kernels.h"
#include "reducer/reducer.h"

namespace nb = nanobind;

namespace paceline {
namespace {

/// {name: number} of an enumeration whose numbers begin with 0.
template <class Enumeration>
nb::dict numbers_of() {
  nb::dict numbers;
  uint8_t number = 0;
  while (const char* name = name_of(static_cast<Enumeration>(number)))
    numbers[name] = number++;
  return numbers;
}

}  // namespace

void bind_enumerations(nb::module_& m) {
  m.attr("ABI_VERSION") = kAbiVersion;
  m.attr("MAX_RANKS") = kMaxRanks;
  m.attr("SEGMENT_ELEMENTS") = kSegmentElements;
  m.attr("ALIGNMENT_BYTES") = kAlignmentBytes;
  m.attr("REASONS") = numbers_of<Reason>();
  m.attr("CALL_KINDS") = numbers_of<CallKind>();
  m.attr("DTYPES") = numbers_of<DType>();
  m.attr("REDUCE_OPS") = numbers_of<ReduceOp>();
  m.attr("ENCODINGS") = numbers_of<Encoding>();
  m.attr("ISAS") = numbers_of<Isa>();
  m.attr("FAULT_ACTIONS") = numbers_of<FaultAction>();
  nb::dict outcomes;
  outcomes["unused"] = kBackwardUnused;
  outcomes["nonfinite"] = kBackwardNonFinite;
  outcomes["skipped"] = kBackwardForwardsDiffer;
  outcomes["finished"] = kBackwardFinished;
  outcomes["overflowed"] = kBackwardOverflow;
  outcomes["notes_differ"] = kBackwardNotesDiffer;
  outcomes["globally_unused"] = kBackwardGloballyUnused;
  outcomes["reported"] = kBackwardReported;
  m.attr("OUTCOMES") = outcomes;
  nb::dict phases;
  phases["idle"] = static_cast<int>(BackwardPhase::kIdle);
  phases["interrupted"] = static_cast<int>(BackwardPhase::kInterrupted);
  phases["running"] = static_cast<int>(BackwardPhase::kRunning);
  phases["open"] = static_cast<int>(BackwardPhase::kOpen);
  phases["ending"] = static_cast<int>(BackwardPhase::kEnding);
  m.attr("BACKWARD_PHASES") = phases;
}

}  // namespace paceline

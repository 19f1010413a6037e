// What this process records; see core/recorder.h.
#include <nanobind/nanobind.h>

#include "bind/bindings.h"
#include "bind/pointer.h"
#include "core/recorder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {

void bind_recorder(nb::module_& m) {
  m.def(
      "start_recording",
      [](Pointer count, Pointer records, uint64_t capacity) {
        // Never deleted; see Recorder::use().
        Recorder::use(
            new Recorder(static_cast<Atomic<uint64_t>*>(as_pointer(count)),
                         static_cast<Record*>(as_pointer(records)), capacity));
      },
      "count_pointer"_a, "records_pointer"_a, "capacity"_a);
  m.def("stop_recording", [] { Recorder::use(nullptr); });
  // Without names of arguments, which take longer to call: it is called several
  // times in each pass.
  m.def("record", [](uint16_t event, int64_t first, int64_t second) {
    if (Recorder* recorder = Recorder::current(); recorder != nullptr)
      recorder->record(static_cast<Event>(event), first, second);
  });
}

}  // namespace paceline

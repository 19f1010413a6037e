// The records of this process; see core/recorder.h.
#include <nanobind/nanobind.h>

#include "bind/bindings.h"
#include "bind/pointer.h"
#include "core/clock.h"
#include "core/recorder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

/// Records the beginning and end of an activity of the program, and adds up its
/// time. The activity must not be nested in itself.
class TimedRecords {
 public:
  TimedRecords(uint16_t began, uint16_t ended)
      : began_(static_cast<Event>(began)), ended_(static_cast<Event>(ended)) {}

  void begin() { began_ns_ = note(began_); }
  void end() {
    const int64_t now = note(ended_);
    if (began_ns_ != 0 && now != 0) total_ns += now - began_ns_;
    began_ns_ = 0;
  }

  int64_t total_ns = 0;

 private:
  /// Returns when that was; 0: recording is off.
  static int64_t note(Event event) {
    Recorder* const recorder = Recorder::current();
    if (recorder == nullptr) return 0;
    const int64_t now = now_ns();
    recorder->record_at(now, event, 0, 0);
    return now;
  }

  Event began_;
  Event ended_;
  int64_t began_ns_ = 0;
};

}  // namespace

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
  // Without argument names, which make calls slower: it is called several times
  // in each backward.
  m.def("record", [](uint16_t event, int64_t first, int64_t second) {
    if (Recorder* recorder = Recorder::current(); recorder != nullptr)
      recorder->record(static_cast<Event>(event), first, second);
  });
  // Usable as hooks, whose arguments they ignore.
  nb::class_<TimedRecords>(m, "TimedRecords")
      .def(nb::init<uint16_t, uint16_t>())
      .def("begin", [](TimedRecords& self, const nb::args&) { self.begin(); })
      .def("end", [](TimedRecords& self, const nb::args&) { self.end(); })
      .def_ro("total_ns", &TimedRecords::total_ns);
}

}  // namespace paceline

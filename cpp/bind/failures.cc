#include "bind/failures.h"

#include <nanobind/stl/string.h>
#include <string.h>

#include <array>
#include <exception>
#include <string>
#include <utility>

#include "bind/bindings.h"
#include "core/shared_text.h"

namespace nb = nanobind;

namespace paceline {
namespace {

nb::object& failure_factory() {
  // Never freed: it outlives the interpreter's own teardown.
  static nb::object* factory = new nb::object(nb::none());
  return *factory;
}

nb::dict describe_call(const CallRecord& call) {
  nb::dict facts;
  facts["number"] = call.number;
  facts["kind"] = static_cast<uint32_t>(call.kind);
  facts["dtype"] = call.dtype;
  facts["op"] = call.op;
  facts["root"] = call.root;
  facts["count"] = call.count;
  return facts;
}

/// Text from shared memory may have been truncated in the middle of a
/// character, or read while it changed.
nb::object as_text(const std::string& bytes) {
  return nb::steal(PyUnicode_DecodeUTF8(
      bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

nb::list ranks_in(const std::array<uint64_t, 2>& set) {
  nb::list ranks;
  for (size_t r = 0; r < kMaxRanks; ++r) {
    if ((set[r / 64] >> (r % 64) & 1) != 0) ranks.append(r);
  }
  return ranks;
}

const char* state_of(const RankLine& line) {
  // Acquire: as has_died(); pairs with LivenessThread::hold() and let_go().
  const uint32_t life = line.life.load(std::memory_order_acquire);
  if (has_died(line)) return "dead";
  return life == kLifeNotYet ? "missing" : life == kLifeLeft ? "left" : "alive";
}

void set_failure_factory(nb::object factory) {
  failure_factory() = std::move(factory);
}

}  // namespace

nb::list describe_ranks(const HostGroup& group) {
  nb::list ranks;
  for (int r = 0; r < group.world(); ++r) {
    const RankLine& line = group.session.line(r);
    // Acquire: the record of that number is complete; pairs with
    // Calls::begin().
    const uint64_t number = line.call_number.load(std::memory_order_acquire);
    nb::dict facts;
    facts["rank"] = r;
    facts["pid"] = line.pid.load(std::memory_order_relaxed);
    facts["state"] = state_of(line);
    // Acquire; pairs with the stores of the crash handler and
    // LivenessThread::look_at().
    const uint32_t crash = line.crash.load(std::memory_order_acquire);
    facts["crash_signal"] = (crash & kCrashIsFatal) != 0 ? crash & 0xff : 0;
    facts["call"] = describe_call(line.call[number & 1]);
    // The other rank's entry for this rank's current call: what the other rank
    // called if the calls differ.
    facts["same_call"] =
        describe_call(line.call[group.calls.current().number & 1]);
    facts["activity"] = as_text(read_text(line.activity));
    facts["forwards"] = line.forwards.load(std::memory_order_relaxed);
    const uint64_t place = line.waits_at.load(std::memory_order_relaxed);
    facts["waits_at"] = place;
    facts["waits_in"] = name_of(kind_of(place));
    facts["waits_for"] =
        ranks_in({line.waits_for[0].load(std::memory_order_relaxed),
                  line.waits_for[1].load(std::memory_order_relaxed)});
    ranks.append(facts);
  }
  return ranks;
}

nb::dict describe_failure(const Failure& failure, HostGroup* group) {
  nb::dict facts;
  facts["reason"] = static_cast<uint32_t>(failure.reason);
  facts["culprit"] = failure.culprit;
  facts["waited_s"] = failure.waited_s;
  facts["left_s"] = failure.left_s;
  facts["message"] = as_text(failure.message);
  facts["thread"] = failure.thread;
  facts["errno"] = failure.error_number;
  facts["late"] = ranks_in({failure.late[0], failure.late[1]});
  facts["waiting"] = ranks_in({failure.waiting[0], failure.waiting[1]});
  // A forked child does not map the region.
  if (group != nullptr && failure.reason != Reason::kForked) {
    facts["group"] = group->session.options().name;
    facts["rank"] = group->rank();
    facts["world_size"] = group->world();
    facts["call"] = describe_call(group->calls.current());
    facts["ranks"] = describe_ranks(*group);
  }
  return facts;
}

std::string describe_interruption() {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  std::string text = "interrupted by a signal";
  if (type != nullptr) {
    PyErr_NormalizeException(&type, &value, &traceback);
    text += ", whose handler raised ";
    text += reinterpret_cast<PyTypeObject*>(type)->tp_name;
    PyObject* const words = PyObject_Str(value);
    const char* const utf8 =
        words == nullptr ? nullptr : PyUnicode_AsUTF8(words);
    if (utf8 != nullptr && *utf8 != '\0') text += std::string(": ") + utf8;
    Py_XDECREF(words);
    PyErr_Clear();  // an error of str(value)
  }
  PyErr_Restore(type, value, traceback);
  return text;
}

void set_error(const Failure& failure, HostGroup* group) {
  if (PyErr_Occurred() != nullptr) return;
  if (failure_factory().is_none()) {
    PyErr_SetString(PyExc_RuntimeError, failure.message.c_str());
    return;
  }
  const nb::object error = failure_factory()(describe_failure(failure, group));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())),
                  error.ptr());
}

void raise_failure(const Failure& failure, HostGroup* group) {
  set_error(failure, group);
  throw nb::python_error();
}

void bind_failures(nb::module_& m) {
  using namespace nb::literals;
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void*) {
        try {
          std::rethrow_exception(thrown);
        } catch (const Failure& failure) {  // outside any call
          set_error(failure, nullptr);
        }
      });
  m.def("set_failure_factory", &set_failure_factory, "factory"_a,
        "factory(facts: dict) -> the exception to raise.");
}

}  // namespace paceline

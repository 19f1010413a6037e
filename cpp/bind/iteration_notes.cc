#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "bind/dlpack.h"
#include "bind/failures.h"
#include "bind/garbage_collected.h"
#include "bind/tensor_attribute.h"
#include "hash/xxh64.h"

namespace paceline {
namespace {

constexpr uint32_t kNothing = 0;

/// 32 bits: 1, accumulated, 8 of dropped, 10 of writes, 12 of the sample. Their
/// meaning is in paceline/reducer/backward/replica_drift.py.
uint32_t pack_note(int64_t writes, uint64_t sample, int64_t dropped,
                   bool accumulated) {
  const auto most = static_cast<uint32_t>(std::min<int64_t>(dropped, 0xff));
  return 1 | static_cast<uint32_t>(accumulated) << 1 | most << 2 |
         (static_cast<uint32_t>(writes) & 0x3ff) << 10 |
         (static_cast<uint32_t>(sample) & 0xfff) << 20;
}

/// Reads the parameters without Python: this runs in each step between two
/// large computations, when none of it is in the processor's caches any more.
class Look {
 public:
  Look(nb::list counted, const std::string& version, nb::list sampled,
       std::vector<size_t> begins, std::vector<size_t> sizes, size_t turns)
      : counted_(std::move(counted)),
        version_(version.c_str()),
        sampled_(std::move(sampled)),
        begins_(std::move(begins)),
        sizes_(std::move(sizes)),
        turns_(turns) {
    if (turns_ == 0) misuse("turns must be at least 1");
    if (sampled_.size() != begins_.size() || sampled_.size() != sizes_.size())
      misuse("sampled, begins and sizes must have one entry per piece");
    for (const nb::handle tensor : sampled_)
      borrow_ = dlpack::find_borrow(tensor);
  }

  int64_t writes() {
    int64_t sum = 0;
    for (const nb::handle tensor : counted_) {
      const nb::object version = nb::steal(version_.get(tensor.ptr()));
      if (version.is_valid()) sum += PyLong_AsLongLong(version.ptr());
      if (PyErr_Occurred() != nullptr) throw nb::python_error();
    }
    return sum;
  }

  uint64_t sample(uint64_t turn) const {
    uint64_t hash = 0;
    for (size_t i = turn % turns_; i < sizes_.size(); i += turns_) {
      dlpack::Tensor tensor;
      if (borrow_(nb::handle(sampled_[i]).ptr(), &tensor) != 0) {
        PyErr_Clear();
        return 0;
      }
      // A smaller memory may have replaced the tensor's.
      if (tensor.device.type != dlpack::kCpu || tensor.begin() == nullptr ||
          tensor.nbytes_in_a_row() < begins_[i] + sizes_[i])
        return 0;
      const auto* begin = static_cast<const std::byte*>(tensor.begin());
      hash = sample_hash(begin + begins_[i], sizes_[i], hash);
    }
    return hash;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(counted_.ptr());
    Py_VISIT(sampled_.ptr());
    return 0;
  }

 private:
  nb::list counted_;
  TensorAttribute version_;
  nb::list sampled_;
  std::vector<size_t> begins_;
  std::vector<size_t> sizes_;
  size_t turns_;
  dlpack::Borrow borrow_ = nullptr;
};

/// Counts what this rank does between two backwards.
class IterationNotes {
 public:
  /// `count_writes` is None if the framework does not count writes.
  IterationNotes(nb::object count_writes, nb::object take_sample)
      : count_writes_(std::move(count_writes)),
        take_sample_(std::move(take_sample)) {}
  /// `version` is an attribute that each write to a tensor increments. `begins`
  /// and `sizes` are the range, in bytes, of each tensor in `sampled` that is
  /// read. Each backward reads some of the ranges, and `turns` backwards read
  /// all of them.
  IterationNotes(nb::list counted, const std::string& version, nb::list sampled,
                 std::vector<size_t> begins, std::vector<size_t> sizes,
                 size_t turns)
      : look_(std::in_place, std::move(counted), version, std::move(sampled),
              std::move(begins), std::move(sizes), turns) {}

  uint32_t take(int64_t forwards, bool accumulated) {
    if (!has_begun_ || !is_valid()) return kNothing;
    has_begun_ = false;
    const uint64_t sampled = sample();
    const int64_t writes =
        counts_writes() ? count() - writes_before_ : sampled != sample_before_;
    const int64_t dropped = batches - (forwards - forwards_before_);
    return pack_note(writes, sampled, std::max<int64_t>(dropped, 0),
                     accumulated);
  }

  void begin(int64_t forwards, uint64_t backward) {
    if (!is_valid()) return;
    batches = 0;
    turn_ = backward;
    if (counts_writes()) {
      writes_before_ = count();
    } else {
      sample_before_ = sample();
    }
    forwards_before_ = forwards;
    has_begun_ = true;
  }

  int64_t writes() {
    if (!is_valid()) return 0;
    return counts_writes() ? count() - writes_before_
                           : sample() != sample_before_;
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(count_writes_.ptr());
    Py_VISIT(take_sample_.ptr());
    return look_.has_value() ? look_->traverse(visit, arg) : 0;
  }
  void clear() {
    // Destroying them may run Python code, which finds this object empty.
    std::optional<Look> look;
    look.swap(look_);
    const nb::object count_writes = std::move(count_writes_);
    const nb::object take_sample = std::move(take_sample_);
  }

  int64_t batches = 0;

 private:
  /// False after the garbage collector has cleared it.
  bool is_valid() const { return look_.has_value() || take_sample_.is_valid(); }
  bool counts_writes() const {
    return look_.has_value() || !count_writes_.is_none();
  }
  int64_t count() {
    return look_.has_value() ? look_->writes()
                             : nb::cast<int64_t>(count_writes_());
  }
  uint64_t sample() {
    return look_.has_value() ? look_->sample(turn_)
                             : nb::cast<uint64_t>(take_sample_(turn_));
  }

  std::optional<Look> look_;
  nb::object count_writes_;
  nb::object take_sample_;
  bool has_begun_ = false;
  int64_t writes_before_ = 0;
  uint64_t turn_ = 0;
  uint64_t sample_before_ = 0;
  int64_t forwards_before_ = 0;
};

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_slot<IterationNotes>)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_slot<IterationNotes>)},
    {0, nullptr}};

}  // namespace

void bind_iteration_notes(nb::module_& m) {
  using namespace nb::literals;
  m.def("pack_note", &pack_note, "writes"_a, "sample"_a, "dropped"_a,
        "accumulated"_a);
  nb::class_<IterationNotes>(m, "IterationNotes", nb::type_slots(slots))
      .def(nb::init<nb::object, nb::object>(), "count_writes"_a.none(),
           "take_sample"_a)
      .def(nb::init<nb::list, const std::string&, nb::list, std::vector<size_t>,
                    std::vector<size_t>, size_t>(),
           "counted"_a, "version"_a, "sampled"_a, "begins"_a, "sizes"_a,
           "turns"_a)
      .def_rw("batches", &IterationNotes::batches,
              "Batches taken from iterate() since the previous backward.")
      .def_prop_ro("writes", &IterationNotes::writes,
                   "Writes to parameters since the previous backward.")
      .def("take", &IterationNotes::take, "forwards"_a, "accumulated"_a,
           "The note of the backward that ends now; 0 unless begin() was "
           "called.")
      .def("begin", &IterationNotes::begin, "forwards"_a, "backward"_a,
           "Call when a backward has succeeded on all ranks, with this number "
           "on each: the notes after it can be compared.");
}

}  // namespace paceline

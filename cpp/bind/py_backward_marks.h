// BackwardMarks as Python calls it.
#pragma once

#include <nanobind/nanobind.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bind/gradient_taker.h"
#include "bind/pointer.h"
#include "reducer/backward_marks.h"

namespace paceline {

namespace nb = nanobind;

using MarkedPlaces =
    std::vector<std::tuple<size_t, size_t, std::vector<size_t>>>;

/// BackwardMarks, and what Python does once a bucket is complete.
class PyBackwardMarks final : public GradientTaker {
 public:
  /// `places`: (offset, bytes, buckets) of each parameter. `on_complete` is
  /// called when a bucket is complete, and again at each gradient after that if
  /// it says so: some bucket still waits, for others. It must not lead back
  /// here, because the garbage collector does not look into this.
  PyBackwardMarks(Pointer gradient_buffer, const MarkedPlaces& places,
                  nb::object on_complete);

  bool is_open() const override { return is_open_; }
  void mark_ready(size_t parameter, Pointer gradient) override;
  void mark_copied(size_t parameter, Pointer gradient, size_t bytes,
                   bool is_shared) override;
  std::vector<size_t> end_backward(bool keeps_means);
  /// No gradient is taken any more. May come from another thread than the
  /// backward, which goes on: if it ends well, its means are still copied back.
  void close() { is_open_ = false; }
  BackwardMarks& marks() { return marks_; }

 private:
  void call_back();

  BackwardMarks marks_;
  nb::object on_complete_;
  bool is_open_ = true;
  bool asks_again_ = false;
};

}  // namespace paceline

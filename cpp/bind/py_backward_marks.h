// The Python class for BackwardMarks.
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

/// BackwardMarks with a Python callback for complete buckets.
class PyBackwardMarks final : public GradientTaker {
 public:
  /// `places`: (offset, bytes, buckets) of each parameter. `on_complete` is
  /// called when a bucket is complete. If it returns true (a complete bucket
  /// still waits for others), it is called again at each later gradient. It
  /// must not refer back to this object, because the garbage collector does not
  /// traverse it.
  PyBackwardMarks(Pointer gradient_buffer, const MarkedPlaces& places,
                  nb::object on_complete);

  bool is_open() const override { return is_open_; }
  void mark_ready(size_t parameter, Pointer gradient) override;
  void mark_copied(size_t parameter, Pointer gradient, size_t bytes,
                   bool is_shared) override;
  std::vector<size_t> end_backward(bool keeps_means);
  /// Takes no more gradients. May be called from another thread than the
  /// backward's, which goes on: if it succeeds, its means are still copied
  /// back.
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

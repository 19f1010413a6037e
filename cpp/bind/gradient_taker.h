// Whom a hook in C++ hands gradients over to.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "bind/pointer.h"

namespace paceline {

/// Where a model is in a backward; `Phase` in reducer/backward/state.py says
/// more. From kRunning on a backward is under way.
enum class BackwardPhase : uint8_t {
  kIdle,
  kInterrupted,
  kRunning,
  kOpen,
  kEnding
};

class GradientTaker {
 public:
  /// Whether gradients are taken; else whoever hands one over in Python is told
  /// why they are not.
  virtual bool is_open() const = 0;
  /// The gradient of a parameter is final there; null: in the gradient buffer
  /// already.
  virtual void mark_ready(size_t parameter, Pointer gradient) = 0;
  /// The same of one that the caller copies to its place from these bytes.
  /// `is_shared`: see OpenBackward::add_copied().
  virtual void mark_copied(size_t parameter, Pointer gradient, size_t bytes,
                           bool is_shared) = 0;

 protected:
  ~GradientTaker() = default;
};

/// The one behind a Python object, which lives as long as that.
GradientTaker* gradient_taker(nanobind::handle object);

}  // namespace paceline

// The object to which a C++ hook hands gradients over.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "bind/pointer.h"

namespace paceline {

/// The state of a model's backward, explained at `Phase` in
/// reducer/backward/state.py. From kRunning on, a backward is in progress.
enum class BackwardPhase : uint8_t {
  kIdle,
  kInterrupted,
  kRunning,
  kOpen,
  kEnding
};

class GradientTaker {
 public:
  /// Whether gradients are taken; if not, the Python function that takes them
  /// raises the reason.
  virtual bool is_open() const = 0;
  /// The gradient of a parameter is final at this address; null: in the
  /// gradient buffer already.
  virtual void mark_ready(size_t parameter, Pointer gradient) = 0;
  /// The same for a gradient that the caller copies from these bytes to its
  /// place. `is_shared`: see OpenBackward::add_copied().
  virtual void mark_copied(size_t parameter, Pointer gradient, size_t bytes,
                           bool is_shared) = 0;

 protected:
  ~GradientTaker() = default;
};

/// The taker behind a Python object; it lives as long as that object.
GradientTaker* gradient_taker(nanobind::handle object);

}  // namespace paceline

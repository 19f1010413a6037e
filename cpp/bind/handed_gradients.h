// The gradients that were handed over in a backward pass, by parameter.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace paceline {

namespace nb = nanobind;

/// What a dict[int, gradient] would hold, in the order of insertion, without
/// its hashing: hooks ask and add once per parameter.
class HandedGradients {
 public:
  HandedGradients() = default;
  HandedGradients(const HandedGradients&) = delete;
  HandedGradients& operator=(const HandedGradients&) = delete;
  ~HandedGradients() { clear(); }

  /// Borrowed, or null.
  PyObject* find(size_t parameter) const {
    return parameter < gradients_.size() ? gradients_[parameter].ptr()
                                         : nullptr;
  }
  void put(size_t parameter, nb::object gradient) {
    if (parameter >= gradients_.size()) gradients_.resize(parameter + 1);
    if (!gradients_[parameter].is_valid()) order_.push_back(parameter);
    gradients_[parameter] = std::move(gradient);
  }
  const std::vector<size_t>& order() const { return order_; }
  /// As if it had not been handed over.
  void discard(size_t parameter) {
    if (find(parameter) == nullptr) return;
    const nb::object gradient = std::move(gradients_[parameter]);
    std::erase(order_, parameter);
  }
  void clear() {
    // A gradient's end may run Python code, which finds nothing here any more.
    std::vector<nb::object> gradients;
    gradients.swap(gradients_);
    std::vector<size_t> order;
    order.swap(order_);
    for (const size_t parameter : order) gradients[parameter].reset();
    if (!gradients_.empty()) return;
    order.clear();
    gradients_.swap(gradients);  // the next pass hands over as many
    order_.swap(order);
  }
  int traverse(visitproc visit, void* arg) const {
    for (const size_t parameter : order_) Py_VISIT(gradients_[parameter].ptr());
    return 0;
  }

 private:
  std::vector<nb::object> gradients_;  ///< by parameter; invalid: none yet
  std::vector<size_t> order_;
};

/// Adds the class HandedGradients to the module.
void bind_handed_gradients(nb::module_& m);

}  // namespace paceline

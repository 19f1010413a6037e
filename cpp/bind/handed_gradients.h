// The gradients that were handed over in a backward, by parameter.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/storage_uses.h"
#include "bind/tensor_attribute.h"

namespace paceline {

namespace nb = nanobind;

/// Like a dict[int, gradient] in the order of insertion, but without hashing:
/// hooks look up and add once per parameter. After watch() it also checks
/// whether parameters still hold the gradients that were handed over.
class HandedGradients {
 public:
  HandedGradients() = default;
  HandedGradients(const HandedGradients&) = delete;
  HandedGradients& operator=(const HandedGradients&) = delete;
  ~HandedGradients() { clear(); }

  /// Returns a borrowed reference, or null.
  PyObject* find(size_t parameter) const {
    return parameter < gradients_.size() ? gradients_[parameter].ptr()
                                         : nullptr;
  }
  void put(size_t parameter, nb::object gradient) {
    if (parameter >= gradients_.size()) gradients_.resize(parameter + 1);
    if (!gradients_[parameter].is_valid()) order_.push_back(parameter);
    if (version_.has_value()) {
      if (parameter >= versions_.size()) versions_.resize(parameter + 1);
      versions_[parameter] = version_of(gradient.ptr());
    }
    gradients_[parameter] = std::move(gradient);
  }
  /// From now on, look() checks whether parameters still hold what was handed
  /// over. `parameters` holds None for one that is not checked. `version` is an
  /// attribute of gradients that each change in place increments; without both
  /// names, only memory is checked. `uses` counts the tensors in a storage, for
  /// the parameters `in_own_memory`: those whose gradients stay where the
  /// framework made them.
  void watch(nb::list parameters, const std::string& gradient,
             const std::string& version, nb::object uses,
             const std::vector<size_t>& in_own_memory);
  /// Call when a backward begins: notes the storages of gradients that exist
  /// already.
  void begin();

  struct Found {
    /// Parameters whose gradient is a different object, or was changed, since
    /// it was handed over.
    std::vector<size_t> changed;
    /// Parameters whose gradient was placed, since begin(), in memory that
    /// tensors other than gradients of these parameters use, too. Gradients in
    /// storages from before begin() do not count: the user has placed them
    /// there, perhaps all in one tensor.
    std::vector<size_t> shared;
  };
  /// Checks the gradients that were handed over.
  Found look();
  /// `Found::shared` for parameters whose gradients were not handed over.
  std::vector<size_t> shared_among(const std::vector<size_t>& parameters);
  const std::vector<size_t>& order() const { return order_; }
  /// Removes a gradient, as if it had not been handed over.
  void discard(size_t parameter) {
    if (find(parameter) == nullptr) return;
    const nb::object gradient = std::move(gradients_[parameter]);
    std::erase(order_, parameter);
  }
  void clear() {
    // Destroying a gradient may run Python code, which finds this object empty.
    std::vector<nb::object> gradients;
    gradients.swap(gradients_);
    std::vector<size_t> order;
    order.swap(order_);
    for (const size_t parameter : order) gradients[parameter].reset();
    if (!gradients_.empty()) return;
    order.clear();
    gradients_.swap(gradients);  // the next backward has as many
    order_.swap(order);
  }
  int traverse(visitproc visit, void* arg) const {
    for (const size_t parameter : order_) Py_VISIT(gradients_[parameter].ptr());
    Py_VISIT(parameters_.ptr());
    Py_VISIT(uses_object_.ptr());
    return 0;
  }

 private:
  /// A gradient whose storage other tensors use, too.
  struct Used {
    StorageUses::Use use;
    size_t parameter;
  };

  /// The storage of a parameter's gradient; 0: it has no gradient.
  uintptr_t storage_of_gradient(size_t parameter);
  /// The version of a gradient; 0: it has none.
  long long version_of(PyObject* gradient);
  /// The gradient of a parameter; invalid: it is not checked.
  nb::object gradient_of(size_t parameter);
  void note_uses(size_t parameter, PyObject* gradient) {
    if (parameter >= in_own_memory_.size() || !in_own_memory_[parameter])
      return;
    const StorageUses::Use use = uses_->of(gradient);
    if (use.count > 1) used_.push_back({use, parameter});
  }
  /// The gradients in `used_` whose storage is used by tensors outside `used_`.
  /// Clears `used_`.
  std::vector<size_t> take_shared();

  std::vector<nb::object> gradients_;  ///< by parameter; invalid: none yet
  std::vector<size_t> order_;
  std::vector<long long> versions_;  ///< when it was handed over
  nb::list parameters_;
  std::optional<TensorAttribute> gradient_;
  std::optional<TensorAttribute> version_;
  nb::object uses_object_ = nb::none();
  StorageUses* uses_ = nullptr;
  SharedPointerUses* gradient_uses_ = nullptr;  ///< `uses_`, or null
  std::vector<bool> in_own_memory_;
  std::vector<uintptr_t> before_;  ///< storages when this backward began
  std::vector<Used> used_;
};

}  // namespace paceline

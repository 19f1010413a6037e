// The gradients that were handed over in a backward pass, by parameter.
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

/// What a dict[int, gradient] would hold, in the order of insertion, without
/// its hashing: hooks ask and add once per parameter. And whether they are
/// still what was handed over, if it was told where to look.
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
    if (version_.has_value()) {
      if (parameter >= versions_.size()) versions_.resize(parameter + 1);
      versions_[parameter] = version_of(gradient.ptr());
    }
    gradients_[parameter] = std::move(gradient);
  }
  /// Looks from now on, when asked, whether parameters still hold what was
  /// handed over. `parameters` holds None for one that is not looked at;
  /// `version` is an attribute of gradients that each change in place counts
  /// up; without both names, only memory is looked at. `uses` tells how many
  /// tensors lie in a storage, for the parameters `in_own_memory`: those whose
  /// gradients stay where the framework made them.
  void watch(nb::list parameters, const std::string& gradient,
             const std::string& version, nb::object uses,
             const std::vector<size_t>& in_own_memory);
  /// A backward begins: notes where gradients lie that are there already.
  void begin();

  struct Found {
    /// Parameters whose gradient is another, or was changed, since it was
    /// handed over.
    std::vector<size_t> changed;
    /// Parameters whose gradient has come since begin() into memory that
    /// other tensors hold than gradients of these parameters. What was there
    /// before lies where the user has it lie, in one tensor for all, perhaps.
    std::vector<size_t> shared;
  };
  /// Looks at what was handed over.
  Found look();
  /// `Found::shared` among parameters whose gradients were not handed over.
  std::vector<size_t> shared_among(const std::vector<size_t>& parameters);
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
    gradients_.swap(gradients);  // the next backward hands over as many
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

  /// The storage of a parameter's gradient; 0: it has none.
  uintptr_t storage_of_gradient(size_t parameter);
  /// 0 where it has none.
  long long version_of(PyObject* gradient);
  /// The gradient of a parameter; invalid: it is not looked at.
  nb::object gradient_of(size_t parameter);
  void note_uses(size_t parameter, PyObject* gradient) {
    if (parameter >= in_own_memory_.size() || !in_own_memory_[parameter])
      return;
    const StorageUses::Use use = uses_->of(gradient);
    if (use.count > 1) used_.push_back({use, parameter});
  }
  /// Those of `used_` that are shared with others than each other. Ends empty.
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

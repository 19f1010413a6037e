// Finds gradients that share memory.
//
// Two parameters used through views of one sum may get the same memory for both
// gradients, on one rank and not on the others. If the means were written
// there, only one of the two would remain; and if one is written before the
// other was read, it is read as the other one's gradient. So such means stay in
// the gradient buffer, and the front end gives each of these gradients memory
// of its own. This holds across all backwards that one thread has open at a
// time: several models may get their gradients in one backward of autograd. The
// gradient of an input, or a tensor that a hook has kept, may share the memory
// as well: the front end reports where such tensors are (add_foreign).
#pragma once

#include <cstddef>
#include <thread>
#include <vector>

namespace paceline {

/// The memory of a gradient that was handed over.
struct Extent {
  const std::byte* begin;
  const std::byte* end;
  /// kForeign: not a parameter of the backward that collects the extents.
  size_t parameter;
  /// Whether other models have the parameter, too.
  bool is_shared = false;
  bool is_same_memory(const Extent& other) const {
    return begin == other.begin && end == other.end;
  }
};

inline constexpr size_t kForeign = ~size_t{0};

/// A backward that a thread has open, one per model: it knows where its
/// gradients are, and finds those that share memory with any others of that
/// thread. A subclass calls leave() in its destructor.
class OpenBackward {
 public:
  OpenBackward(const OpenBackward&) = delete;
  OpenBackward& operator=(const OpenBackward&) = delete;

  /// Reports that a tensor which is not a gradient of any backward uses this
  /// memory, too. Applies to the backward that this thread has entered.
  void add_foreign(const void* begin, size_t bytes) {
    add_copied(kForeign, begin, bytes, false);
  }

 protected:
  OpenBackward() = default;
  ~OpenBackward() = default;
  /// Opens the backward on this thread.
  void enter();
  void leave();
  /// Reports that the caller has copied a gradient from this memory, and will
  /// copy its mean back. `is_shared`: other models have the parameter, too. If
  /// they get its gradient from the same memory, they get the same mean, and
  /// may all write it.
  void add_copied(size_t parameter, const void* gradient, size_t bytes,
                  bool is_shared);
  /// The parameters whose gradients share memory with any other gradient that
  /// was handed over in this thread's open backwards; in no particular order.
  std::vector<size_t> find_overlapping();

 private:
  /// Adds the memory of the gradients that will be overwritten with their
  /// means.
  virtual void collect_written(std::vector<Extent>& found) const = 0;
  void collect(const OpenBackward& from);

  std::thread::id thread_;
  std::vector<Extent> copied_;
  std::vector<Extent> extents_;
};

}  // namespace paceline

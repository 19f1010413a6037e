// Gradients that share memory.
//
// Two parameters behind views of one sum may get one memory for both gradients,
// on one rank and not on the others. If the means were written there, only one
// of the two would remain; and one that is written before the other was read is
// read as that other's gradient. So such means stay in the gradient buffer, and
// the front end gives each of these gradients memory of its own. This holds
// between all backward passes that one thread runs at a time: several models
// may get their gradients in one backward. The gradient of an input, or what a
// hook has kept, may share the memory as well: the front end says where such
// tensors are (add_foreign).
#pragma once

#include <cstddef>
#include <thread>
#include <vector>

namespace paceline {

/// The memory of a gradient that was handed over.
struct Extent {
  const std::byte* begin;
  const std::byte* end;
  /// kForeign: of no parameter of the backward that asks.
  size_t parameter;
  /// Whether other models have the parameter, too.
  bool is_shared = false;
  bool is_same_memory(const Extent& other) const {
    return begin == other.begin && end == other.end;
  }
};

inline constexpr size_t kForeign = ~size_t{0};

/// What a thread may be in, one for each model: it knows where its gradients
/// are, and finds out which of them share memory with any others. A subclass
/// leaves it in its destructor.
class OpenBackward {
 public:
  OpenBackward(const OpenBackward&) = delete;
  OpenBackward& operator=(const OpenBackward&) = delete;

  /// A tensor that is no gradient of any backward holds this memory, too. For
  /// the backward that this thread has entered.
  void add_foreign(const void* begin, size_t bytes) {
    add_copied(kForeign, begin, bytes, false);
  }

 protected:
  OpenBackward() = default;
  ~OpenBackward() = default;
  /// This thread begins a backward.
  void enter();
  void leave();
  /// The caller has copied a gradient from there, and will copy its mean back.
  /// `is_shared`: other models have the parameter, too. If they get its gradient
  /// from the same memory, they get the same mean, and may all write it.
  void add_copied(size_t parameter, const void* gradient, size_t bytes,
                  bool is_shared);
  /// Parameters whose gradients share memory with any other one that was handed
  /// over in this thread's backward passes; in no order.
  std::vector<size_t> find_overlapping();

 private:
  /// Adds the gradients that will be written to where they lie, with their
  /// parameters.
  virtual void collect_written(std::vector<Extent>& found) const = 0;
  void collect(const OpenBackward& from);

  std::thread::id thread_;
  std::vector<Extent> copied_;
  std::vector<Extent> extents_;
};

}  // namespace paceline

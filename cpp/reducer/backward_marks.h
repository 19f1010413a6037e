// What one rank has marked of a backward whose buckets are moved by others than
// the core: which gradients have come, which buckets that makes complete, and
// which gradients lie outside of the gradient buffer.
//
// The memory of a gradient outside of the gradient buffer belongs to the
// framework, which may use it for others too (overlaps.h). It is read when the
// gradient is marked, and written only when the means of all are in the
// gradient buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reducer/overlaps.h"

namespace paceline {

class BackwardMarks final : OpenBackward {
 public:
  using OpenBackward::add_foreign;
  /// A parameter's place in the gradient buffer, and the buckets that hold any
  /// of it.
  struct Place {
    size_t offset;
    size_t bytes;
    std::vector<size_t> buckets;
  };

  /// `gradient buffer`: null: all gradients are brought there by the caller.
  BackwardMarks(std::byte* gradient_buffer, const std::vector<Place>& places);
  ~BackwardMarks();

  size_t bytes_of(size_t index) const;
  /// Copies a gradient to its place. Waits for nobody and changes nothing here,
  /// so the caller may let others in meanwhile.
  void copy_in(size_t index, const void* gradient) const;
  /// The gradient is in its place; its mean is to be copied to `gradient`
  /// (null: it stays in the gradient buffer). Returns whether a bucket has
  /// become complete.
  bool mark(size_t index, void* gradient);
  /// The same, where the caller has copied `bytes` from `gradient` and will
  /// copy the mean back. `is_shared`: see OpenBackward::add_copied().
  bool mark_copied(size_t index, void* gradient, size_t bytes, bool is_shared);
  /// The place holds what counts for a parameter without a gradient. Completes
  /// buckets, but the parameter stays unmarked.
  void leave_out(size_t index);
  std::vector<size_t> unmarked() const;
  /// Whether all parameters of a bucket have been marked or left out.
  bool is_complete(size_t bucket) const;
  /// The buckets that have become complete since the last call, in the order in
  /// which they did.
  std::vector<size_t> take_complete();

  /// Ends the backward, and forgets what was marked. `keeps_means`: nothing
  /// will be copied back. Returns the parameters whose gradients share memory
  /// with others: their means stay in the gradient buffer.
  std::vector<size_t> end_backward(bool keeps_means);
  /// Copies the means of the backward that has just ended to where its
  /// gradients were.
  void copy_back();

 private:
  struct Parameter {
    size_t offset;
    size_t bytes;
    uint32_t first_part;  ///< into bucket_of_part_
    uint32_t end_part;
    bool is_marked = false;
    std::byte* copy_back = nullptr;
  };
  struct Return {
    std::byte* gradient;
    size_t parameter;
  };

  void check(size_t index) const;
  bool count_down(const Parameter& parameter);
  void collect_written(std::vector<Extent>& found) const override;

  std::byte* const gradient_buffer_;
  std::vector<Parameter> parameters_;
  std::vector<size_t> bucket_of_part_;
  /// How many parameters have a part in each bucket.
  std::vector<uint32_t> parts_;
  /// How many of these are missing in this backward.
  std::vector<uint32_t> missing_;
  std::vector<size_t> complete_;
  std::vector<Return> returns_;
  bool in_backward_ = false;
};

}  // namespace paceline

// The marks of one rank for a backward whose buckets are averaged outside the
// core: which gradients are ready, which buckets that completes, and which
// gradients are outside the gradient buffer.
//
// The memory of a gradient outside the gradient buffer belongs to the
// framework, which may use it for other gradients, too (overlapping_gradients.h). It is read
// when the gradient is marked, and written only when the means of all gradients
// are in the gradient buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reducer/overlapping_gradients.h"

namespace paceline {

class BackwardMarks final : OpenBackward {
 public:
  using OpenBackward::add_foreign;
  /// A parameter's place in the gradient buffer, and the buckets that contain a
  /// part of it.
  struct Place {
    size_t offset;
    size_t bytes;
    std::vector<size_t> buckets;
  };

  /// `gradient_buffer`: null if the caller copies all gradients to their
  /// places.
  BackwardMarks(std::byte* gradient_buffer, const std::vector<Place>& places);
  ~BackwardMarks();

  size_t bytes_of(size_t index) const;
  /// Copies a gradient to its place. Blocks for nothing and changes nothing in
  /// this object, so the caller may release Python's lock meanwhile.
  void copy_in(size_t index, const void* gradient) const;
  /// Marks a gradient that is in its place as ready. Its mean is to be copied
  /// to `gradient` (null: it stays in the gradient buffer). Returns whether a
  /// bucket has become complete.
  bool mark(size_t index, void* gradient);
  /// The same for a gradient of which the caller has copied `bytes` from
  /// `gradient` and will copy the mean back. `is_shared`: see
  /// OpenBackward::add_copied().
  bool mark_copied(size_t index, void* gradient, size_t bytes, bool is_shared);
  /// Counts a parameter without a gradient with the present content of its
  /// place. Completes buckets, but the parameter stays unmarked.
  void leave_out(size_t index);
  std::vector<size_t> unmarked() const;
  /// Whether all parameters of a bucket have been marked or left out.
  bool is_complete(size_t bucket) const;
  /// The buckets that have become complete since the last call, in that order.
  std::vector<size_t> take_complete();

  /// Ends the backward, and clears the marks. `keeps_means`: nothing will be
  /// copied back. Returns the parameters whose gradients share memory with
  /// others: their means stay in the gradient buffer.
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
  /// The number of parameters with a part in each bucket.
  std::vector<uint32_t> parts_;
  /// How many of these are not marked or left out yet in this backward.
  std::vector<uint32_t> missing_;
  std::vector<size_t> complete_;
  std::vector<Return> returns_;
  bool in_backward_ = false;
};

}  // namespace paceline

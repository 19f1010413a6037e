#include "reducer/backward_marks.h"

#include <string.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace paceline {

BackwardMarks::BackwardMarks(std::byte* gradient_buffer,
                             const std::vector<Place>& places)
    : gradient_buffer_(gradient_buffer) {
  for (const Place& place : places) {
    const auto first = static_cast<uint32_t>(bucket_of_part_.size());
    for (const size_t bucket : place.buckets) {
      bucket_of_part_.push_back(bucket);
      if (bucket >= parts_.size()) parts_.resize(bucket + 1);
      ++parts_[bucket];
    }
    parameters_.push_back(
        {.offset = place.offset,
         .bytes = place.bytes,
         .first_part = first,
         .end_part = static_cast<uint32_t>(bucket_of_part_.size())});
  }
  missing_ = parts_;
}

BackwardMarks::~BackwardMarks() { leave(); }

void BackwardMarks::check(size_t index) const {
  if (index >= parameters_.size())
    throw std::out_of_range("no parameter " + std::to_string(index));
}

size_t BackwardMarks::bytes_of(size_t index) const {
  check(index);
  return parameters_[index].bytes;
}

void BackwardMarks::copy_in(size_t index, const void* gradient) const {
  check(index);
  if (gradient_buffer_ == nullptr)
    throw std::invalid_argument(
        "gradients are read from the gradient buffer only");
  const Parameter& to = parameters_[index];
  if (gradient != gradient_buffer_ + to.offset)
    memcpy(gradient_buffer_ + to.offset, gradient, to.bytes);
}

bool BackwardMarks::mark(size_t index, void* gradient) {
  check(index);
  Parameter& marked = parameters_[index];
  if (marked.is_marked) {
    throw std::runtime_error("parameter " + std::to_string(index) +
                             " was marked ready twice in one backward pass");
  }
  if (!in_backward_) {
    in_backward_ = true;
    enter();
  }
  marked.is_marked = true;
  if (gradient_buffer_ != nullptr &&
      gradient != gradient_buffer_ + marked.offset)
    marked.copy_back = static_cast<std::byte*>(gradient);
  return count_down(marked);
}

bool BackwardMarks::mark_copied(size_t index, void* gradient, size_t bytes,
                                bool is_shared) {
  const bool is_any_complete = mark(index, nullptr);
  add_copied(index, gradient, bytes, is_shared);
  return is_any_complete;
}

void BackwardMarks::leave_out(size_t index) {
  check(index);
  count_down(parameters_[index]);
}

bool BackwardMarks::count_down(const Parameter& marked) {
  bool is_any_complete = false;
  for (uint32_t i = marked.first_part; i < marked.end_part; ++i) {
    const size_t bucket = bucket_of_part_[i];
    if (--missing_[bucket] > 0) continue;
    complete_.push_back(bucket);
    is_any_complete = true;
  }
  return is_any_complete;
}

std::vector<size_t> BackwardMarks::unmarked() const {
  std::vector<size_t> found;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].is_marked) found.push_back(i);
  }
  return found;
}

bool BackwardMarks::is_complete(size_t bucket) const {
  if (bucket >= missing_.size())
    throw std::out_of_range("no bucket " + std::to_string(bucket));
  return missing_[bucket] == 0;
}

std::vector<size_t> BackwardMarks::take_complete() {
  return std::exchange(complete_, {});
}

std::vector<size_t> BackwardMarks::end_backward(bool keeps_means) {
  returns_.clear();
  std::vector<size_t> overlapping;
  if (in_backward_ && !keeps_means) {
    overlapping = find_overlapping();
    for (const size_t index : overlapping)
      parameters_[index].copy_back = nullptr;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].copy_back != nullptr)
        returns_.push_back({parameters_[i].copy_back, i});
    }
  }
  if (in_backward_) leave();
  in_backward_ = false;
  for (Parameter& each : parameters_) {
    each.is_marked = false;
    each.copy_back = nullptr;
  }
  std::copy(parts_.begin(), parts_.end(), missing_.begin());
  complete_.clear();
  return overlapping;
}

void BackwardMarks::copy_back() {
  for (const auto& [gradient, index] : returns_) {
    const Parameter& from = parameters_[index];
    memcpy(gradient, gradient_buffer_ + from.offset, from.bytes);
  }
  returns_.clear();
}

void BackwardMarks::collect_written(std::vector<Extent>& found) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [offset, bytes, first, end, is_marked, copy_back] =
        parameters_[i];
    if (copy_back != nullptr && bytes > 0)
      found.push_back({copy_back, copy_back + bytes, i});
  }
}

}  // namespace paceline

// The marks of a rank in a backward: complete buckets, and gradients outside of
// the gradient buffer that get their means, except those that share memory.

#include "reducer/backward_marks.h"

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"

namespace paceline {
namespace {

using Numbers = std::vector<size_t>;

constexpr size_t kBytes = 2 * sizeof(float);

struct Floats {
  float values[2];
  void* data() { return values; }
};

/// A gradient buffer with places for `count` parameters of two floats each.
struct GradientBuffer {
  explicit GradientBuffer(size_t count) : floats(2 * count) {}
  std::byte* data() { return reinterpret_cast<std::byte*>(floats.data()); }
  std::vector<float> floats;
};

/// Each parameter has a bucket of its own.
std::vector<BackwardMarks::Place> places(size_t count) {
  std::vector<BackwardMarks::Place> found;
  for (size_t i = 0; i < count; ++i) found.push_back({i * kBytes, kBytes, {i}});
  return found;
}

void hand_over(BackwardMarks& marks, size_t index, void* gradient) {
  marks.copy_in(index, gradient);
  marks.mark(index, gradient);
}

/// Changes the gradient buffer as an average with other ranks' gradients does.
void average(GradientBuffer& gradient_buffer) {
  for (float& each : gradient_buffer.floats) each += 10;
}

template <class Error, class Body>
bool throws(Body body) {
  try {
    body();
  } catch (const Error&) {
    return true;
  }
  return false;
}

TEST(a_bucket_is_complete_with_the_last_of_its_parameters) {
  // The second parameter lies in both buckets.
  BackwardMarks marks(nullptr, {{0, 8, {0}}, {8, 8, {0, 1}}, {16, 8, {1}}});
  for (int backward = 0; backward < 2; ++backward) {
    CHECK(!marks.mark(2, nullptr));
    CHECK(!marks.is_complete(1));
    CHECK(marks.mark(1, nullptr));
    CHECK(marks.is_complete(1) && !marks.is_complete(0));
    CHECK(marks.take_complete() == Numbers{1});
    CHECK(marks.take_complete().empty());
    CHECK(marks.unmarked() == Numbers{0});
    marks.leave_out(0);
    CHECK(marks.unmarked() == Numbers{0});
    CHECK(marks.is_complete(0));
    CHECK(marks.take_complete() == Numbers{0});
    CHECK(marks.end_backward(false).empty());
  }
}

TEST(a_parameter_is_marked_once_in_a_backward) {
  BackwardMarks marks(nullptr, places(2));
  marks.mark(0, nullptr);
  CHECK(throws<std::runtime_error>([&] { marks.mark(0, nullptr); }));
  CHECK(throws<std::out_of_range>([&] { marks.mark(2, nullptr); }));
  CHECK(throws<std::out_of_range>([&] { marks.leave_out(2); }));
  CHECK(throws<std::out_of_range>([&] { marks.is_complete(2); }));
  marks.end_backward(false);
  marks.mark(0, nullptr);
}

TEST(a_mean_goes_where_its_gradient_was) {
  GradientBuffer gradient_buffer(3);
  BackwardMarks marks(gradient_buffer.data(), places(3));
  Floats outside{{1, 2}}, copied{{3, 4}};
  hand_over(marks, 0, outside.data());
  marks.mark_copied(1, copied.data(), kBytes, false);
  // This one lies in its place.
  hand_over(marks, 2, gradient_buffer.data() + 2 * kBytes);
  CHECK_EQ(gradient_buffer.floats[1], 2.0F);
  average(gradient_buffer);
  CHECK(marks.end_backward(false).empty());
  CHECK_EQ(outside.values[0], 1.0F);
  marks.copy_back();
  CHECK_EQ(outside.values[0], 11.0F);
  CHECK_EQ(outside.values[1], 12.0F);
  CHECK_EQ(copied.values[0], 3.0F);  // by the caller
  outside.values[0] = 0;
  marks.copy_back();  // once
  CHECK_EQ(outside.values[0], 0.0F);
}

TEST(nothing_goes_back_if_the_backward_keeps_its_means) {
  GradientBuffer gradient_buffer(1);
  BackwardMarks marks(gradient_buffer.data(), places(1));
  Floats outside{{1, 2}};
  hand_over(marks, 0, outside.data());
  average(gradient_buffer);
  marks.end_backward(true);
  marks.copy_back();
  CHECK_EQ(outside.values[0], 1.0F);
}

TEST(gradients_that_share_memory_stay_in_the_buffer) {
  GradientBuffer gradient_buffer(4);
  BackwardMarks marks(gradient_buffer.data(), places(4));
  float memory[7] = {1, 2, 3, 4, 5, 6, 7};
  Floats apart{{1, 1}};
  hand_over(marks, 0, memory);
  hand_over(marks, 1, memory + 1);
  hand_over(marks, 2, apart.data());
  marks.mark_copied(3, memory + 2, kBytes, false);
  average(gradient_buffer);
  Numbers found = marks.end_backward(false);
  std::sort(found.begin(), found.end());
  CHECK(found == (Numbers{0, 1, 3}));
  marks.copy_back();
  CHECK_EQ(memory[0], 1.0F);
  CHECK_EQ(memory[2], 3.0F);
  CHECK_EQ(apart.values[0], 11.0F);
}

TEST(memory_is_shared_with_other_backwards_of_the_thread_too) {
  GradientBuffer gradient_buffer(2), others(1);
  BackwardMarks marks(gradient_buffer.data(), places(2)),
      other(others.data(), places(1));
  Floats both{{1, 2}}, copied{{3, 4}};
  hand_over(marks, 0, both.data());
  hand_over(other, 0, both.data());
  marks.mark_copied(1, copied.data(), kBytes, false);
  CHECK(marks.end_backward(false) == Numbers{0});
  // No other object is in a backward any more.
  CHECK(other.end_backward(false).empty());

  // Both have marked a copied gradient whose parameter both hold.
  marks.mark_copied(0, both.data(), kBytes, true);
  other.mark_copied(0, both.data(), kBytes, true);
  CHECK(marks.end_backward(false).empty());
  CHECK(other.end_backward(false).empty());
  marks.mark_copied(0, both.data(), kBytes, false);
  other.mark_copied(0, both.data(), kBytes, false);
  CHECK(marks.end_backward(false) == Numbers{0});
  CHECK(other.end_backward(false).empty());

  // A backward of another thread does not count for this one.
  hand_over(marks, 0, both.data());
  std::thread([&] { hand_over(other, 0, both.data()); }).join();
  CHECK(marks.end_backward(false).empty());
}

TEST(without_a_buffer_every_gradient_is_brought_by_the_caller) {
  BackwardMarks marks(nullptr, places(1));
  Floats outside{{1, 2}};
  CHECK(
      throws<std::invalid_argument>([&] { marks.copy_in(0, outside.data()); }));
}

}  // namespace
}  // namespace paceline

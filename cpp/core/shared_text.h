// Text for messages, in memory that its owner changes while other ranks read
// it.
//
// Each byte is stored and loaded as an atomic. A rank that reads during a
// change sees the beginning of one text and the end of another, within the
// bounds of the array. That is harmless: the text is only shown in errors, as a
// rank's last activity. No data is read because of it, so no order is needed,
// and no reader waits.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>

namespace paceline {

/// Writes as much of `text` as fits, and a zero.
template <size_t N>
void write_text(char (&to)[N], const char* text) {
  size_t i = 0;
  for (; i + 1 < N && text[i] != 0; ++i)
    std::atomic_ref(to[i]).store(text[i], std::memory_order_relaxed);
  std::atomic_ref(to[i]).store(0, std::memory_order_relaxed);
}

/// Reads up to the first zero. A truncated text may end in the middle of a
/// character.
template <size_t N>
std::string read_text(const char (&from)[N]) {
  std::string text;
  for (size_t i = 0; i < N; ++i) {
    // C++20 has no atomic_ref to a constant; a load changes nothing.
    const char next = std::atomic_ref(const_cast<char&>(from[i]))
                          .load(std::memory_order_relaxed);
    if (next == 0) break;
    text.push_back(next);
  }
  return text;
}

}  // namespace paceline

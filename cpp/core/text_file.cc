#include "core/text_file.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <system_error>

namespace paceline {
namespace {

constexpr std::string_view kBlanks = " \t\n\r\v\f";

template <typename Number>
std::optional<Number> parse(std::string_view word) {
  Number value = 0;
  const auto [end, error] =
      std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc()) return std::nullopt;
  return value;
}

}  // namespace

std::string read_text_file(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return "";
  std::string text;
  char piece[4096];
  while (true) {
    const ssize_t found = read(fd, piece, sizeof(piece));
    if (found < 0 && errno == EINTR) continue;
    if (found <= 0) break;
    text.append(piece, static_cast<size_t>(found));
  }
  close(fd);
  return text;
}

bool take_line(std::string_view& text, std::string_view& line) {
  if (text.empty()) return false;
  const size_t end = text.find('\n');
  line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return true;
}

std::string_view take_word(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
  const size_t length = std::min(text.find_first_of(kBlanks), text.size());
  const std::string_view word = text.substr(0, length);
  text.remove_prefix(length);
  return word;
}

std::optional<int64_t> parse_integer(std::string_view word) {
  return parse<int64_t>(word);
}

std::optional<uint64_t> parse_natural(std::string_view word) {
  return parse<uint64_t>(word);
}

}  // namespace paceline

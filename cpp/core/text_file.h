// Small text files, as the kernel shows them in /proc and /sys.
//
// Streams of the standard library, and what parses numbers by a locale, are not
// used in the core: where it is linked with a C++ runtime of its own, the loader
// may give it the locales of another one in the same process, and it crashes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace paceline {

/// All of a file; empty where it cannot be read.
std::string read_text_file(const std::string& path);

/// Takes the first line, or all of the text where it has no line end, off its
/// front. False: there is none.
bool take_line(std::string_view& text, std::string_view& line);

/// Takes the first word off the front of a text, and the blanks before it;
/// empty: there is none.
std::string_view take_word(std::string_view& text);

/// The number that a word begins with; none: it begins with something else.
std::optional<int64_t> parse_integer(std::string_view word);
std::optional<uint64_t> parse_natural(std::string_view word);

}  // namespace paceline

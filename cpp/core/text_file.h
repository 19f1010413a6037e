// Reads small text files, such as those of /proc and /sys.
//
// The core does not use the standard library's streams or locale-dependent
// number parsers: where the core is linked with its own C++ runtime, the loader
// may give it the locales of another runtime in the same process, and it
// crashes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace paceline {

/// The whole file; empty if it cannot be read.
std::string read_text_file(const std::string& path);

/// Removes the first line from the front of the text, or all of it if it has no
/// line end. False: the text was empty.
bool take_line(std::string_view& text, std::string_view& line);

/// Removes the first word and the blanks before it from the front of a text;
/// empty: there is none.
std::string_view take_word(std::string_view& text);

/// The number at the beginning of a word; none: the word does not begin with
/// one.
std::optional<int64_t> parse_integer(std::string_view word);
std::optional<uint64_t> parse_natural(std::string_view word);

}  // namespace paceline

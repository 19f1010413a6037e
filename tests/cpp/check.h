// A test is TEST(name) { ... }; CHECK and CHECK_EQ end the program at the first
// failure, from any thread. Each *_test.cc is one program. main.cc runs its
// tests in the order of the file.
#pragma once

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace paceline::testing {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

struct Registration {
  Registration(const char* name, void (*body)()) {
    all_tests().push_back({name, body});
  }
};

[[noreturn]] inline void fail(const char* file, int line,
                              const std::string& what) {
  std::ostringstream message;  // one write, so that threads do not interleave
  message << file << ":" << line << ": " << what << "\n";
  std::cerr << message.str() << std::flush;
  std::_Exit(1);
}

template <typename A, typename B>
void check_equal(const A& got, const B& expected, const char* spelled,
                 const char* file, int line) {
  if (got == expected) return;
  std::ostringstream what;
  what << spelled << ": got " << +got << ", expected " << +expected;
  fail(file, line, what.str());
}

}  // namespace paceline::testing

#define TEST(name)                                                             \
  static void name();                                                          \
  static const ::paceline::testing::Registration registration_of_##name{#name, \
                                                                        name}; \
  static void name()

#define CHECK(condition)                                       \
  ((condition) ? void()                                        \
               : ::paceline::testing::fail(__FILE__, __LINE__, \
                                           #condition " is false"))

#define CHECK_EQ(got, expected) \
  ::paceline::testing::check_equal((got), (expected), #got, __FILE__, __LINE__)

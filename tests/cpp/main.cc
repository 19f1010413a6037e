#include <cstdio>

#include "check.h"

int main() {
  for (const auto& test : paceline::testing::all_tests()) {
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.body();
  }
  return paceline::testing::all_tests().empty() ? 1 : 0;
}

// The memory that ranks share, before a group exists.
#include <nanobind/nanobind.h>
#include <string.h>
#include <unistd.h>

#include <cstddef>

#include "bind/bindings.h"
#include "bind/failures.h"
#include "core/region_layout.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {

void bind_region(nb::module_& m) {
  m.def(
      "create_region",
      [](int world, nb::bytes nonce) {
        if (world < 1 || world > kMaxRanks || nonce.size() != 16)
          misuse("create_region: world or nonce is wrong");
        uint64_t words[2];
        memcpy(words, nonce.c_str(), sizeof(words));
        return create_region(world, words);
      },
      "world"_a, "nonce"_a,
      "Returns the descriptor of a sealed memfd that holds a region for "
      "`world` ranks.");

  m.def(
      "region_nonce",
      [](int fd) {
        uint64_t nonce[2] = {};
        if (pread(fd, nonce, sizeof(nonce), offsetof(Header, nonce)) !=
            sizeof(nonce)) {
          raise_failure({.reason = Reason::kNoMemory,
                         .message = "the shared region can't be read"},
                        nullptr);
        }
        return nb::bytes(reinterpret_cast<const char*>(nonce), sizeof(nonce));
      },
      "fd"_a, "The 16 bytes that the creator of the region wrote into it.");
}

}  // namespace paceline

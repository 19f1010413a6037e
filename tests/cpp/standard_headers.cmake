# What most files of the core and of its tests include of the standard library: read once for all of them, which
# takes a fifth of the time to compile under AddressSanitizer. The Python extension is built without, so that a
# file whose own list of headers is not complete does not go unnoticed.
set(standard_headers
    <algorithm> <array> <atomic> <chrono> <cstddef> <cstdint> <cstring> <functional> <memory> <mutex> <optional>
    <random> <span> <string> <thread> <tuple> <utility> <vector>)

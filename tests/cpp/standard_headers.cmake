# The standard headers that most files of the core and of its tests include: read once for all of them, which
# takes a fifth of the time to compile under AddressSanitizer. The Python extension is built without them, so
# that an incomplete include list of a file is noticed.
set(standard_headers
    <algorithm> <array> <atomic> <chrono> <cstddef> <cstdint> <cstring> <functional> <memory> <mutex> <optional>
    <random> <span> <string> <thread> <tuple> <utility> <vector>)

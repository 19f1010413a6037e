# Builds for 64-bit Arm with Debian's cross compiler (g++-aarch64-linux-gnu).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_STRIP aarch64-linux-gnu-strip)

# The programs that a build runs (Python) are this machine's.
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)

# ctest runs what was built with this; the compiler's package has the C library.
find_program(PACELINE_QEMU NAMES qemu-aarch64-static qemu-aarch64)
if(PACELINE_QEMU)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${PACELINE_QEMU} -L /usr/aarch64-linux-gnu)
endif()

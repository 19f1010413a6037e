#include "core/region.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cinttypes>
#include <string>

#include "core/atomics.h"
#include "core/failure.h"

namespace paceline {
namespace {

[[noreturn]] void no_memory(const char* what, int error) {
  throw Failure{.reason = Reason::kNoMemory,
                .message = std::string(what) + ": " + strerror(error)};
}

bool read_number(const char* path, uint64_t* value) {
  FILE* file = fopen(path, "re");
  if (file == nullptr) return false;
  const bool ok =
      fscanf(file, "%" SCNu64, value) == 1;  // "max" is no number: no limit
  fclose(file);
  return ok;
}

// A memfd is charged to the memory cgroup, where too much is an OOM kill and
// not ENOSPC: ask first.
void check_cgroup(size_t bytes) {
  uint64_t limit = 0;
  uint64_t current = 0;
  if (!read_number("/sys/fs/cgroup/memory.max", &limit)) return;
  if (!read_number("/sys/fs/cgroup/memory.current", &current)) return;
  if (current + bytes > limit) {
    throw Failure{.reason = Reason::kNoMemory,
                  .message = "the memory cgroup allows " +
                             std::to_string(limit) + " bytes, " +
                             std::to_string(current) + " are in use and " +
                             std::to_string(bytes) + " more are needed"};
  }
}

std::atomic<uint32_t> forks{0};

}  // namespace

uint32_t fork_generation() {
  [[maybe_unused]] static const int registered = pthread_atfork(
      nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  return forks.load(std::memory_order_relaxed);
}

int Region::create(size_t bytes) {
  const int fd = memfd_create("paceline", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) no_memory("memfd_create", errno);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    close(fd);
    no_memory("sizing the shared region", error);
  }
  return fd;
}

Region::Region(int fd) : fork_generation_(fork_generation()) {
  struct stat status;
  if (fstat(fd, &status) != 0) no_memory("fstat of the shared region", errno);
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  if ((fcntl(fd, F_GET_SEALS) & kSeals) != kSeals) {
    // A file that its maker can still shrink is a SIGBUS in waiting.
    throw Failure{.reason = Reason::kNoMemory,
                  .message = "the shared region is not sealed"};
  }
  size_ = static_cast<size_t>(status.st_size);
  fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (fd_ < 0) no_memory("duplicating the shared region's descriptor", errno);
  void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    close(fd_);
    no_memory("mapping the shared region", error);
  }
  data_ = static_cast<std::byte*>(mapped);
  madvise(data_, size_, MADV_DONTFORK);
  madvise(data_, size_, MADV_DONTDUMP);
}

Region::~Region() {
  // A forked child does not have the mapping: unmapping there could hit
  // somebody else's.
  if (fork_generation_ == fork_generation()) munmap(data_, size_);
  close(fd_);
}

void Region::reserve(size_t offset, size_t bytes) {
  if (bytes == 0) return;
  check_cgroup(bytes);
  const int error = posix_fallocate(fd_, static_cast<off_t>(offset),
                                    static_cast<off_t>(bytes));
  if (error != 0) no_memory("reserving shared memory", error);
}

void Region::release(size_t offset, size_t bytes) {
  if (bytes == 0) return;
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

}  // namespace paceline

#include "core/region.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/atomics.h"
#include "core/cgroup.h"
#include "core/failure.h"
#include "core/text_file.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U  // since Linux 6.3; the same on all architectures
#endif
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace paceline {
namespace {

/// The bytes reserved in one system call, which then takes some 10 ms.
constexpr size_t kReservePiece = size_t{64} << 20;

[[noreturn]] void no_memory(const char* what, int error) {
  throw Failure{.reason = Reason::kNoMemory,
                .message = std::string(what) + ": " + strerror(error),
                .error_number = error};
}

/// The bytes left according to /proc/meminfo; UINT64_MAX if that is unknown.
uint64_t left_on_machine() {
  const std::string text = read_text_file("/proc/meminfo");
  std::string_view lines = text;
  uint64_t kib = 0;
  for (std::string_view line; take_line(lines, line);) {
    const std::string_view name = take_word(line);
    if (name == "MemAvailable:" || name == "SwapFree:")
      kib += parse_natural(take_word(line)).value_or(0);
  }
  return kib == 0 ? UINT64_MAX : kib * 1024;
}

// Other ranks may be writing to this memory; it does not matter which of their
// values are copied. ThreadSanitizer would report a race between ranks that are
// threads.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize_thread))
#endif
void copy_while_written(void* to, const void* from, size_t bytes) {
  auto* out = static_cast<uint64_t*>(to);
  const auto* in = static_cast<const volatile uint64_t*>(from);
  for (size_t i = 0; i < bytes / sizeof(uint64_t); ++i) out[i] = in[i];
}

Atomic<uint32_t> forks{0};
SignalSafeList<ForkedAway> forked_away;

/// In a forked child: closes the descriptors that the child must not keep, and
/// occupies the addresses of the parent's mappings, so that no later mapping is
/// placed there. Code in the child that reads an array of the parent then
/// faults instead of reading other data.
void on_fork() {
  const uint32_t generation = forks.load(std::memory_order_relaxed);
  forks.store(generation + 1, std::memory_order_relaxed);
  forked_away.forget_walkers();
  forked_away.visit([&](const ForkedAway& each) {
    if (each.generation != generation) return;  // of an earlier ancestor
    each.file.close();
    if (each.data == nullptr) return;
    // Linux before 4.17 treats MAP_FIXED_NOREPLACE as a hint.
    void* const taken =
        mmap(each.data, each.size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE,
             -1, 0);
    if (taken != MAP_FAILED && taken != each.data) munmap(taken, each.size);
  });
}

struct flock place_of(int number) {
  struct flock range = {};
  range.l_type = F_WRLCK;
  range.l_start = number;
  range.l_len = 1;
  return range;
}

}  // namespace

uint32_t fork_generation() {
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, on_fork);
  return forks.load(std::memory_order_relaxed);
}

bool lies_in_region_of_parent(const void* address) {
  bool found = false;
  const auto* at = static_cast<const std::byte*>(address);
  const uint32_t generation = forks.load(std::memory_order_relaxed);
  forked_away.visit([&](const ForkedAway& each) {
    found = found || (each.generation != generation && each.data != nullptr &&
                      at >= each.data && at < each.data + each.size);
  });
  return found;
}

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

int Region::create(size_t bytes) {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  // Not executable: a hardened machine (vm.memfd_noexec) refuses other memfds.
  int fd = memfd_create("paceline", kFlags | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = memfd_create("paceline", kFlags);
  if (fd < 0) no_memory("memfd_create", errno);
  if (fchmod(fd, 0600) != 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
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
    // If its creator can still shrink the file, an access may end in SIGBUS.
    throw Failure{.reason = Reason::kNoMemory,
                  .message = "the shared region is not sealed"};
  }
  size_ = static_cast<size_t>(status.st_size);
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (own < 0) no_memory("duplicating the shared region's descriptor", errno);
  file_ = Descriptor::of(own);
  void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_NORESERVE, own, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    close(own);
    no_memory("mapping the shared region", error);
  }
  data_ = static_cast<std::byte*>(mapped);
  // Both are only advice: where a kernel refuses them, a forked child still
  // maps the region, and a core dump still contains it; nothing else changes.
  madvise(data_, size_, MADV_DONTFORK);
  madvise(data_, size_, MADV_DONTDUMP);
  entry_ = forked_away.put({file_, data_, size_, fork_generation_});
}

Region::~Region() {
  // A forked child has neither; its descriptor number may belong to another
  // file.
  if (fork_generation_ != fork_generation()) return;
  forked_away.take_out(entry_);
  munmap(data_, size_);
  file_.close();
}

void Region::check_memory(uint64_t bytes) {
  const uint64_t left =
      std::min(read_cgroup_limits().memory_left, left_on_machine());
  if (bytes <= left) return;
  throw Failure{.reason = Reason::kNoMemory,
                .message = std::to_string(bytes) +
                           " bytes are needed, and the machine or the "
                           "container has " +
                           std::to_string(left) + " left"};
}

void Region::reserve(size_t offset, size_t bytes) {
  if (bytes == 0) return;
  check_memory(bytes);
  if (!file_.is_ours()) no_memory("reserving shared memory", EBADF);
  reserve_in(file_.number, offset, bytes);
}

void Region::reserve_in(int fd, size_t offset, size_t bytes) {
  size_t piece = kReservePiece;
  const size_t end = offset + bytes;
  while (offset < end) {
    const int error =
        posix_fallocate(fd, static_cast<off_t>(offset),
                        static_cast<off_t>(std::min(piece, end - offset)));
    if (error == EINTR) {
      // Many kernels abandon the call, and undo its work, at any signal: a
      // smaller step fits between two signals of a profiler.
      piece = std::max(piece / 2, page_bytes());
    } else if (error != 0) {
      no_memory("reserving shared memory", error);
    } else {
      offset += std::min(piece, end - offset);
    }
  }
}

void Region::release(size_t offset, size_t bytes) {
  if (bytes == 0) return;
  if (!file_.is_ours()) {
    // The same through the mapping. Where the kernel refuses, the region keeps
    // the memory until it is closed.
    madvise(data_ + offset, bytes, MADV_REMOVE);
    return;
  }
  fallocate(file_.number, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

RegionLock::RegionLock(int fd)
    : file_(Descriptor::of(fd)),
      fork_generation_(fork_generation()),
      entry_(forked_away.put({file_, nullptr, 0, fork_generation_})) {}

RegionLock::~RegionLock() {
  if (fork_generation_ != fork_generation()) return;
  forked_away.take_out(entry_);
  file_.close();
}

std::unique_ptr<RegionLock> RegionLock::take(const Region& region, int number) {
  // A lock belongs to an open file description, and all ranks share the
  // region's.
  const std::string path =
      "/proc/self/fd/" + std::to_string(region.file_.number);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  struct flock range = place_of(number);
  if (fcntl(fd, F_OFD_SETLK, &range) != 0 || !is_held(region, number)) {
    close(fd);
    return nullptr;
  }
  return std::unique_ptr<RegionLock>(new RegionLock(fd));
}

bool RegionLock::is_held(const Region& region, int number) {
  if (!region.file_.is_ours()) return true;
  struct flock range = place_of(number);
  return fcntl(region.file_.number, F_OFD_GETLK, &range) != 0 ||
         range.l_type != F_UNLCK;
}

void Region::keep_to_itself(size_t offset, size_t bytes) noexcept {
  // In steps: each step's memory in the file is freed before the next one is
  // copied, so that a large array does not take its memory twice.
  constexpr size_t kStepBytes = size_t{64} << 20;
  const size_t page = page_bytes();
  if (offset % page != 0) return;
  const size_t end = std::min((offset + bytes + page - 1) / page * page, size_);
  for (size_t at = offset; at < end; at += kStepBytes) {
    const size_t length = std::min(kStepBytes, end - at);
    void* copy = mmap(nullptr, length, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return;
    copy_while_written(copy, data_ + at, length);
    // In one step, for threads of this process that read there at the same
    // time.
    if (mremap(copy, length, length, MREMAP_MAYMOVE | MREMAP_FIXED,
               data_ + at) == MAP_FAILED) {
      munmap(copy, length);
      return;
    }
    release(at, length);
  }
}

}  // namespace paceline

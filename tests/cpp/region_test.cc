// The region alone: sealed, sparse, reserved and given back, not inherited.

#include "core/region.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "check.h"
#include "core/region_layout.h"
#include "group_world.h"

namespace {

/// The next calls of posix_fallocate, this many, end as when a signal comes.
int interruptions = 0;
size_t largest_piece = 0;
size_t smallest_piece = SIZE_MAX;

}  // namespace

/// Replaces the C library's: older kernels end it at any signal, newer ones do
/// not, so the test simulates it.
extern "C" int posix_fallocate(int fd, off_t offset, off_t bytes) {
  if (interruptions > 0) {
    --interruptions;
    return EINTR;
  }
  const auto piece = static_cast<size_t>(bytes);
  largest_piece = std::max(largest_piece, piece);
  smallest_piece = std::min(smallest_piece, piece);
  return fallocate(fd, 0, offset, bytes) == 0 ? 0 : errno;
}

namespace paceline {
namespace {

constexpr size_t kBytes = size_t{64} << 20;

size_t resident_bytes(int fd) {
  struct stat status;
  CHECK_EQ(fstat(fd, &status), 0);
  return static_cast<size_t>(status.st_blocks) * 512;
}

TEST(a_region_is_sparse_sealed_and_closed_on_exec) {
  const int fd = Region::create(kBytes);
  CHECK_EQ(resident_bytes(fd), size_t{0});
  CHECK_EQ(ftruncate(fd, kBytes / 2), -1);
  CHECK_EQ(ftruncate(fd, kBytes * 2), -1);
  CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
  struct stat status;
  CHECK_EQ(fstat(fd, &status), 0);
  CHECK_EQ(status.st_mode & 07777, 0600u);
  close(fd);
}

TEST(memory_is_reserved_and_given_back) {
  const int fd = Region::create(kBytes);
  Region one(fd);
  Region two(fd);
  CHECK_EQ(one.size(), kBytes);
  one.reserve(1 << 20, 4 << 20);
  CHECK_EQ(resident_bytes(fd), size_t{4} << 20);
  memset(one.data() + (1 << 20), 7, 4 << 20);
  CHECK_EQ(static_cast<int>(two.data()[(5 << 20) - 1]), 7);
  two.release(1 << 20, 4 << 20);
  CHECK_EQ(resident_bytes(fd), size_t{0});
  one.reserve(1 << 20, 4 << 20);
  CHECK_EQ(static_cast<int>(one.data()[1 << 20]), 0);
  one.reserve(0, 0);
  one.release(0, 0);
  close(fd);
}

TEST(a_signal_is_no_lack_of_memory) {
  const int fd = Region::create(4 * kBytes);
  Region region(fd);
  largest_piece = 0;
  region.reserve(page_bytes(), 2 * kBytes + 5);
  CHECK_EQ(resident_bytes(fd), 2 * kBytes + page_bytes());
  CHECK_EQ(largest_piece, kBytes);  // a large array, in many system calls
  region.release(0, 4 * kBytes);
  smallest_piece = SIZE_MAX;
  // If signals come repeatedly, smaller chunks fit between them.
  for (const int count : {1, 3, 40}) {
    interruptions = count;
    largest_piece = 0;
    region.reserve(0, kBytes / 16);
    CHECK_EQ(interruptions, 0);
    CHECK_EQ(resident_bytes(fd), kBytes / 16);
    region.release(0, kBytes);
  }
  CHECK_EQ(smallest_piece, page_bytes());
  close(fd);
}

TEST(more_memory_than_there_is_is_refused) {
  Region::check_memory(1 << 20);
  const Failure failure =
      testing::failure_of([] { Region::check_memory(uint64_t{1} << 50); });
  CHECK_EQ(failure.reason, Reason::kNoMemory);
  CHECK(failure.message.find("1125899906842624 bytes are needed") == 0);
}

TEST(an_unsealed_file_is_refused) {
  const int fd = memfd_create("test", MFD_CLOEXEC);
  CHECK_EQ(ftruncate(fd, kBytes), 0);
  CHECK_EQ(testing::failure_of([&] { Region region(fd); }).reason,
           Reason::kNoMemory);
  close(fd);
}

TEST(a_group_refuses_memory_of_another_job_and_a_taken_place) {
  const uint64_t nonce[2] = {1, 2};
  const uint64_t other[2] = {1, 3};
  const int fd = create_region(2, nonce, size_t{32} << 20);
  const GroupOptions options{.timeout_s = 0.2};
  const auto join_as = [&](int rank, const uint64_t (&with)[2]) {
    return testing::failure_of([&] { HostGroup(fd, rank, with, options); });
  };
  CHECK_EQ(join_as(0, other).reason, Reason::kMisuse);
  CHECK_EQ(join_as(2, nonce).reason, Reason::kMisuse);
  CHECK_EQ(join_as(-1, nonce).reason, Reason::kMisuse);
  HostGroup first(fd, 0, nonce, options);
  CHECK_EQ(join_as(0, nonce).reason, Reason::kMisuse);
  // Rank 1 never comes.
  const Failure late = testing::failure_of([&] { first.session.join(); });
  CHECK_EQ(late.reason, Reason::kDeadline);
  CHECK(testing::is_late(late, 1) && !testing::is_late(late, 0));
  close(fd);
}

/// Open descriptors of regions.
size_t num_descriptors() {
  size_t count = 0;
  for (const auto& each :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the iterator's own descriptor
    const auto target = std::filesystem::read_symlink(each, gone);
    if (!gone && target.string().find("memfd:paceline") != std::string::npos)
      ++count;
  }
  return count;
}

/// Exit status, or minus the signal, of a forked child that runs `program`.
int in_child(const std::function<int()>& program) {
  const pid_t child = fork();
  if (child == 0) {
    // Sanitizers have their own handler.
    signal(SIGSEGV, SIG_DFL);
    _exit(program());
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

TEST(a_forked_child_keeps_nothing_of_a_region) {
  const int fd = Region::create(kBytes);
  auto region = std::make_unique<Region>(fd);
  auto lock = RegionLock::take(*region, 3);
  CHECK(lock != nullptr);
  close(fd);
  region->reserve(0, kBytes);
  CHECK_EQ(num_descriptors(), size_t{2});
  std::byte* const data = region->data();
  const auto use_child = [&] {
    CHECK_EQ(num_descriptors(), size_t{0});
    CHECK(lies_in_region_of_parent(data) &&
          lies_in_region_of_parent(data + kBytes - 1));
    CHECK(!lies_in_region_of_parent(data + kBytes));
    // No other mapping gets this address, and nothing of it can be read.
    CHECK(mmap(data, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) !=
          data);
    unsigned char in_core;
    CHECK_EQ(in_child([&] { return static_cast<int>(data[5]); }), -SIGSEGV);
    CHECK(mincore(data, 1, &in_core) == 0);
    // The child's own regions work, and the parent's objects do no harm.
    const int own_fd = Region::create(kBytes);
    Region own(own_fd);
    lock.reset();
    region.reset();
    own.reserve(0, kBytes);
    own.data()[5] = std::byte{1};
    CHECK(fcntl(own_fd, F_GETFD) >= 0);
    CHECK(!lies_in_region_of_parent(own.data()));
    return 0;
  };
  CHECK_EQ(in_child([&] {
             return use_child() + in_child([&] {
                      return lies_in_region_of_parent(data) ? 0 : 1;
                    });
           }),
           0);
  CHECK(!lies_in_region_of_parent(data));
  data[5] = std::byte{1};
}

TEST(a_lock_is_held_until_it_is_let_go) {
  const int fd = Region::create(kBytes);
  Region region(fd);
  Region elsewhere(fd);
  close(fd);
  CHECK(!RegionLock::is_held(region, 0));
  pid_t child = -1;
  int lifeline = -1;
  {
    const auto lock = RegionLock::take(elsewhere, 0);
    CHECK(lock != nullptr);
    CHECK(RegionLock::is_held(region, 0));
    CHECK(RegionLock::is_held(elsewhere, 0));
    CHECK(!RegionLock::is_held(region, 1));
    CHECK(RegionLock::take(region, 0) == nullptr);
    CHECK(RegionLock::take(region, 1) != nullptr);
    CHECK(!RegionLock::is_held(region, 1));
    // A forked child does not keep holding it.
    int to_parent[2];
    int to_child[2];
    CHECK_EQ(pipe(to_parent) + pipe(to_child), 0);
    child = fork();
    char byte = 0;
    if (child == 0) {
      close(to_child[1]);
      const ssize_t written = write(to_parent[1], &byte, 1);
      _exit(written == 1 && read(to_child[0], &byte, 1) == 0 ? 0 : 1);
    }
    CHECK_EQ(read(to_parent[0], &byte, 1), ssize_t{1});
    lifeline = to_child[1];
  }
  CHECK(!RegionLock::is_held(region, 0));
  close(lifeline);
  CHECK_EQ(waitpid(child, nullptr, 0), child);
}

TEST(a_fork_counts_in_the_child_alone) {
  const uint32_t before = fork_generation();
  const pid_t child = fork();
  if (child == 0) _exit(fork_generation() == before + 1 ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK_EQ(fork_generation(), before);
}

}  // namespace
}  // namespace paceline

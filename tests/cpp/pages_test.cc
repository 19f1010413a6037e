// A machine whose pages are larger than usual: 64 KiB, as on some Arm and POWER
// machines. This program reports that size in place of the C library; the core
// must lay out everything in such pages.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>
#include <vector>

#include "check.h"
#include "collectives/barrier.h"
#include "core/region.h"
#include "core/region_layout.h"
#include "group_world.h"

namespace {

constexpr long kPage = 64 * 1024;
/// More than fill all slabs together: so each is as large as the number of
/// ranks allows.
constexpr long kPagesOfMachine = (long{16} << 40) / kPage;

struct Range {
  off_t offset;
  off_t bytes;
};
std::mutex given_back_mutex;
std::vector<Range> given_back;

}  // namespace

/// The C library's own, by its other name. (ThreadSanitizer asks before dlsym()
/// works.)
extern "C" long __sysconf(int name);

extern "C" {

/// Replaces the C library's.
#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize_thread))
#endif
long sysconf(int name) noexcept {
  if (name == _SC_PAGESIZE) return kPage;
  if (name == _SC_PHYS_PAGES) return kPagesOfMachine;
  return __sysconf(name);
}

/// The same; notes the ranges that are given back.
int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  if ((mode & FALLOC_FL_PUNCH_HOLE) != 0) {
    const std::lock_guard lock(given_back_mutex);
    given_back.push_back({offset, bytes});
  }
  return static_cast<int>(syscall(SYS_fallocate, fd, mode, offset, bytes));
}

}  // extern "C"

namespace paceline {
namespace {

constexpr auto kPageBytes = static_cast<size_t>(kPage);
constexpr uint64_t kNonce[2] = {1, 2};

TEST(the_parts_of_a_region_begin_at_pages) {
  CHECK_EQ(page_bytes(), kPageBytes);
  for (int world = 1; world <= 9; ++world) {
    const int fd = create_region(world, kNonce);
    const Region region(fd);
    close(fd);
    const auto* header = reinterpret_cast<const Header*>(region.data());
    const Layout layout{world, header->slab_bytes};
    for (int r = 0; r < world; ++r)
      CHECK_EQ(layout.slab_at(r) % kPageBytes, size_t{0});
    CHECK_EQ(region.size(), layout.region_bytes());
    CHECK_EQ(region.size() % kPageBytes, size_t{0});
  }
}

TEST(arrays_share_no_page_and_go_back_in_whole_pages) {
  testing::run_group(2, [](HostGroup& group) {
    const size_t slab_at = group.session.mapping().layout().slab_at(0);
    std::vector<size_t> offsets;
    size_t least = 0;
    for (const size_t bytes : {size_t{1}, size_t{5000}, 2 * kPageBytes + 1}) {
      const size_t offset = group.heap.allocate(bytes, -1);
      CHECK_EQ((slab_at + offset) % kPageBytes, size_t{0});
      CHECK(offset >= least);
      least = offset + (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
      offsets.push_back(offset);
    }
    for (const size_t each : offsets) group.heap.free(each);
    // Now rank 0 gives back all that was freed.
    barrier(group.calls, -1);
    group.heap.free(group.heap.allocate(1, -1));
  });
  const std::lock_guard lock(given_back_mutex);
  CHECK(given_back.size() >= 6);  // by each of two ranks
  for (const Range& each : given_back) {
    CHECK_EQ(each.offset % kPage, 0);
    CHECK_EQ(each.bytes % kPage, 0);
  }
}

TEST(what_a_rank_keeps_to_itself_is_whole_pages) {
  const int fd = Region::create(8 * kPageBytes);
  Region one(fd);
  const Region other(fd);
  close(fd);
  one.reserve(0, one.size());
  const auto is_shared = [&](size_t offset) {
    one.data()[offset] = std::byte{1};
    other.data()[offset] = std::byte{2};
    return one.data()[offset] == std::byte{2};
  };
  // Begins within a page.
  one.keep_to_itself(kPageBytes + 4096, 100);
  CHECK(is_shared(kPageBytes + 4096));
  // The rest of the last page is given back, too.
  one.keep_to_itself(2 * kPageBytes, kPageBytes + 1);
  CHECK(is_shared(2 * kPageBytes - 1));
  CHECK(!is_shared(2 * kPageBytes));
  CHECK(!is_shared(3 * kPageBytes));
  CHECK(!is_shared(4 * kPageBytes - 1));
  CHECK(is_shared(4 * kPageBytes));
}

}  // namespace
}  // namespace paceline

#include "core/region_layout.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "core/region.h"

namespace paceline {
namespace {

// Virtual memory is nearly free, but address space can be limited: a slab takes
// no more than the machine's memory, and all slabs together no more than 8 TiB.
size_t largest_slab(int world) {
  const size_t memory =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes();
  const size_t share = (size_t{8} << 40) / static_cast<size_t>(world);
  return round_up(std::min(memory, share), page_bytes());
}

bool can_map(size_t bytes) {
  void* mapped = mmap(nullptr, bytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return false;
  munmap(mapped, bytes);
  return true;
}

}  // namespace

size_t Layout::allocations_at() const {
  return round_up(sizeof(Header), kLinePairBytes);
}

size_t Layout::rank_lines_at() const {
  return round_up(allocations_at() + kMaxAllocations * sizeof(Allocation),
                  kLinePairBytes);
}

size_t Layout::channels_at() const {
  return rank_lines_at() + static_cast<size_t>(world) * sizeof(RankLine);
}

size_t Layout::control_bytes() const {
  const size_t pairs = static_cast<size_t>(world) * static_cast<size_t>(world);
  return round_up(channels_at() + pairs * sizeof(Channel), page_bytes());
}

int create_region(int world, const uint64_t nonce[2], size_t slab_limit) {
  Layout layout{world, std::min(largest_slab(world),
                                slab_limit / page_bytes() * page_bytes())};
  const size_t least =
      round_up(layout.heap_at() + (size_t{64} << 20), page_bytes());
  while (!can_map(layout.region_bytes()) && layout.slab_bytes / 2 >= least) {
    layout.slab_bytes = round_up(layout.slab_bytes / 2, page_bytes());
  }
  const int fd = Region::create(layout.region_bytes());
  try {
    Region region(fd);
    region.reserve(0, layout.control_bytes());
    auto* header = new (region.data()) Header{};
    header->magic = kMagic;
    header->abi_version = kAbiVersion;
    header->world = static_cast<uint32_t>(world);
    header->slab_bytes = layout.slab_bytes;
    header->nonce[0] = nonce[0];
    header->nonce[1] = nonce[1];
  } catch (...) {
    close(fd);
    throw;
  }
  return fd;
}

}  // namespace paceline

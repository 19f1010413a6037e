#include "core/mapping.h"

#include <string>
#include <utility>

#include "core/failure.h"

namespace paceline {

Mapping::Mapping(std::shared_ptr<Region> region, int rank,
                 const uint64_t nonce[2])
    : region_(std::move(region)),
      header_(reinterpret_cast<Header*>(region_->data())),
      rank_(rank) {
  if (region_->size() < sizeof(Header) || header_->magic != kMagic ||
      header_->abi_version != kAbiVersion) {
    misuse(
        "the shared region was made by another version of Paceline; all ranks "
        "must use the same one");
  }
  if (header_->nonce[0] != nonce[0] || header_->nonce[1] != nonce[1]) {
    misuse("the shared region belongs to another job");
  }
  layout_ = {static_cast<int>(header_->world), header_->slab_bytes};
  if (rank_ < 0 || rank_ >= layout_.world ||
      layout_.region_bytes() > region_->size()) {
    misuse("rank " + std::to_string(rank_) +
           " does not fit a region made for " + std::to_string(layout_.world) +
           " ranks");
  }
  std::byte* base = region_->data();
  first_slab_ = base + layout_.slab_at(0);
  allocations_ = {
      reinterpret_cast<Allocation*>(base + layout_.allocations_at()),
      kMaxAllocations};
  lines_ = {reinterpret_cast<RankLine*>(base + layout_.rank_lines_at()),
            header_->world};
  channels_ = reinterpret_cast<Channel*>(base + layout_.channels_at());
}

}  // namespace paceline

// Memory belongs to the stream that was current when it was allocated. It is freed as by the allocator of
// CUDA: the next allocation on that stream may get it, as soon as the streams that were recorded
// (`Tensor.record_stream`) have reached their position at the time it was freed. Here that allocation makes
// the stream fill it with NaNs, so that late readers see them. New memory holds NaNs.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "device.h"
#include "streams.h"

namespace later {

constexpr std::size_t kQuarantineBytes = 64 << 20;

inline void fill_with_nans(void* memory, std::size_t nbytes) {
  std::memset(memory, 0xff, nbytes);
}

inline void* new_memory(std::size_t nbytes) {
  void* memory = std::aligned_alloc(64, (nbytes + 63) / 64 * 64);
  TORCH_CHECK(memory, "no memory");
  fill_with_nans(memory, nbytes);
  return memory;
}

// Bytes that tensors of all devices hold now, and the most that they have held since the last
// `forget_most_held`.
inline std::atomic<std::size_t> held_bytes, most_held_bytes;

inline void hold(std::size_t nbytes) {
  auto now = held_bytes += nbytes;
  auto most = most_held_bytes.load();
  while (now > most && !most_held_bytes.compare_exchange_weak(most, now)) {
  }
}

inline void forget_most_held() { most_held_bytes = held_bytes.load(); }

// Memory of the device, and the streams that use it.
struct Block {
  void* memory;
  std::size_t nbytes;
  Queue* owner;
  std::mutex mutex;
  std::set<Queue*> used_on;
};

// Freed memory is kept for a while, so that late readers find NaNs.
inline void retire(void* memory, std::size_t nbytes) {
  static std::mutex mutex;
  static auto* kept = new std::deque<std::pair<void*, std::size_t>>;
  static std::size_t kept_bytes = 0;
  std::lock_guard lock(mutex);
  kept->emplace_back(memory, nbytes);
  kept_bytes += nbytes;
  while (kept_bytes > kQuarantineBytes && kept->size() > 1) {
    std::free(kept->front().first);
    kept_bytes -= kept->front().second;
    kept->pop_front();
  }
}

struct Freed {
  void* memory;
  std::size_t nbytes;
  // Other streams must pass these before the memory is used again.
  std::vector<MarkPointer> uses;

  bool is_used() const {
    return !std::all_of(uses.begin(), uses.end(),
                        [](auto& mark) { return mark->is_set(); });
  }
};

inline std::mutex freed_mutex;

// The blocks that a stream may reuse, guarded by that mutex.
inline std::vector<Freed>& freed_of(Queue& owner) {
  static auto* all = new std::map<Queue*, std::vector<Freed>>;
  return (*all)[&owner];
}

inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  Freed freed{block->memory, block->nbytes, {}};
  held_bytes -= block->nbytes;
  for (auto* queue : block->used_on) freed.uses.push_back(queue->mark());
  std::lock_guard lock(freed_mutex);
  freed_of(*block->owner).push_back(std::move(freed));
  delete block;
}

// Allocates from the blocks that were freed on the stream.
inline void use_again(Queue& owner) {
  std::lock_guard lock(freed_mutex);
  auto& all = freed_of(owner);
  std::vector<Freed> still_used;
  for (auto& each : all) {
    if (each.is_used()) {
      still_used.push_back(std::move(each));
      continue;
    }
    owner.add([memory = each.memory, nbytes = each.nbytes] {
      fill_with_nans(memory, nbytes);
      retire(memory, nbytes);
    });
  }
  all.swap(still_used);
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t nbytes) override {
    auto device = on(-1);
    if (nbytes == 0) return {nullptr, device};
    auto& owner = current_queue(device);
    use_again(owner);
    auto* block = new Block{new_memory(nbytes), nbytes, &owner, {}, {}};
    hold(nbytes);
    return {block->memory, block, free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from,
                 std::size_t nbytes) const override {
    drain(current_queue(on(-1)));
    std::memcpy(to, from, nbytes);
  }
};

inline DeviceMemory device_memory;

inline void Guard::recordDataPtrOnStream(const c10::DataPtr& pointer,
                                         const c10::Stream& stream) const {
  if (pointer.get_deleter() != free_block) return;
  auto* block = static_cast<Block*>(pointer.get_context());
  auto* queue = &queue_of(stream);
  std::lock_guard lock(block->mutex);
  if (queue != block->owner) block->used_on.insert(queue);
}

// The contents of the storage are copied, on the stream.
inline void resize_storage(const c10::Storage& storage, std::size_t nbytes) {
  auto old = storage.nbytes();
  auto fresh = device_memory.allocate(nbytes);
  launch(
      current_queue(storage.device()),
      [to = fresh.get(), from = storage.data(), count = std::min(old, nbytes)] {
        if (count) std::memcpy(to, from, count);
      });
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(nbytes);
}

// Memory of the host that streams may copy to and from while the caller continues.
class PinnedMemory final : public c10::Allocator {
 public:
  static PinnedMemory& all() {
    static auto* made = new PinnedMemory;
    return *made;
  }

  c10::DataPtr allocate(std::size_t nbytes) override {
    if (nbytes == 0) return {nullptr, c10::DeviceType::CPU};
    void* memory = new_memory(nbytes);
    std::lock_guard lock(mutex_);
    ranges_[reinterpret_cast<std::uintptr_t>(memory)] = nbytes;
    return {memory, memory, free_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_pinned; }
  void copy_data(void* to, const void* from,
                 std::size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  bool holds(const void* pointer) {
    auto address = reinterpret_cast<std::uintptr_t>(pointer);
    std::lock_guard lock(mutex_);
    auto next = ranges_.upper_bound(address);
    return next != ranges_.begin() &&
           address < std::prev(next)->first + std::prev(next)->second;
  }

 private:
  static void free_pinned(void* memory) {
    std::lock_guard lock(all().mutex_);
    all().ranges_.erase(reinterpret_cast<std::uintptr_t>(memory));
    std::free(memory);
  }

  std::mutex mutex_;
  std::map<std::uintptr_t, std::size_t> ranges_;  // by their first address
};

}  // namespace later

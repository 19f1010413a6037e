#include "memory.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

extern "C" char __data_start;  // of this program's static words, by the linker
extern "C" char _end;

namespace paceline::schedules {
namespace {

constexpr size_t kBytes = size_t{64} << 20;
std::byte* const memory = static_cast<std::byte*>(
    mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
char* first_statics = nullptr;
std::byte* first_kept = nullptr;
size_t kept = 0;
size_t used = 0;
bool uses_own = false;

bool is_own(const void* pointer) {
  return pointer >= memory && pointer < memory + kBytes;
}

void* allocate(size_t bytes, size_t alignment) {
  if (!uses_own) {
    void* pointer = std::aligned_alloc(
        alignment, (bytes + alignment - 1) / alignment * alignment +
                       (bytes == 0 ? alignment : 0));
    if (pointer == nullptr) std::abort();
    return pointer;
  }
  used = (used + alignment - 1) / alignment * alignment;
  void* pointer = memory + used;
  used += bytes;
  if (used > kBytes) std::abort();
  return pointer;
}

void release(void* pointer, size_t bytes) {
  if (!is_own(pointer)) return std::free(pointer);
  memset(pointer, 0xdd, bytes);
}

}  // namespace

void use_own_memory(bool use) { uses_own = use; }
void forget_memory() { used = kept; }
void keep_memory() { kept = used; }

void renew_statics() {
  const auto bytes = static_cast<size_t>(&_end - &__data_start);
  if (first_statics == nullptr) {
    first_statics = static_cast<char*>(std::malloc(bytes));
    first_kept = static_cast<std::byte*>(std::malloc(kept + 1));
    memcpy(first_statics, &__data_start, bytes);
    memcpy(first_kept, memory, kept);
  }
  memcpy(&__data_start, first_statics, bytes);
  memcpy(memory, first_kept, kept);
}

bool is_static(const void* word) {
  const auto* at = static_cast<const char*>(word);
  return at >= &__data_start && at < &_end;
}

LastingMemory::LastingMemory() : used_own_(uses_own) { uses_own = false; }
LastingMemory::~LastingMemory() { uses_own = used_own_; }

}  // namespace paceline::schedules

using paceline::schedules::allocate;
using paceline::schedules::release;

void* operator new(size_t bytes) { return allocate(bytes, 16); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes) { return allocate(bytes, 16); }
void operator delete(void* pointer) noexcept { release(pointer, 0); }
void operator delete(void* pointer, size_t bytes) noexcept {
  release(pointer, bytes);
}
void operator delete(void* pointer, std::align_val_t) noexcept {
  release(pointer, 0);
}
void operator delete(void* pointer, size_t bytes, std::align_val_t) noexcept {
  release(pointer, bytes);
}
void operator delete[](void* pointer) noexcept { release(pointer, 0); }
void operator delete[](void* pointer, size_t bytes) noexcept {
  release(pointer, bytes);
}

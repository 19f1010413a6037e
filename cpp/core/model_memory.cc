#include "core/model_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "core/failure.h"
#include "core/region.h"

namespace paceline {
namespace {

SignalSafeList<ModelMemory*> memories;
Atomic<void (*)()> stray_write_listener{nullptr};

[[noreturn]] void no_memory(const char* what, int error) {
  throw Failure{.reason = Reason::kNoMemory,
                .message = std::string(what) + ": " + strerror(error),
                .error_number = error};
}

}  // namespace

int ModelMemory::create(size_t bytes) {
  const size_t page = page_bytes();
  const size_t whole = (std::max<size_t>(bytes, 1) + page - 1) / page * page;
  Region::check_memory(whole);  // before there is anything to free
  return Region::create(whole);
}

ModelMemory::ModelMemory(int fd) : fork_generation_(fork_generation()) {
  struct stat status;
  if (fstat(fd, &status) != 0) no_memory("fstat of a model's memory", errno);
  size_ = static_cast<size_t>(status.st_size);
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (own < 0) no_memory("duplicating a model's descriptor", errno);
  file_ = Descriptor::of(own);
  void* const writable =
      mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
  void* const values = writable == MAP_FAILED ? MAP_FAILED
                                              : mmap(nullptr, size_, PROT_READ,
                                                     MAP_SHARED, own, 0);
  if (values == MAP_FAILED) {
    const int error = errno;
    if (writable != MAP_FAILED) munmap(writable, size_);
    close(own);
    no_memory("mapping a model's memory", error);
  }
  writable_ = static_cast<std::byte*>(writable);
  values_ = static_cast<std::byte*>(values);
  // Only advice: where a kernel refuses it, a forked child could write, too.
  madvise(writable_, size_, MADV_DONTFORK);
  entry_ = memories.put(this);
}

ModelMemory::~ModelMemory() {
  memories.take_out(entry_);
  munmap(values_, size_);
  // A forked child has no `writable`: something else may lie there.
  if (fork_generation_ == fork_generation()) munmap(writable_, size_);
  file_.close();
}

void ModelMemory::reserve_share(size_t index, size_t count) {
  const size_t page = page_bytes();
  const auto begin_of = [&](size_t share) {
    return size_ / page * share / count * page;
  };
  if (begin_of(index) == begin_of(index + 1)) return;
  if (!file_.is_ours()) no_memory("reserving a model's memory", EBADF);
  Region::reserve_in(file_.number, begin_of(index),
                     begin_of(index + 1) - begin_of(index));
}

bool ModelMemory::map_values(Mode mode) noexcept {
  const bool is_reading = mode == kReading;
  // In one step, for threads of this process that read there at the same time.
  void* const mapped =
      mmap(values_, size_, is_reading ? PROT_READ : PROT_READ | PROT_WRITE,
           (is_reading ? MAP_SHARED : MAP_PRIVATE | MAP_NORESERVE) | MAP_FIXED,
           file_.number, 0);
  if (mapped == MAP_FAILED) return false;
  mode_.store(mode, std::memory_order_relaxed);
  return true;
}

void ModelMemory::begin_writing() {
  if (!file_.is_ours()) no_memory("opening a model's memory", EBADF);
  if (!map_values(kWriting)) no_memory("opening a model's memory", errno);
}

std::vector<ModelMemory::Run> ModelMemory::changes() const {
  std::vector<Run> runs;
  if (mode_.load(std::memory_order_relaxed) != kWriting) return runs;
  const size_t page = page_bytes();
  for (size_t at = 0; at < size_; at += page) {
    if (memcmp(values_ + at, writable_ + at, page) == 0) continue;
    if (!runs.empty() && runs.back().begin + runs.back().bytes == at)
      runs.back().bytes += page;
    else
      runs.push_back({at, page});
  }
  return runs;
}

void ModelMemory::publish(const std::vector<Run>& changes) {
  for (const Run& run : changes)
    memcpy(writable_ + run.begin, values_ + run.begin, run.bytes);
}

void ModelMemory::end_writing() {
  if (!file_.is_ours()) no_memory("closing a model's memory", EBADF);
  if (!map_values(kReading)) no_memory("closing a model's memory", errno);
}

int64_t ModelMemory::take_stray_write() {
  if (mode_.load(std::memory_order_relaxed) != kStrayed) return -1;
  const auto at =
      static_cast<int64_t>(stray_at_.load(std::memory_order_relaxed));
  end_writing();
  return at;
}

bool allow_stray_write(const void* address) {
  void (*const listener)() =
      stray_write_listener.load(std::memory_order_relaxed);
  const auto* at = static_cast<const std::byte*>(address);
  bool is_allowed = false;
  memories.visit([&](ModelMemory* memory) {
    if (at < memory->values_ || at >= memory->values_ + memory->size_) return;
    if (memory->mode_.load(std::memory_order_relaxed) !=
        ModelMemory::kReading) {
      is_allowed = true;  // another thread has just mapped the pages: try again
    } else if (listener != nullptr && memory->file_.is_ours()) {
      memory->stray_at_.store(static_cast<uint64_t>(at - memory->values_),
                              std::memory_order_relaxed);
      is_allowed = memory->map_values(ModelMemory::kStrayed);
      if (is_allowed) listener();
    }
    if (!is_allowed) {
      constexpr char kText[] =
          "paceline: this process wrote to a parameter that all ranks of the "
          "host share (share_parameters=True, or share()), outside of "
          "`with ddp.writing():`.\n";
      [[maybe_unused]] const ssize_t written =
          write(STDERR_FILENO, kText, sizeof(kText) - 1);
    }
  });
  return is_allowed;
}

void forget_walkers_of_models() { memories.forget_walkers(); }

void set_stray_write_listener(void (*listener)()) {
  stray_write_listener.store(listener, std::memory_order_relaxed);
}

}  // namespace paceline

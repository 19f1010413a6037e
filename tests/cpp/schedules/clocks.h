// Happens-before by vector clocks: finds plain memory that two ranks touch
// without an acquire that pairs with a release between them.
//
// A schedule runs its operations one after the other, so a word that was
// published too weakly still has its value here; the clocks know that it may
// lack it on a real machine. The clocks watch the memcpy, memset and reduction
// kernels in the shared region.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "scheduled_atomic.h"

namespace paceline::schedules {

class Clocks {
 public:
  static constexpr int kMostFibers = 24;
  static constexpr int kMostRanks = 4;

  void watch(const std::byte* region, size_t bytes) {
    region_ = region;
    pieces_.resize(bytes / kPieceBytes + 1);
  }
  void reset() {
    ++generation_;
    for (int f = 0; f < kMostFibers; ++f) {
      of_fiber_[f].fill(0);
      of_fiber_[f][f] = 1;
    }
  }

  void operation(int fiber, const void* word, Operation operation,
                 std::memory_order order) {
    Clock& own = of_fiber_[fiber];
    Clock& published = of_word(word);
    const bool acquires = order != std::memory_order_relaxed &&
                          order != std::memory_order_release &&
                          operation != Operation::kStore;
    const bool releases = order != std::memory_order_relaxed &&
                          order != std::memory_order_acquire &&
                          operation != Operation::kLoad;
    if (acquires) join(own, published);
    if (operation == Operation::kStore) published.fill(0);
    if (!releases) return;
    join(published, own);
    ++own[fiber];
  }
  /// All that `before` did happens before the next operation of `after`: a
  /// thread that is started or has ended.
  void order(int before, int after) {
    join(of_fiber_[after], of_fiber_[before]);
    ++of_fiber_[before][before];
  }
  /// The kernel writes the word for a fiber that it has ended.
  void publish(int fiber, const void* word) {
    join(of_word(word), of_fiber_[fiber]);
  }

  struct Race {
    size_t offset;
    int other_fiber;
    bool other_wrote;
  };
  /// `fiber` runs the program of `rank`.
  std::optional<Race> read(int fiber, int rank, const void* from,
                           size_t bytes) {
    return visit(from, bytes, [&](Piece& piece) -> int {
      if (!is_known(fiber, piece.writer, piece.written)) return piece.writer;
      piece.read[rank] = of_fiber_[fiber][fiber];
      piece.reader[rank] = static_cast<int8_t>(fiber);
      return kNobody;
    });
  }
  std::optional<Race> write(int fiber, const void* to, size_t bytes) {
    return visit(to, bytes, [&](Piece& piece) -> int {
      if (!is_known(fiber, piece.writer, piece.written)) return piece.writer;
      for (int r = 0; r < kMostRanks; ++r) {
        if (!is_known(fiber, piece.reader[r], piece.read[r]))
          return kReader + piece.reader[r];
      }
      piece.writer = static_cast<int8_t>(fiber);
      piece.written = of_fiber_[fiber][fiber];
      return kNobody;
    });
  }

 private:
  using Clock = std::array<uint32_t, kMostFibers>;
  static constexpr size_t kPieceBytes = 16;
  static constexpr size_t kWords = 1 << 12;
  static constexpr int kNobody = -1;
  static constexpr int kReader = 1000;
  struct Word {
    const void* word = nullptr;
    uint64_t generation = 0;
    Clock published{};
  };
  struct Piece {
    uint32_t generation = 0;
    uint32_t written = 0;
    uint32_t read[kMostRanks] = {};
    int8_t reader[kMostRanks] = {};
    int8_t writer = 0;
  };

  static void join(Clock& into, const Clock& from) {
    for (int f = 0; f < kMostFibers; ++f) into[f] = std::max(into[f], from[f]);
  }
  bool is_known(int fiber, int other, uint32_t time) const {
    return of_fiber_[fiber][other] >= time;
  }
  Clock& of_word(const void* word) {
    size_t at = (reinterpret_cast<uintptr_t>(word) >> 2) * 0x9e3779b97f4a7c15 >>
                (64 - 12);
    while (words_[at].generation == generation_ && words_[at].word != word)
      at = (at + 1) % kWords;
    if (words_[at].generation != generation_) {
      words_[at].word = word;
      words_[at].generation = generation_;
      words_[at].published.fill(0);
    }
    return words_[at].published;
  }
  template <class Visit>
  std::optional<Race> visit(const void* address, size_t bytes, Visit visit) {
    const size_t begin =
        static_cast<size_t>(static_cast<const std::byte*>(address) - region_);
    if (bytes == 0 || begin >= pieces_.size() * kPieceBytes)
      return std::nullopt;
    for (size_t p = begin / kPieceBytes;
         p <= (begin + bytes - 1) / kPieceBytes && p < pieces_.size(); ++p) {
      Piece& piece = pieces_[p];
      if (piece.generation != static_cast<uint32_t>(generation_))
        piece = {.generation = static_cast<uint32_t>(generation_)};
      const int other = visit(piece);
      if (other != kNobody) {
        return Race{p * kPieceBytes, other % kReader, other < kReader};
      }
    }
    return std::nullopt;
  }

  uint64_t generation_ = 0;
  std::array<Clock, kMostFibers> of_fiber_{};
  std::vector<Word> words_{kWords};
  const std::byte* region_ = nullptr;
  std::vector<Piece> pieces_;
};

}  // namespace paceline::schedules

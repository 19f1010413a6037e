// Messages between two ranks: rings of bytes in the sender's outbox, which
// either end moves on whenever it makes a call or waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/atomics.h"
#include "core/mapping.h"

namespace paceline {

using TransferId = uint64_t;

/// Precedes every message in its ring.
struct MessageHeader {
  uint64_t bytes;
  uint64_t tag;
};

/// The messages that this rank has started and not finished. Starting never
/// blocks. Every wait of the group moves all of them on, so that two ranks that
/// both send before they receive cannot deadlock.
class MessageRings {
 public:
  explicit MessageRings(const Mapping& mapping) : mapping_(mapping) {}

  TransferId start(std::byte* data, size_t bytes, int peer, uint64_t tag,
                   bool sends);
  void advance_all();
  bool is_finished(TransferId id);
  /// Forgets a finished transfer; throws its error if it has one.
  void collect(TransferId id);
  /// Forgets a transfer if it is finished or `is_over`: its memory is not
  /// accessed from then on. False: it is still in progress.
  bool forget(TransferId id, bool is_over);
  /// A rank whose next message has this tag and for which no receive was
  /// started; -1: none. Begins after the rank that it found last, so that no
  /// sender is passed over for ever.
  int source_of_waiting(uint64_t tag);
  /// The rank for which an unfinished transfer waits.
  int peer_of(TransferId id);

 private:
  struct Transfer {
    std::byte* data;
    size_t bytes;
    int peer;
    uint64_t tag;
    bool sends;
    size_t moved = 0;
    bool header_moved = false;
    /// The message does not fit: read and discard it, then raise.
    bool is_drained_only = false;
    size_t incoming_bytes = 0;
    bool finished = false;
    uint64_t got_tag = 0;
  };
  using Queue = std::deque<std::shared_ptr<Transfer>>;

  bool advance(Transfer& transfer);
  bool advance_send(Transfer& transfer);
  bool advance_receive(Transfer& transfer);
  void ring(int peer);
  void reserve_outbox(int peer);

  const Mapping& mapping_;
  std::mutex mutex_;
  TransferId next_id_ = 1;
  std::unordered_map<TransferId, std::shared_ptr<Transfer>> started_;
  /// The queues of each peer: sends to it at 2 * peer, receives from it at
  /// 2 * peer + 1.
  std::unordered_map<int, Queue> queues_;
  std::vector<bool> outbox_reserved_;
  Atomic<size_t> unfinished_{0};
  int last_source_ = 0;  ///< the last result of source_of_waiting()
};

}  // namespace paceline

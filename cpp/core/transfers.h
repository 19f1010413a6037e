// Messages between two ranks: rings of bytes in the sender's outbox, moved on
// whenever either end looks.
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

/// Leads every message in its ring.
struct MessageHeader {
  uint64_t bytes;
  uint64_t tag;
};

/// The messages that this rank has started and not finished. Starting never
/// blocks; every wait of the group moves all of them on, so that two ranks that
/// both send before they receive can't deadlock.
class Transfers {
 public:
  explicit Transfers(const Mapping& mapping) : mapping_(mapping) {}

  TransferId start(std::byte* data, size_t bytes, int peer, uint64_t tag,
                   bool sends);
  void advance_all();
  bool is_finished(TransferId id);
  /// Forgets a finished transfer; throws what went wrong with it.
  void collect(TransferId id);
  /// Forgets a transfer that is finished, or, when `is_over`, any: its memory
  /// is not touched from then on. False: it is still under way.
  bool forget(TransferId id, bool is_over);
  /// A rank whose next message has this tag and no receive that was started for
  /// it; -1: none. Looks behind the rank found last first, so that no sender is
  /// passed over for ever.
  int source_of_waiting(uint64_t tag);
  /// Whom an unfinished transfer waits for.
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
    /// The message does not fit: read it away, then raise.
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
  int last_source_ = 0;  ///< that source_of_waiting() found
};

}  // namespace paceline

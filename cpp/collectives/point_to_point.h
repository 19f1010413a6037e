// Messages between two ranks: started in order per pair, finished by wait().
//
// Steps and bytes: the sender copies a header of 16 bytes and the message to
// its outbox for the receiver, a ring of kOutboxBytes, as far as there is room.
// The receiver copies it out and frees the room. Each byte is written twice and
// read twice. Transfers move on whenever either end makes a call or waits
// (core/message_rings.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/message_rings.h"
#include "core/session.h"

namespace paceline {

class PointToPoint {
 public:
  explicit PointToPoint(Session& session)
      : session_(session), message_rings_(session.message_rings()) {}
  PointToPoint(const PointToPoint&) = delete;
  PointToPoint& operator=(const PointToPoint&) = delete;

  /// These two never block.
  TransferId start_send(const void* data, size_t bytes, int destination,
                        uint64_t tag);
  TransferId start_receive(void* data, size_t bytes, int source, uint64_t tag);
  bool test(TransferId id);
  void wait(TransferId id, double timeout_s);
  /// A rank that has sent a message with this tag for which no receive was
  /// started; -1: none.
  int source_of_waiting(uint64_t tag);
  /// Blocks until there is such a rank.
  int wait_for_source(uint64_t tag, double timeout_s);
  /// Drops a transfer for which no thread will wait. False: it is in progress,
  /// and its memory must stay. Never blocks, never throws.
  bool forget(TransferId id);

 private:
  /// Different on each rank: a message concerns two ranks, and each waits for
  /// the other.
  uint64_t place_of_wait() const {
    return wait_place(WaitKind::kMessage,
                      static_cast<uint64_t>(session_.rank()));
  }

  Session& session_;
  MessageRings& message_rings_;
};

}  // namespace paceline

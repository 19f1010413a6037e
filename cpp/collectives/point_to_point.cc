#include "collectives/point_to_point.h"

#include <string>

#include "core/failure.h"
#include "core/wait.h"

namespace paceline {

TransferId PointToPoint::start_send(const void* data, size_t bytes,
                                    int destination, uint64_t tag) {
  session_.check_usable();
  if (destination == session_.rank() || destination < 0 ||
      destination >= session_.world()) {
    misuse("send to rank " + std::to_string(destination) + " of " +
           std::to_string(session_.world()));
  }
  // A send only reads the array.
  auto* unchanged = static_cast<std::byte*>(const_cast<void*>(data));
  return message_rings_.start(unchanged, bytes, destination, tag, true);
}

TransferId PointToPoint::start_receive(void* data, size_t bytes, int source,
                                       uint64_t tag) {
  session_.check_usable();
  if (source == session_.rank() || source < 0 || source >= session_.world()) {
    misuse("receive from rank " + std::to_string(source) + " of " +
           std::to_string(session_.world()));
  }
  return message_rings_.start(static_cast<std::byte*>(data), bytes, source, tag,
                              false);
}

bool PointToPoint::test(TransferId id) {
  if (!session_.is_forked()) {
    message_rings_.advance_all();
    // Before the check of the group: a message that has arrived counts, even if
    // its sender has died or raised since.
    if (message_rings_.is_finished(id)) return true;
  }
  session_.check_usable();
  return false;
}

void PointToPoint::wait(TransferId id, double timeout_s) {
  if (!message_rings_.is_finished(id)) {
    session_.check_usable();
    RankLine& own = session_.mapping().own_line();
    const int peer = message_rings_.peer_of(id);
    try {
      session_.wait_until(
          place_of_wait(), own.bell, own.bell_sleepers,
          session_.timeout_ns(timeout_s),
          [&] {
            message_rings_.advance_all();
            return message_rings_.is_finished(id);
          },
          [&](int r) { return r == peer; });
    } catch (const Failure&) {
      // The caller may now free the array, so another thread of this rank must
      // not go on filling it.
      message_rings_.forget(id, true);
      throw;
    }
  }
  message_rings_.collect(id);
}

int PointToPoint::source_of_waiting(uint64_t tag) {
  session_.check_usable();
  message_rings_.advance_all();
  return message_rings_.source_of_waiting(tag);
}

int PointToPoint::wait_for_source(uint64_t tag, double timeout_s) {
  session_.check_usable();
  RankLine& own = session_.mapping().own_line();
  const auto has_left = [&](int r) {
    // Acquire: its last message is seen; pairs with LivenessThread::let_go().
    return session_.line(r).life.load(std::memory_order_acquire) == kLifeLeft;
  };
  int source = -1;
  session_.wait_until(
      place_of_wait(), own.bell, own.bell_sleepers,
      session_.timeout_ns(timeout_s),
      [&] {
        source = message_rings_.source_of_waiting(tag);
        return source >= 0;
      },
      // A rank that has left is to blame only if all others have left, too.
      [&](int r) {
        if (!has_left(r)) return true;
        for (int other = 0; other < session_.world(); ++other)
          if (other != session_.rank() && !has_left(other)) return false;
        return true;
      });
  return source;
}

bool PointToPoint::forget(TransferId id) {
  if (session_.is_forked()) return true;
  return message_rings_.forget(id, session_.is_closed() || session_.is_over());
}

}  // namespace paceline

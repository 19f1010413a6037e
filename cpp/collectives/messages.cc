#include "collectives/messages.h"

#include <string>

#include "core/failure.h"
#include "core/wait.h"

namespace paceline {

TransferId Messages::start_send(const void* data, size_t bytes, int destination,
                                uint64_t tag) {
  session_.check_usable();
  if (destination == session_.rank() || destination < 0 ||
      destination >= session_.world()) {
    misuse("send to rank " + std::to_string(destination) + " of " +
           std::to_string(session_.world()));
  }
  // A send only reads the array.
  auto* unchanged = static_cast<std::byte*>(const_cast<void*>(data));
  return transfers_.start(unchanged, bytes, destination, tag, true);
}

TransferId Messages::start_receive(void* data, size_t bytes, int source,
                                   uint64_t tag) {
  session_.check_usable();
  if (source == session_.rank() || source < 0 || source >= session_.world()) {
    misuse("receive from rank " + std::to_string(source) + " of " +
           std::to_string(session_.world()));
  }
  return transfers_.start(static_cast<std::byte*>(data), bytes, source, tag,
                          false);
}

bool Messages::test(TransferId id) {
  if (!session_.is_forked()) {
    transfers_.advance_all();
    // Before the check of the group: a message that has arrived counts, even if
    // its sender has died or raised since.
    if (transfers_.is_finished(id)) return true;
  }
  session_.check_usable();
  return false;
}

void Messages::wait(TransferId id, double timeout_s) {
  if (!transfers_.is_finished(id)) {
    session_.check_usable();
    RankLine& own = session_.mapping().own_line();
    const int peer = transfers_.peer_of(id);
    try {
      session_.wait_until(
          place_of_wait(), own.bell, own.bell_sleepers,
          session_.timeout_ns(timeout_s),
          [&] {
            transfers_.advance_all();
            return transfers_.is_finished(id);
          },
          [&](int r) { return r == peer; });
    } catch (const Failure&) {
      // The caller may now free the array, so another thread of this rank must
      // not go on filling it.
      transfers_.forget(id, true);
      throw;
    }
  }
  transfers_.collect(id);
}

int Messages::source_of_waiting(uint64_t tag) {
  session_.check_usable();
  transfers_.advance_all();
  return transfers_.source_of_waiting(tag);
}

int Messages::wait_for_source(uint64_t tag, double timeout_s) {
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
        source = transfers_.source_of_waiting(tag);
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

bool Messages::forget(TransferId id) {
  if (session_.is_forked()) return true;
  return transfers_.forget(id, session_.is_closed() || session_.is_over());
}

}  // namespace paceline

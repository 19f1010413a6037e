#include "core/message_rings.h"

#include <string.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/failure.h"
#include "core/faults.h"
#include "core/futex.h"

namespace paceline {
namespace {

// Copies between flat memory and a ring of kOutboxBytes, wrapping at its end.
void ring_write(std::byte* outbox, uint64_t at, const void* from,
                size_t bytes) {
  const size_t start = at % kOutboxBytes;
  const size_t first = std::min(bytes, kOutboxBytes - start);
  memcpy(outbox + start, from, first);
  memcpy(outbox, static_cast<const std::byte*>(from) + first, bytes - first);
}

void ring_read(const std::byte* outbox, uint64_t at, void* to, size_t bytes) {
  const size_t start = at % kOutboxBytes;
  const size_t first = std::min(bytes, kOutboxBytes - start);
  memcpy(to, outbox + start, first);
  memcpy(static_cast<std::byte*>(to) + first, outbox, bytes - first);
}

int queue_key(int peer, bool sends) { return 2 * peer + (sends ? 0 : 1); }

}  // namespace

TransferId MessageRings::start(std::byte* data, size_t bytes, int peer,
                               uint64_t tag, bool sends) {
  TransferId id;
  {
    const std::lock_guard lock(mutex_);
    if (sends) reserve_outbox(peer);
    auto transfer = std::make_shared<Transfer>();
    transfer->data = data;
    transfer->bytes = bytes;
    transfer->peer = peer;
    transfer->tag = tag;
    transfer->sends = sends;
    id = next_id_++;
    queues_[queue_key(peer, sends)].push_back(transfer);
    started_.emplace(id, std::move(transfer));
    unfinished_.fetch_add(1, std::memory_order_relaxed);
  }
  advance_all();
  return id;
}

void MessageRings::advance_all() {
  if (unfinished_.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard lock(mutex_);
  for (auto& [key, queue] : queues_) {
    while (!queue.empty() && advance(*queue.front())) {
      queue.front()->finished = true;
      queue.pop_front();
      unfinished_.fetch_sub(1, std::memory_order_relaxed);
    }
  }
}

bool MessageRings::is_finished(TransferId id) {
  const std::lock_guard lock(mutex_);
  const auto found = started_.find(id);
  return found == started_.end() || found->second->finished;
}

int MessageRings::source_of_waiting(uint64_t tag) {
  const std::lock_guard lock(mutex_);
  for (int i = 1; i <= mapping_.world(); ++i) {
    const int source = (last_source_ + i) % mapping_.world();
    if (source == mapping_.rank()) continue;
    const auto queue = queues_.find(queue_key(source, false));
    if (queue != queues_.end() && !queue->second.empty()) continue;
    Channel& channel = mapping_.channel(source, mapping_.rank());
    const uint64_t at = channel.read.load(std::memory_order_relaxed);
    // Acquire: pairs with the release in advance_send(), which publishes a
    // complete header.
    if (channel.written.load(std::memory_order_acquire) == at) continue;
    MessageHeader header;
    ring_read(mapping_.slab(source) + Layout::outbox_at(mapping_.rank()), at,
              &header, sizeof(header));
    if (header.tag != tag) continue;
    last_source_ = source;
    return source;
  }
  return -1;
}

int MessageRings::peer_of(TransferId id) {
  const std::lock_guard lock(mutex_);
  const auto found = started_.find(id);
  return found == started_.end() ? -1 : found->second->peer;
}

void MessageRings::collect(TransferId id) {
  std::shared_ptr<Transfer> transfer;
  {
    const std::lock_guard lock(mutex_);
    const auto found = started_.find(id);
    if (found == started_.end()) return;
    transfer = std::move(found->second);
    started_.erase(found);
  }
  if (transfer->is_drained_only) {
    throw Failure{
        .reason = Reason::kMismatch,
        .culprit = transfer->peer,
        .message = "receive from rank " + std::to_string(transfer->peer) +
                   " expected " + std::to_string(transfer->bytes) +
                   " bytes with tag " + std::to_string(transfer->tag) +
                   " and got " + std::to_string(transfer->incoming_bytes) +
                   " bytes with tag " + std::to_string(transfer->got_tag)};
  }
}

bool MessageRings::forget(TransferId id, bool is_over) {
  const std::lock_guard lock(mutex_);
  const auto found = started_.find(id);
  if (found == started_.end()) return true;
  const std::shared_ptr<Transfer> transfer = found->second;
  if (!transfer->finished) {
    if (!is_over) return false;
    Queue& queue = queues_[queue_key(transfer->peer, transfer->sends)];
    std::erase(queue, transfer);
    unfinished_.fetch_sub(1, std::memory_order_relaxed);
  }
  started_.erase(found);
  return true;
}

bool MessageRings::advance(Transfer& transfer) {
  return transfer.sends ? advance_send(transfer) : advance_receive(transfer);
}

// Moves as much as the ring has room for; true when the whole message is in it.
bool MessageRings::advance_send(Transfer& transfer) {
  Channel& channel = mapping_.channel(mapping_.rank(), transfer.peer);
  std::byte* outbox =
      mapping_.slab(mapping_.rank()) + Layout::outbox_at(transfer.peer);
  // Relaxed: only this rank writes `written`. Acquire on `read`: the receiver
  // has read the bytes before; pairs with advance_receive().
  const uint64_t begin = channel.written.load(std::memory_order_relaxed);
  uint64_t at = begin;
  size_t room =
      kOutboxBytes -
      static_cast<size_t>(at - channel.read.load(std::memory_order_acquire));
  if (!transfer.header_moved) {
    if (room < sizeof(MessageHeader)) return false;
    const MessageHeader header{transfer.bytes, transfer.tag};
    ring_write(outbox, at, &header, sizeof(header));
    at += sizeof(header);
    room -= sizeof(header);
    transfer.header_moved = true;
  }
  const size_t bytes = std::min(room, transfer.bytes - transfer.moved);
  if (bytes > 0) {
    fault_point(Point::kSend);
    ring_write(outbox, at, transfer.data + transfer.moved, bytes);
    at += bytes;
    transfer.moved += bytes;
  }
  if (at != begin) {
    // Release: publishes the bytes before; pairs with advance_receive() and
    // source_of_waiting().
    channel.written.store(at, std::memory_order_release);
    ring(transfer.peer);
  }
  return transfer.moved == transfer.bytes;
}

// Moves what has arrived; true when the whole message was read. A message that
// does not fit is read and discarded, so that its sender and the messages
// behind it go on.
bool MessageRings::advance_receive(Transfer& transfer) {
  Channel& channel = mapping_.channel(transfer.peer, mapping_.rank());
  const std::byte* outbox =
      mapping_.slab(transfer.peer) + Layout::outbox_at(mapping_.rank());
  const uint64_t begin = channel.read.load(std::memory_order_relaxed);
  uint64_t at = begin;
  // Acquire: the bytes before `written` are there; pairs with the release in
  // advance_send().
  size_t available =
      static_cast<size_t>(channel.written.load(std::memory_order_acquire) - at);
  if (!transfer.header_moved) {
    if (available < sizeof(MessageHeader)) return false;
    MessageHeader header;
    ring_read(outbox, at, &header, sizeof(header));
    at += sizeof(header);
    available -= sizeof(header);
    transfer.header_moved = true;
    transfer.incoming_bytes = header.bytes;
    transfer.got_tag = header.tag;
    transfer.is_drained_only =
        header.bytes != transfer.bytes || header.tag != transfer.tag;
  }
  const size_t bytes =
      std::min(available, transfer.incoming_bytes - transfer.moved);
  if (bytes > 0) {
    fault_point(Point::kReceive);
    if (!transfer.is_drained_only)
      ring_read(outbox, at, transfer.data + transfer.moved, bytes);
    at += bytes;
    transfer.moved += bytes;
  }
  if (at != begin) {
    // Release: frees the bytes before; pairs with advance_send().
    channel.read.store(at, std::memory_order_release);
    ring(transfer.peer);
  }
  return transfer.moved == transfer.incoming_bytes;
}

void MessageRings::ring(int peer) {
  RankLine& line = mapping_.line(peer);
  line.bell.fetch_add(1, std::memory_order_seq_cst);
  if (line.bell_sleepers.load(std::memory_order_seq_cst) != 0)
    futex_wake(line.bell, kWakeAll);
}

void MessageRings::reserve_outbox(int peer) {
  if (outbox_reserved_.empty())
    outbox_reserved_.resize(static_cast<size_t>(mapping_.world()));
  if (outbox_reserved_[static_cast<size_t>(peer)]) return;
  mapping_.reserve(Layout::outbox_at(peer), kOutboxBytes);
  outbox_reserved_[static_cast<size_t>(peer)] = true;
}

}  // namespace paceline

// Messages between threads: sizes, order, both directions, messages that do not
// fit or cross collectives, and transfers that are never waited for.

#include <random>
#include <vector>

#include "check.h"
#include "collectives/barrier.h"
#include "group_world.h"

namespace paceline {
namespace {

using testing::failure_of;
using testing::run_group;

void send(HostGroup& group, const std::vector<uint8_t>& data, int to,
          uint64_t tag = 0) {
  group.point_to_point.wait(
      group.point_to_point.start_send(data.data(), data.size(), to, tag), -1);
}

std::vector<uint8_t> receive(HostGroup& group, size_t bytes, int from,
                             uint64_t tag = 0) {
  std::vector<uint8_t> data(bytes, 0xee);
  group.point_to_point.wait(
      group.point_to_point.start_receive(data.data(), bytes, from, tag), -1);
  return data;
}

TEST(sizes_around_the_ring) {
  run_group(2, [](HostGroup& group) {
    const int other = 1 - group.rank();
    const size_t sizes[] = {1, kOutboxBytes - 17, kOutboxBytes - 16,
                            kOutboxBytes, 3 * kOutboxBytes + 5};
    for (const size_t bytes : sizes) {
      for (const int sender : {0, 1}) {
        const std::vector<uint8_t> data(bytes, static_cast<uint8_t>(sender));
        if (group.rank() == sender)
          send(group, data, other, bytes);
        else
          CHECK(receive(group, bytes, other, bytes) == data);
      }
    }
  });
}

TEST(all_pairs_at_once_in_random_order) {
  run_group(4, [](HostGroup& group) {
    std::mt19937 random(7 + static_cast<unsigned>(group.rank()));
    constexpr size_t kBytes = 2 * kOutboxBytes + 3;
    for (int repeat = 0; repeat < 3; ++repeat) {
      std::vector<std::vector<uint8_t>> out, in;
      std::vector<TransferId> ids;
      out.reserve(4);
      in.reserve(4);
      for (int peer = 0; peer < 4; ++peer) {
        out.emplace_back(kBytes,
                         static_cast<uint8_t>(16 * group.rank() + peer));
        in.emplace_back(kBytes);
        if (peer == group.rank()) continue;
        ids.push_back(group.point_to_point.start_send(out.back().data(), kBytes,
                                                      peer, 1));
        ids.push_back(group.point_to_point.start_receive(in.back().data(),
                                                         kBytes, peer, 1));
      }
      std::shuffle(ids.begin(), ids.end(), random);
      for (const TransferId id : ids) group.point_to_point.wait(id, -1);
      for (int peer = 0; peer < 4; ++peer) {
        const std::vector<uint8_t> expected(
            kBytes, static_cast<uint8_t>(16 * peer + group.rank()));
        if (peer != group.rank())
          CHECK(in[static_cast<size_t>(peer)] == expected);
      }
    }
  });
}

TEST(many_messages_keep_their_order) {
  run_group(2, [](HostGroup& group) {
    for (size_t i = 0; i < 2000; ++i) {
      const std::vector<uint8_t> data(i % 300, static_cast<uint8_t>(i));
      if (group.rank() == 0)
        send(group, data, 1, i);
      else
        CHECK(receive(group, i % 300, 0, i) == data);
    }
  });
}

TEST(what_does_not_fit_is_dropped) {
  run_group(2, [](HostGroup& group) {
    constexpr size_t kBytes = 3 * kOutboxBytes;
    if (group.rank() == 0) {
      for (const uint64_t tag : {1, 2, 3})
        send(group, std::vector<uint8_t>(kBytes, 1), 1, tag);
      return;
    }
    const auto fails = [&](size_t bytes, uint64_t tag) {
      const Failure failure =
          failure_of([&] { receive(group, bytes, 0, tag); });
      CHECK_EQ(failure.reason, Reason::kMismatch);
      CHECK_EQ(failure.culprit, 0);
    };
    fails(kBytes - 1, 1);
    fails(kBytes, 7);
    CHECK(receive(group, kBytes, 0, 3) == std::vector<uint8_t>(kBytes, 1));
  });
}

TEST(messages_go_on_in_collectives_of_another_thread) {
  run_group(2, [](HostGroup& group) {
    constexpr size_t kBytes = 4 * kOutboxBytes;
    const std::vector<uint8_t> data(kBytes, 5);
    if (group.rank() == 0) {
      std::thread collective([&] { barrier(group.calls, -1); });
      CHECK(receive(group, kBytes, 1) == data);
      collective.join();
    } else {
      send(group, data, 0);
      barrier(group.calls, -1);
    }
  });
}

TEST(a_transfer_without_a_wait_can_be_forgotten) {
  run_group(2, [](HostGroup& group) {
    const int other = 1 - group.rank();
    constexpr size_t kBytes = 2 * kOutboxBytes;
    std::vector<uint8_t> out(kBytes, 1);
    std::vector<uint8_t> in(kBytes);
    const TransferId sent =
        group.point_to_point.start_send(out.data(), kBytes, other, 0);
    CHECK(!group.point_to_point.forget(
        sent));  // the other end has read nothing yet
    barrier(group.calls, -1);
    group.point_to_point.wait(
        group.point_to_point.start_receive(in.data(), kBytes, other, 0), -1);
    group.point_to_point.wait(sent, -1);
    CHECK(group.point_to_point.forget(sent));
    CHECK(group.point_to_point.forget(999));
    const TransferId never =
        group.point_to_point.start_receive(in.data(), kBytes, other, 0);
    CHECK(!group.point_to_point.test(never));
    CHECK(!group.point_to_point.forget(never));
    barrier(group.calls, -1);
    group.session.close();
    CHECK(
        group.point_to_point.forget(never));  // from here on `in` may be freed
  });
}

TEST(a_message_that_was_sent_before_its_sender_left_arrives) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    run_group(2, [](HostGroup& group) {
      const std::vector<uint8_t> data(1000, 3);
      if (group.rank() == 0) {
        send(group, data, 1);
        group.session.close();
      } else {
        CHECK(receive(group, 1000, 0) == data);
        CHECK_EQ(failure_of([&] { receive(group, 1, 0); }).reason,
                 Reason::kLeft);
      }
    });
  }
}

TEST(a_wrong_peer_is_refused) {
  run_group(2, [](HostGroup& group) {
    for (const int peer : {-1, 2, group.rank()}) {
      uint8_t byte = 0;
      CHECK_EQ(failure_of([&] {
                 group.point_to_point.start_send(&byte, 1, peer, 0);
               }).reason,
               Reason::kMisuse);
      CHECK_EQ(failure_of([&] {
                 group.point_to_point.start_receive(&byte, 1, peer, 0);
               }).reason,
               Reason::kMisuse);
    }
  });
}

}  // namespace
}  // namespace paceline

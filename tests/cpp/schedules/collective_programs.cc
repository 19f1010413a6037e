// Collectives, messages, and how ranks come and go.
#include <numeric>

#include "collectives/all_gather.h"
#include "collectives/all_reduce.h"
#include "collectives/all_to_all.h"
#include "collectives/barrier.h"
#include "collectives/broadcast.h"
#include "collectives/reduce_scatter.h"
#include "world.h"

namespace paceline::schedules {
namespace {

constexpr size_t kFloat = sizeof(float);
// On both sides of each limit in core/region_layout.h and
// collectives/all_reduce.h.
constexpr size_t kCounts[] = {1, kSmallBytes / kFloat, kPieceBytes / kFloat,
                              kPieceBytes / kFloat * 2 + 40};

GroupOptions options() {
  return {.timeout_s = 2, .warn_after_s = 1000, .spin_us = 0};
}

float value(int rank, size_t i, int call) {
  return 24.0f *
         static_cast<float>((rank + 1) * (call + 1) + static_cast<int>(i % 7));
}

void fill(std::span<float> array, int rank, int call) {
  note_plain_write(array.data(), array.size() * kFloat);
  for (size_t i = 0; i < array.size(); ++i) array[i] = value(rank, i, call);
}

/// One rank's calls; the same on every rank, except for the data.
struct Caller {
  Run& run;
  int rank;
  HostGroup group;
  Random shared;
  size_t in_region = 0;  ///< an array of kCounts[2] floats
  int call = 0;

  Caller(Run& a_run, int a_rank)
      : run(a_run),
        rank(a_rank),
        group(run.world.region(), rank, kNonce, options()),
        shared(run.shared_random()) {
    group.session.join();
    in_region = group.heap.allocate(kCounts[2] * kFloat, -1);
    scheduler().start();
  }

  int world() const { return group.world(); }

  void all_reduce(size_t count, bool is_inside, bool is_mean) {
    std::vector<float> outside(is_inside ? 0 : count);
    float* const data =
        is_inside
            ? reinterpret_cast<float*>(group.session.slab(rank) + in_region)
            : outside.data();
    fill({data, count}, rank, call);
    paceline::all_reduce(group.calls, data, count, DType::kFloat32,
                         is_mean ? ReduceOp::kMean : ReduceOp::kSum, 1, -1);
    note_plain_read(data, count * kFloat);
    for (size_t i = 0; i < count; ++i) {
      float sum = 0;
      for (int r = 0; r < world(); ++r) sum += value(r, i, call);
      expect(data[i] == (is_mean ? sum / static_cast<float>(world()) : sum),
             "a wrong sum");
    }
  }

  void broadcast(size_t count, int root) {
    std::vector<float> data(count);
    fill(data, rank, call);
    paceline::broadcast(group.calls, data.data(), count * kFloat, root, -1);
    for (size_t i = 0; i < count; ++i)
      expect(data[i] == value(root, i, call), "a wrong broadcast");
  }

  void all_gather(size_t count) {
    std::vector<float> in(count);
    std::vector<float> out(count * static_cast<size_t>(world()));
    fill(in, rank, call);
    paceline::all_gather(group.calls, in.data(), out.data(), count * kFloat,
                         -1);
    for (size_t i = 0; i < out.size(); ++i) {
      expect(out[i] == value(static_cast<int>(i / count), i % count, call),
             "a wrong gathering");
    }
  }

  /// Rank r owns count + r elements, the first of them in a separate chunk.
  void all_gather_pieces(size_t count) {
    std::vector<std::vector<float>> values;
    std::vector<std::vector<std::span<std::byte>>> blocks;
    for (int r = 0; r < world(); ++r) {
      std::vector<float>& block =
          values.emplace_back(count + static_cast<size_t>(r), -1.0f);
      if (r == rank) fill(block, rank, call);
      const auto bytes = std::as_writable_bytes(std::span(block));
      const size_t first = std::min(kFloat, bytes.size());
      blocks.push_back({bytes.first(first), bytes.subspan(first)});
    }
    paceline::all_gather_pieces(group.calls, blocks, -1);
    for (int r = 0; r < world(); ++r) {
      const std::vector<float>& block = values[static_cast<size_t>(r)];
      for (size_t i = 0; i < block.size(); ++i)
        expect(block[i] == value(r, i, call), "a wrong gathering of pieces");
    }
  }

  void reduce_scatter(size_t count) {
    std::vector<float> in(count * static_cast<size_t>(world()));
    std::vector<float> out(count);
    fill(in, rank, call);
    paceline::reduce_scatter(group.calls, in.data(), out.data(), count,
                             DType::kFloat32, ReduceOp::kSum, -1);
    for (size_t i = 0; i < count; ++i) {
      float sum = 0;
      for (int r = 0; r < world(); ++r)
        sum += value(r, i + count * static_cast<size_t>(rank), call);
      expect(out[i] == sum, "a wrong sum of a part");
    }
  }

  void all_to_all(size_t count) {
    const auto ranks = static_cast<size_t>(world());
    std::vector<float> in(count * ranks);
    std::vector<float> out(count * ranks);
    fill(in, rank, call);
    const std::vector<uint64_t> bytes(ranks, count * kFloat);
    paceline::all_to_all(group.calls, in.data(), bytes, out.data(), bytes, -1);
    for (size_t i = 0; i < out.size(); ++i) {
      expect(
          out[i] == value(static_cast<int>(i / count),
                          i % count + count * static_cast<size_t>(rank), call),
          "a wrong exchange");
    }
  }

  // All ranks raise, nothing was exchanged, the group stays usable.
  void mismatch(int odd_rank) {
    float data[2] = {1, 1};
    bool raised = false;
    try {
      paceline::all_reduce(group.calls, data, rank == odd_rank ? 2 : 1,
                           DType::kFloat32, ReduceOp::kSum, 1, -1);
    } catch (const Failure& failure) {
      raised = failure.reason == Reason::kMismatch;
      if (!raised) throw;
    }
    expect(raised && data[0] == 1, "calls differ, and a rank did not raise");
  }

  void allocate_and_free() {
    const size_t offset = group.heap.allocate(100, -1);
    auto* const data =
        reinterpret_cast<float*>(group.session.slab(rank) + offset);
    note_plain_read(data, 100);
    expect(data[0] == 0, "new memory is not zeroed");
    note_plain_write(data, 100);
    data[0] = 5;
    group.heap.free(offset, shared.one_in(2));
  }

  void next() {
    const size_t count = kCounts[shared.below(std::size(kCounts))];
    const size_t part = 1 + shared.below(300);
    const int root =
        static_cast<int>(shared.below(static_cast<uint64_t>(world())));
    const bool coin = shared.one_in(2);
    switch (shared.below(9)) {
      case 0:
        paceline::barrier(group.calls, -1);
        break;
      case 1:
        all_reduce(count, false, coin);
        break;
      case 2:
        all_reduce(kCounts[shared.below(3)], true, coin);
        break;
      case 3:
        broadcast(count, root);
        break;
      case 4:
        coin ? all_gather(count) : all_gather_pieces(count);
        break;
      case 5:
        reduce_scatter(part);
        break;
      case 6:
        all_to_all(part);
        break;
      case 7:
        mismatch(root);
        break;
      case 8:
        allocate_and_free();
        break;
    }
    ++call;
    ++run.outcomes[static_cast<size_t>(rank)].good_backwards;
  }
};

constexpr int kCalls = 4;

void collectives(Run& run, int index) {
  Caller caller(run, index);
  for (int i = 0; i < kCalls; ++i) caller.next();
}

void barriers(Run& run, int index) {
  Caller caller(run, index);
  for (int i = 0; i < 4; ++i) {
    paceline::barrier(caller.group.calls, -1);
    ++run.outcomes[static_cast<size_t>(index)].good_backwards;
  }
}

// The cost of an array does not depend on how many there may be.
void many_arrays(Run& run, int index) {
  static_assert(kMaxAllocations >
                40);  // otherwise scanning all of them is as cheap
  HostGroup group(run.world.region(), index, kNonce, options());
  group.session.join();
  scheduler().start();
  const auto steps_of = [](auto body) {
    const size_t before = scheduler().steps();
    body();
    return scheduler().steps() - before;
  };
  for (int round = 0; round < 2; ++round) {
    std::vector<size_t> offsets;
    for (int i = 0; i < 6; ++i) {
      expect(steps_of([&] { offsets.push_back(group.heap.allocate(1, -1)); }) <
                 2 * kMaxAllocations,
             "an allocation looks at all arrays");
    }
    for (const size_t offset : offsets) {
      // Two more whenever its compare-and-swap fails spuriously, one in eight.
      expect(steps_of([&] { group.heap.free(offset); }) < 40,
             "giving back looks at many arrays");
    }
  }
}

void come_and_leave(Run& run, int index) {
  scheduler().start();
  HostGroup group(run.world.region(), index, kNonce, options());
  group.session.join();
  if (run.shared_random().one_in(2)) paceline::barrier(group.calls, -1);
}

// One rank leaves while the others continue, which ends the group for them.
void leave_the_others(Run& run, int index) {
  HostGroup group(run.world.region(), index, kNonce, options());
  group.session.join();
  scheduler().start();
  const int leaver = static_cast<int>(
      run.shared_random().below(static_cast<uint64_t>(group.world())));
  if (index == leaver) return;
  paceline::barrier(group.calls, -1);
  scheduler().fail("a barrier was passed without the rank that had left");
}

// All ranks send to all before they receive, more than an outbox holds.
void messages(Run& run, int index) {
  HostGroup group(run.world.region(), index, kNonce, options());
  group.session.join();
  scheduler().start();
  Random shared = run.shared_random();
  const auto ranks = static_cast<size_t>(group.world());
  for (int round = 0; round < 2; ++round) {
    // Whole units of clocks.h: adjacent data counts as one there.
    const size_t count = 4 * (1 + shared.below(kOutboxBytes / 8));
    std::vector<std::vector<float>> out(ranks);
    std::vector<std::vector<float>> in(ranks);
    std::vector<TransferId> started;
    for (int r = 0; r < group.world(); ++r) {
      if (r == index) continue;
      const auto peer = static_cast<size_t>(r);
      out[peer].resize(count);
      in[peer].resize(count);
      fill(out[peer], index, round + r);
      started.push_back(group.point_to_point.start_send(out[peer].data(),
                                                        count * kFloat, r, 7));
      started.push_back(group.point_to_point.start_receive(
          in[peer].data(), count * kFloat, r, 7));
    }
    const bool has_barrier = shared.one_in(2);
    if (has_barrier) paceline::barrier(group.calls, -1);
    for (const TransferId id : started) group.point_to_point.wait(id, -1);
    for (int r = 0; r < group.world(); ++r) {
      for (size_t i = 0; r != index && i < count; ++i) {
        expect(in[static_cast<size_t>(r)][i] == value(r, i, round + index),
               "a wrong message");
      }
    }
  }
}

// Every survivor notices a death or has no more calls that need the dead.
std::string deaths_are_noticed(const Run& run) {
  for (const Outcome& outcome : run.outcomes) {
    if (outcome.has_raised && outcome.reason != Reason::kDied &&
        outcome.reason != Reason::kLeft)
      return "a survivor raised something else than a death";
  }
  return "";
}

std::string deadlines_or_nothing(const Run& run) {
  for (const Outcome& outcome : run.outcomes) {
    if (outcome.has_raised && outcome.reason != Reason::kDeadline &&
        outcome.reason != Reason::kLeft)
      return "a rank raised something else than the deadline";
  }
  return "";
}

}  // namespace

void add_collective_programs(std::vector<Program>& programs) {
  const auto add = [&](const char* name, int ranks, Events events, auto body,
                       auto judge) {
    programs.push_back({name, ranks, events, body, judge});
  };
  const Events death{.deaths = 1, .watches_races = false};
  const Events deaths{.deaths = 2, .watches_races = false};
  const Events deadline{
      .stops = 1, .time_passes = true, .watches_races = false};
  add("coming and leaving, 3 ranks", 3, {}, come_and_leave, no_rank_raises);
  // A rank that is killed between its word and its wake-ups has left, but wakes
  // no rank: the others look again by themselves, as time passes.
  add("leaving, a death, 3 ranks", 3,
      {.deaths = 1, .time_passes = true, .watches_races = false},
      leave_the_others, deaths_are_noticed);
  add("many arrays, 1 rank", 1, {}, many_arrays, no_rank_raises);
  add("collectives, 2 ranks", 2, {}, collectives, no_rank_raises);
  add("collectives, 3 ranks", 3, {}, collectives, no_rank_raises);
  add("collectives, 4 ranks, 2 cores", 4, {.cores = 2}, collectives,
      no_rank_raises);
  add("collectives, a stop, 3 ranks", 3, {.stops = 1}, collectives,
      no_rank_raises);
  add("messages, 2 ranks", 2, {}, messages, no_rank_raises);
  add("messages, 3 ranks", 3, {}, messages, no_rank_raises);
  add("collectives, a death, 3 ranks", 3, death, collectives,
      deaths_are_noticed);
  add("barriers, two deaths, 4 ranks", 4, deaths, barriers, deaths_are_noticed);
  add("messages, a death, 3 ranks", 3, death, messages, deaths_are_noticed);
  add("collectives, stopped beyond the deadline, 3 ranks", 3, deadline,
      collectives, deadlines_or_nothing);
}

}  // namespace paceline::schedules

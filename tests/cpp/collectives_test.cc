// Collectives between threads: every result, at sizes around the core's limits,
// from arrays in the region and others, in random sequences.

#include <math.h>

#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "check.h"
#include "collectives/all_gather.h"
#include "collectives/all_reduce.h"
#include "collectives/all_to_all.h"
#include "collectives/barrier.h"
#include "collectives/broadcast.h"
#include "collectives/reduce_scatter.h"
#include "group_world.h"

namespace paceline {
namespace {

using testing::run_group;

constexpr size_t kSmall = kSmallBytes / sizeof(int32_t);
constexpr size_t kSmallSum = kSmallSumBytes / sizeof(int32_t);
constexpr size_t kPiece = kPieceBytes / sizeof(int32_t);
constexpr size_t kCounts[] = {0,      1,          kSmallSum,  kSmallSum + 1,
                              kSmall, kSmall + 1, kPiece + 1, 2 * kPiece + 13};
constexpr size_t kMost = 2 * kPiece + 16;

/// The location of a call's array.
enum class Place { kPlain, kRegion, kShifted, kMixed };
constexpr Place kPlaces[] = {Place::kPlain, Place::kRegion, Place::kShifted,
                             Place::kMixed};

int32_t value_of(int rank, size_t i, int call) {
  return (rank + 1) * (static_cast<int32_t>(i % 251) + call);
}

/// One rank's memory for the arrays of its calls.
class Arrays {
 public:
  explicit Arrays(HostGroup& group)
      : group_(group), ranks_(static_cast<size_t>(group.world())) {
    const size_t bytes = (kMost * ranks_ + 64 * ranks_) * sizeof(int32_t);
    region_ = reinterpret_cast<int32_t*>(group.session.slab(group.rank()) +
                                         group.heap.allocate(bytes, -1));
    plain_.resize(kMost * ranks_ + 1);
    out_.resize(kMost * ranks_ + 1);
  }
  int32_t* at(Place place) {
    const bool is_plain = place == Place::kPlain ||
                          (place == Place::kMixed && group_.rank() != 0);
    if (is_plain) return plain_.data();
    return region_ + (place == Place::kShifted ? 64 * group_.rank() : 0);
  }
  int32_t* out() { return out_.data(); }

 private:
  HostGroup& group_;
  size_t ranks_;
  int32_t* region_;
  std::vector<int32_t> plain_;
  std::vector<int32_t> out_;
};

/// Makes one collective and checks its result.
class EveryCall {
 public:
  EveryCall(HostGroup& group, Arrays& arrays)
      : group_(group), arrays_(arrays) {}

  void all_reduce(size_t count, Place place, int call) {
    int32_t* array = filled(count, place, call);
    paceline::all_reduce(group_.calls, array, count, DType::kInt32,
                         ReduceOp::kSum, 1, -1);
    for (size_t i = 0; i < count; ++i) CHECK_EQ(array[i], sum(i, call));
  }

  void reduce(size_t count, Place place, int root, int call) {
    int32_t* array = filled(count, place, call);
    paceline::reduce(group_.calls, array, count, DType::kInt32, ReduceOp::kSum,
                     root, -1);
    for (size_t i = 0; i < count; ++i)
      CHECK_EQ(array[i], rank() == root ? sum(i, call) : own(i, call));
  }

  void reduce_scatter(size_t count, Place place, int call) {
    int32_t* in = filled(count * ranks(), place, call);
    paceline::reduce_scatter(group_.calls, in, arrays_.out(), count,
                             DType::kInt32, ReduceOp::kSum, -1);
    const size_t begin = count * static_cast<size_t>(rank());
    for (size_t i = 0; i < count; ++i)
      CHECK_EQ(arrays_.out()[i], sum(begin + i, call));
  }

  void broadcast(size_t count, Place place, int root, int call) {
    int32_t* array = filled(count, place, call);
    paceline::broadcast(group_.calls, array, count * sizeof(int32_t), root, -1);
    for (size_t i = 0; i < count; ++i)
      CHECK_EQ(array[i], value_of(root, i, call));
  }

  void gather(size_t count, Place place, int root, int call) {
    int32_t* in = filled(count, place, call);
    if (root < 0) {
      paceline::all_gather(group_.calls, in, arrays_.out(),
                           count * sizeof(int32_t), -1);
    } else {
      paceline::gather(group_.calls, in, arrays_.out(), count * sizeof(int32_t),
                       root, -1);
      if (rank() != root) return;
    }
    for (size_t r = 0; r < ranks(); ++r)
      for (size_t i = 0; i < count; ++i)
        CHECK_EQ(arrays_.out()[r * count + i],
                 value_of(static_cast<int>(r), i, call));
  }

  /// Rank r owns count / (r + 1) elements, in chunks of very different sizes.
  void gather_pieces(size_t count, int call) {
    std::vector<std::vector<std::span<std::byte>>> blocks(ranks());
    int32_t* at = arrays_.out();
    for (size_t r = 0; r < ranks(); ++r) {
      const size_t owned = count / (r + 1);
      for (size_t i = 0; i < owned; ++i)
        at[i] = r == static_cast<size_t>(rank()) ? own(i, call) : -1;
      size_t begin = 0;
      for (const size_t end : {size_t{0}, owned / 700, owned / 3, owned}) {
        blocks[r].push_back(
            std::as_writable_bytes(std::span(at + begin, end - begin)));
        begin = end;
      }
      at += owned;
    }
    paceline::all_gather_pieces(group_.calls, blocks, -1);
    at = arrays_.out();
    for (size_t r = 0; r < ranks(); ++r)
      for (size_t i = 0; i < count / (r + 1); ++i)
        CHECK_EQ(*at++, value_of(static_cast<int>(r), i, call));
  }

  void scatter(size_t count, Place place, int root, int call) {
    int32_t* in =
        rank() == root ? filled(count * ranks(), place, call) : nullptr;
    paceline::scatter(group_.calls, in, arrays_.out(), count * sizeof(int32_t),
                      root, -1);
    const size_t begin = count * static_cast<size_t>(rank());
    for (size_t i = 0; i < count; ++i)
      CHECK_EQ(arrays_.out()[i], value_of(root, begin + i, call));
  }

  /// Rank s sends count + s + d elements to rank d.
  void all_to_all(size_t count, Place place, int call) {
    std::vector<uint64_t> sends(ranks()), expects(ranks());
    const auto me = static_cast<size_t>(rank());
    for (size_t r = 0; r < ranks(); ++r)
      sends[r] = expects[r] = (count + me + r) * sizeof(int32_t);
    const size_t total =
        std::accumulate(sends.begin(), sends.end(), size_t{0}) /
        sizeof(int32_t);
    int32_t* in = filled(total, place, call);
    paceline::all_to_all(group_.calls, in, sends, arrays_.out(), expects, -1);
    const int32_t* out = arrays_.out();
    for (size_t s = 0; s < ranks(); ++s) {
      size_t begin = 0;  // of this rank's chunk in the data that rank s sends
      for (size_t d = 0; d < me; ++d) begin += count + s + d;
      for (size_t i = 0; i < count + s + me; ++i)
        CHECK_EQ(*out++, value_of(static_cast<int>(s), begin + i, call));
    }
  }

 private:
  int rank() const { return group_.rank(); }
  size_t ranks() const { return static_cast<size_t>(group_.world()); }
  int32_t own(size_t i, int call) const { return value_of(rank(), i, call); }
  int32_t sum(size_t i, int call) const {
    return value_of(group_.world() * (group_.world() + 1) / 2 - 1, i, call);
  }
  int32_t* filled(size_t count, Place place, int call) {
    int32_t* array = arrays_.at(place);
    for (size_t i = 0; i < count; ++i) array[i] = own(i, call);
    return array;
  }

  HostGroup& group_;
  Arrays& arrays_;
};

void make_call(EveryCall& calls, unsigned kind, size_t count, Place place,
               int root, int call) {
  switch (kind) {
    case 0:
      return calls.all_reduce(count, place, call);
    case 1:
      return calls.reduce(count, place, root, call);
    case 2:
      return calls.reduce_scatter(count / 2, place, call);
    case 3:
      return calls.broadcast(count, place, root, call);
    case 4:
      return calls.gather(count, place, -1, call);
    case 5:
      return calls.gather(count, place, root, call);
    case 6:
      return calls.scatter(count, place, root, call);
    case 7:
      return calls.gather_pieces(count, call);
    default:
      return calls.all_to_all(count / 2, place, call);
  }
}

TEST(every_collective_at_every_size_and_place) {
  for (const int ranks : {1, 3}) {
    run_group(ranks, [](HostGroup& group) {
      Arrays arrays(group);
      EveryCall calls(group, arrays);
      int call = 0;
      for (const size_t count : kCounts) {
        for (unsigned kind = 0; kind < 9; ++kind) {
          // The calls that copy run with one place per size, the reductions
          // with all.
          for (const Place place : kPlaces) {
            if (kind > 2 && static_cast<size_t>(place) != count % 4) continue;
            make_call(calls, kind, count, place, call % group.world(), call);
            ++call;
          }
        }
      }
    });
  }
}

void run_random_calls(int ranks, unsigned seed, int num_calls, double spin_us) {
  run_group(
      ranks,
      [&](HostGroup& group) {
        Arrays arrays(group);
        EveryCall calls(group, arrays);
        std::mt19937 shared(seed);
        std::mt19937 own(seed + 1000 + static_cast<unsigned>(group.rank()));
        constexpr size_t kFew[] = {1, 300, kSmall + 1, kPiece + 3};
        for (int call = 0; call < num_calls; ++call) {
          const unsigned kind = shared() % 9;
          const Place place = kPlaces[shared() % 4];
          const size_t count = kFew[shared() % (call % 8 == 0 ? 4 : 2)];
          const int root = static_cast<int>(shared()) & 0xff;
          if (own() % 4 == 0)
            for (unsigned i = own() % 5000; i > 0; --i) cpu_relax();
          make_call(calls, kind, count, place, root % group.world(), call);
        }
      },
      {.timeout_s = 60, .spin_us = spin_us});
}

TEST(random_sequences_of_calls) {
  run_random_calls(2, 1, 250, 20);
  run_random_calls(3, 2, 250, 0);
  run_random_calls(4, 3, 150, -1);
}

TEST(random_sequences_without_futex_waitv) {
  disable_futex_waitv(true);
  run_random_calls(3, 4, 60, 0);
  disable_futex_waitv(false);
}

TEST(weighted_mean_and_a_weight_of_zero) {
  run_group(3, [](HostGroup& group) {
    for (const size_t count : {size_t{9}, kSmall + 5, kPiece + 5}) {
      std::vector<float> array(count, group.rank() == 1 ? NAN : 8.0f);
      const double weights[] = {1, 0, 3};
      paceline::all_reduce(group.calls, array.data(), count, DType::kFloat32,
                           ReduceOp::kMean, weights[group.rank()], -1);
      for (const float each : array) CHECK_EQ(each, 8.0f);
    }
  });
}

TEST(a_hundred_and_twenty_eight_ranks_form_and_reduce) {
  run_group(kMaxRanks,
            [](HostGroup& group) {
              std::vector<int64_t> array(100, group.rank());
              paceline::all_reduce(group.calls, array.data(), array.size(),
                                   DType::kInt64, ReduceOp::kSum, 1, -1);
              for (const int64_t each : array)
                CHECK_EQ(each, int64_t{kMaxRanks} * (kMaxRanks - 1) / 2);
              std::vector<int64_t> sent(kMaxRanks, group.rank());
              std::vector<int64_t> got(kMaxRanks);
              const std::vector<uint64_t> sizes(kMaxRanks, sizeof(int64_t));
              paceline::all_to_all(group.calls, sent.data(), sizes, got.data(),
                                   sizes, -1);
              for (int r = 0; r < kMaxRanks; ++r)
                CHECK_EQ(got[static_cast<size_t>(r)], int64_t{r});
              paceline::barrier(group.calls, -1);
            },
            {.timeout_s = 110});
}

}  // namespace
}  // namespace paceline

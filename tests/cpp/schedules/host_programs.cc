// Backwards of one host among two: its ranks share memory, and each has a
// worker that publishes a peer's messages. The peers are simulated: their
// messages are computed.
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core/futex.h"
#include "reducer/host_sums.h"
#include "world.h"

namespace paceline::schedules {
namespace {

constexpr size_t kFloat = sizeof(float);
constexpr size_t kSizes[] = {40, 700, 17};
constexpr size_t kBuckets = std::size(kSizes);
constexpr size_t kBlock = 16;  ///< a cache line, where shares are cut
constexpr int kBackwards = 3;
constexpr float kGarbage = -7;

struct Share {
  size_t first;
  size_t count;
};

/// Choices that all ranks know before a schedule.
struct Setting {
  bool has_weights;
  /// The backward in which a mean is not finite for this rank.
  int overflow_backward;
  int overflow_rank;
  /// The rank whose worker learns that its peer is lost, and when: instead of a
  /// message, or after it has counted the shard, from its own sends.
  int lost_rank;
  int lost_backward;
  size_t lost_bucket;
  bool is_lost_late;

  Setting(const Run& run, bool loses_peer) {
    Random random = run.shared_random();
    const auto ranks = static_cast<uint64_t>(run.world.ranks());
    has_weights = random.one_in(2);
    overflow_backward = static_cast<int>(random.below(kBackwards));
    overflow_rank = static_cast<int>(random.below(ranks));
    lost_rank = loses_peer ? static_cast<int>(random.below(ranks)) : -1;
    lost_bucket = random.below(kBuckets);
    is_lost_late = random.one_in(2);
    // After the last backward no rank would notice it.
    lost_backward = static_cast<int>(random.below(kBackwards - is_lost_late));
  }
};

/// The gradient of a rank of either host; the other host's ranks have the
/// higher numbers.
float value(int rank, size_t bucket, size_t i, int backward) {
  return 24.0f * static_cast<float>((rank + 1) * (backward + 1) +
                                    static_cast<int>((bucket + i) % 9));
}

/// One rank, and the thread that waits for its peer's messages.
class Rank {
 public:
  Rank(Run& run, int rank, bool loses_peer)
      : setting_(run, loses_peer),
        rank_(rank),
        outcome_(run.outcomes[static_cast<size_t>(rank)]),
        own_(run.random_of(rank)),
        group_(run.world.region(), rank, kNonce,
               {.timeout_s = 2, .warn_after_s = 1000, .spin_us = 0}) {
    group_.session.join();
    std::vector<SummedBucket> buckets;
    size_t end = 0;
    for (const size_t count : kSizes) {
      const size_t begin = end;
      end = round_up(begin + count * kFloat, 64);
      buckets.push_back({begin, begin + count * kFloat, DType::kFloat32});
    }
    sums_.emplace(group_.heap, end, buckets, 2 * static_cast<size_t>(world()),
                  sizeof(uint64_t));
    fill_with_garbage();
    scheduler().start();
    worker_ = std::thread([this] { work(); });
  }
  ~Rank() { end_worker(); }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  /// As in Python: a rank that raises aborts the group of its host.
  void train() {
    try {
      for (int p = 0; p < kBackwards; ++p) backward(p);
    } catch (const Failure& failure) {
      outcome_.has_raised = true;
      outcome_.reason = failure.reason;
      group_.session.abort("gave up");
      end_worker();
      sums_->keep_buffer();
    }
  }

 private:
  int world() const { return group_.world(); }
  double weight_of(int rank) const {
    return setting_.has_weights ? 1 + rank % 3 : 1;
  }
  double total_weight() const {
    double total = 0;
    for (int r = 0; r < 2 * world(); ++r) total += weight_of(r);
    return total;
  }
  Share share(size_t bucket) const {
    const size_t blocks = (kSizes[bucket] + kBlock - 1) / kBlock;
    const auto cut = [&](int r) {
      return std::min(kSizes[bucket], blocks * static_cast<size_t>(r) /
                                          static_cast<size_t>(world()) *
                                          kBlock);
    };
    return {cut(rank_), cut(rank_ + 1) - cut(rank_)};
  }
  float* gradients(size_t bucket) {
    return reinterpret_cast<float*>(sums_->gradient_buffer() +
                                    sums_->bucket(bucket).begin);
  }
  static uint64_t report_of(int rank, int number) {
    return 1000 * static_cast<uint64_t>(number) + static_cast<uint64_t>(rank);
  }
  void write_report(int rank) {
    const uint64_t report = report_of(rank, backward_);
    memcpy(sums_->slot(static_cast<size_t>(rank)), &report, sizeof(report));
  }

  void backward(int number) {
    backward_ = number;
    launched_in_backward_ = 0;
    sums_->begin_backward(weight_of(rank_));
    size_t order[kBuckets];
    std::iota(std::begin(order), std::end(order), size_t{0});
    for (size_t i = kBuckets - 1; i > 0; --i)
      std::swap(order[i], order[own_.below(i + 1)]);
    bool posted[kBuckets] = {};
    for (const size_t bucket : order) {
      make_gradients(bucket);
      sums_->post(bucket);
      posted[bucket] = true;
      // The last one carries the results of the end of the backward.
      while (launched_in_backward_ + 1 < kBuckets &&
             posted[launched_in_backward_] &&
             sums_->is_complete(launched_in_backward_))
        launch();
    }
    while (launched_in_backward_ < kBuckets) {
      sums_->wait_complete(launched_in_backward_);
      launch();
    }
    sums_->wait_published(-1);
    ++outcome_.good_backwards;
    check();
  }

  void make_gradients(size_t bucket) {
    float* const gradient = gradients(bucket);
    note_plain_read(gradient, kSizes[bucket] * kFloat);
    for (size_t i = 0; i < kSizes[bucket]; ++i) {
      expect(gradient[i] == kGarbage,
             "a gradient was written between two backward passes");
      gradient[i] = value(rank_, bucket, i, backward_);
    }
    note_plain_write(gradient, kSizes[bucket] * kFloat);
  }

  void launch() {
    const size_t bucket = launched_in_backward_++;
    const auto [first, count] = share(bucket);
    std::vector<float>& sum = own_sums_[bucket];
    sum.resize(count);
    ReduceStats stats;
    sums_->sum(bucket, first, count, sums_->everybody(), sum.data(), &stats);
    if (bucket + 1 == kBuckets) write_report(rank_);
    // Release: the sum; pairs with work().
    launched_.fetch_add(1, std::memory_order_release);
    futex_wake(launched_, kWakeAll);
  }

  void check() {
    for (size_t b = 0; b < kBuckets; ++b) {
      const float* mean = gradients(b);
      note_plain_read(mean, kSizes[b] * kFloat);
      for (size_t i = 0; i < kSizes[b]; ++i) {
        double sum = 0;
        for (int r = 0; r < 2 * world(); ++r)
          sum += weight_of(r) * value(r, b, i, backward_);
        const double expected = sum / total_weight();
        expect(std::abs(mean[i] - expected) <= 1e-6 * expected, "a wrong mean");
      }
    }
    for (int r = 0; r < 2 * world(); ++r) {
      uint64_t report = 0;
      memcpy(&report, sums_->slot(static_cast<size_t>(r)), sizeof(report));
      expect(report == report_of(r, backward_), "a wrong report of a rank");
    }
    expect(sums_->has_overflow() == (backward_ == setting_.overflow_backward),
           "ranks disagree whether a mean is finite");
    fill_with_garbage();
  }

  void fill_with_garbage() {
    for (size_t b = 0; b < kBuckets; ++b) {
      std::fill_n(gradients(b), kSizes[b], kGarbage);
      note_plain_write(gradients(b), kSizes[b] * kFloat);
    }
  }

  // --- the worker ---

  static constexpr uint32_t kEnd = 1u << 31;

  void work() {
    try {
      for (uint32_t done = 0;; ++done) {
        uint32_t seen;
        // Acquire; pairs with launch().
        while (((seen = launched_.load(std::memory_order_acquire)) & ~kEnd) ==
               done) {
          if ((seen & kEnd) != 0) return;
          const FutexWait wait[] = {{&launched_, seen}};
          futex_wait_any(wait, INT64_MAX);
        }
        if (!publish(static_cast<int>(done / kBuckets), done % kBuckets))
          return;
      }
    } catch (const Failure&) {
      group_.session.abort("failed between hosts");
    }
  }

  bool publish(int number, size_t bucket) {
    const bool is_lost = rank_ == setting_.lost_rank &&
                         number == setting_.lost_backward &&
                         bucket == setting_.lost_bucket;
    if (is_lost && !setting_.is_lost_late) return lose_peer();
    const auto [first, count] = share(bucket);
    std::vector<float> theirs(count);
    for (size_t i = 0; i < count; ++i) {
      double sum = 0;
      for (int r = world(); r < 2 * world(); ++r)
        sum += weight_of(r) * value(r, bucket, first + i, number);
      theirs[i] = static_cast<float>(sum);
    }
    if (bucket + 1 == kBuckets) write_report(rank_ + world());
    if (count > 0) {
      sums_->publish(bucket, first, count,
                     {own_sums_[bucket].data(), theirs.data()}, total_weight());
    }
    if (number == setting_.overflow_backward && rank_ == setting_.overflow_rank)
      sums_->note_overflow();
    sums_->count_share();
    return is_lost ? lose_peer() : true;
  }

  bool lose_peer() {
    group_.session.abort("lost its peer");
    return false;
  }

  void end_worker() {
    if (!worker_.joinable()) return;
    launched_.fetch_or(kEnd, std::memory_order_release);
    futex_wake(launched_, kWakeAll);
    worker_.join();
  }

  Setting setting_;
  int rank_;
  Outcome& outcome_;
  Random own_;
  HostGroup group_;
  std::optional<HostSums> sums_;
  int backward_ = 0;
  size_t launched_in_backward_ = 0;
  std::vector<float> own_sums_[kBuckets];
  /// The number of buckets launched in all backwards, and the bit kEnd.
  Atomic<uint32_t> launched_{0};
  std::thread worker_;
};

void train(Run& run, int rank) { Rank(run, rank, false).train(); }
void train_with_a_lost_peer(Run& run, int rank) {
  Rank(run, rank, true).train();
}

std::string all_raise_and_agree(const Run& run) {
  for (const Outcome& outcome : run.outcomes) {
    if (!outcome.has_raised) return "a rank did not notice the lost peer";
  }
  return all_agree(run);
}

}  // namespace

void add_host_programs(std::vector<Program>& programs) {
  const auto add = [&](const char* name, int ranks, Events events, auto body,
                       auto judge) {
    programs.push_back({name, ranks, events, body, judge});
  };
  const Events lost{.watches_races = false};
  const Events death{.deaths = 1, .watches_races = false};
  const Events both{.deaths = 1, .stops = 1, .watches_races = false};
  const Events deadline{
      .stops = 1, .time_passes = true, .watches_races = false};
  add("hosts, 2 ranks", 2, {}, train, no_rank_raises);
  add("hosts, 3 ranks", 3, {}, train, no_rank_raises);
  add("hosts, a stop, 2 ranks", 2, {.stops = 1}, train, no_rank_raises);
  add("hosts, a lost peer, 3 ranks", 3, lost, train_with_a_lost_peer,
      all_raise_and_agree);
  add("hosts, a death, 3 ranks", 3, death, train, all_agree);
  add("hosts, a death and a stop, 3 ranks", 3, both, train, all_agree);
  add("hosts, a death and a lost peer, 3 ranks", 3, death,
      train_with_a_lost_peer, all_agree);
  add("hosts, stopped beyond the deadline, 3 ranks", 3, deadline, train,
      all_agree);
}

}  // namespace paceline::schedules

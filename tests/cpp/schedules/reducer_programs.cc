// Backwards: every verdict, every way to lose a rank.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "reducer/reducer.h"
#include "reducer_layout.h"
#include "world.h"

namespace paceline::schedules {
namespace {

constexpr size_t kSizes[] = {10, 600, 1, 256, 700};
constexpr size_t kParameters = std::size(kSizes);
constexpr int kBackwards = 3;
constexpr float kGarbage = -7;

enum class Who { kNone, kOddRank, kOthers, kAll };

/// The actions of the ranks in a backward, and the verdict that all of them
/// must reach.
struct Kind {
  Who leave_one_out = Who::kNone;  ///< of the parameters, always the same
  Who allow_it = Who::kNone;       ///< allow_unused: each rank says its own
  /// allow_globally_unused, the same on all ranks.
  bool globally_unused = false;
  Who lack_data = Who::kNone;  ///< use nothing, and allow that
  Who skip = Who::kNone;       ///< the backward of a forward
  Who go_on = Who::kNone;      ///< for two forwards, before a backward
  Who break_off = Who::kNone;  ///< by an exception, somewhere
  uint32_t verdict = 0;
  bool is_void = false;
};
using enum Who;
constexpr uint32_t kBrokenOff = kBackwardForwardsDiffer | kBackwardReported;
constexpr Kind kKinds[] = {
    {},
    {.skip = kOddRank, .verdict = kBackwardForwardsDiffer, .is_void = true},
    {.go_on = kOddRank},
    {.skip = kOddRank, .go_on = kOthers},
    {.break_off = kOddRank, .verdict = kBrokenOff, .is_void = true},
    {.break_off = kAll, .verdict = kBrokenOff, .is_void = true},
    {.lack_data = kOddRank, .verdict = kBackwardUnused | kBackwardFinished},
    {.leave_one_out = kOddRank, .verdict = kBackwardUnused, .is_void = true},
    {.leave_one_out = kOddRank, .allow_it = kAll, .verdict = kBackwardUnused},
    // Frozen on all ranks; on all but one.
    {.leave_one_out = kAll, .allow_it = kAll, .verdict = kBackwardUnused},
    {.leave_one_out = kAll,
     .allow_it = kOthers,
     .verdict = kBackwardUnused,
     .is_void = true},
    // Globally unused: frozen on all but one; where one has no data.
    {.leave_one_out = kAll,
     .globally_unused = true,
     .verdict = kBackwardGloballyUnused},
    {.leave_one_out = kAll,
     .allow_it = kOthers,
     .globally_unused = true,
     .verdict = kBackwardGloballyUnused},
    {.leave_one_out = kAll,
     .globally_unused = true,
     .lack_data = kOddRank,
     .verdict = kBackwardGloballyUnused | kBackwardFinished},
    // Not globally unused: used by one rank; left out by one rank.
    {.leave_one_out = kOthers,
     .globally_unused = true,
     .verdict = kBackwardUnused,
     .is_void = true},
    {.leave_one_out = kOddRank,
     .globally_unused = true,
     .verdict = kBackwardUnused,
     .is_void = true},
};

/// One backward, as all ranks know it beforehand.
struct Backward {
  Kind kind;
  int odd_rank = 0;
  bool has_weights = false;

  bool is_of(Who who, int rank) const {
    return who == kAll || (who == kOddRank && rank == odd_rank) ||
           (who == kOthers && rank != odd_rank);
  }
  bool has_data(int rank) const { return !is_of(kind.lack_data, rank); }
  bool uses(int rank, size_t parameter) const {
    return has_data(rank) &&
           !(parameter == 1 && is_of(kind.leave_one_out, rank));
  }
  bool allows(int rank) const {
    return is_of(kind.allow_it, rank) || !has_data(rank);
  }
};

/// How the ranks of one schedule train.
struct Setting {
  enum Backwards { kAny, kGood, kPlain };

  bool is_elsewhere;  ///< gradients lie outside of the gradient buffer
  size_t cap_bytes;   ///< of a bucket
  Backward backwards[kBackwards];

  Setting(const Run& run, Backwards which) {
    Random random = run.shared_random();
    is_elsewhere = random.one_in(2);
    cap_bytes = size_t{256} << random.below(6);
    for (Backward& backward : backwards) {
      if (which != kPlain && random.one_in(2))
        backward.kind = kKinds[random.below(std::size(kKinds))];
      if (which == kGood && backward.kind.is_void) backward.kind = {};
      backward.odd_rank = static_cast<int>(
          random.below(static_cast<uint64_t>(run.world.ranks())));
      backward.has_weights = random.one_in(4);
    }
  }
};

double weight_of(int rank, int world) {
  return world == 4 || rank + 1 < world ? 1 : world == 2 ? 3 : 2;
}

/// One rank's reducer, its gradients, and the expected means.
class Model {
 public:
  Model(HostGroup& group, const Setting& setting)
      : group_(group),
        setting_(setting),
        layout_(kSizes, setting.cap_bytes),
        reducer_(std::make_unique<Reducer>(group.heap, layout_.buffer_bytes,
                                           layout_.parameters, layout_.buckets,
                                           setting.is_elsewhere)) {
    for (const size_t count : kSizes) elsewhere_.emplace_back(count, kGarbage);
    fill_with_garbage();
  }

  Reducer& reducer() { return *reducer_; }

  void mark(size_t parameter, int backward) {
    float* const gradient = gradient_of(parameter);
    note_plain_read(gradient, kSizes[parameter] * sizeof(float));
    for (size_t i = 0; i < kSizes[parameter]; ++i) {
      expect(gradient[i] == kGarbage,
             "a gradient was written between two backward passes");
      gradient[i] = value(group_.rank(), parameter, i, backward);
    }
    note_plain_write(gradient, kSizes[parameter] * sizeof(float));
    reducer_->mark_ready(parameter, setting_.is_elsewhere ? gradient : nullptr);
  }

  /// Every gradient is the mean; `weight` is 0 if a rank left it out.
  void check(int backward, const std::function<double(int, size_t)>& weight) {
    const int world = group_.world();
    for (size_t p = 0; p < kParameters; ++p) {
      // A mean without a gradient of this rank is in the gradient buffer only.
      const float* gradient = weight(group_.rank(), p) == 0
                                  ? layout_.view(*reducer_, p)
                                  : gradient_of(p);
      note_plain_read(gradient, kSizes[p] * sizeof(float));
      double weights[Clocks::kMostRanks];
      double total = 0;
      for (int r = 0; r < world; ++r) total += weight(r, kParameters);
      for (int r = 0; r < world; ++r) weights[r] = weight(r, p);
      for (size_t i = 0; i < kSizes[p]; ++i) {
        double sum = 0;
        for (int r = 0; r < world; ++r)
          sum += weights[r] * value(r, p, i, backward);
        const double mean = sum / total;
        expect(std::fabs(gradient[i] - mean) <= 1e-6 * mean, "a wrong mean");
      }
    }
  }

  void fill_with_garbage() {
    for (size_t p = 0; p < kParameters; ++p) {
      std::fill_n(gradient_of(p), kSizes[p], kGarbage);
      note_plain_write(gradient_of(p), kSizes[p] * sizeof(float));
    }
  }

  /// Those outside of the gradient buffer.
  const std::vector<std::vector<float>>& gradients() const {
    return elsewhere_;
  }

 private:
  /// Another number for each rank, parameter, element and backward.
  static float value(int rank, size_t parameter, size_t i, int backward) {
    return 24.0f * static_cast<float>((rank + 1) * (backward + 1) +
                                      static_cast<int>((parameter + i) % 9));
  }
  float* gradient_of(size_t parameter) {
    return setting_.is_elsewhere ? elsewhere_[parameter].data()
                                 : layout_.view(*reducer_, parameter);
  }

  HostGroup& group_;
  const Setting& setting_;
  const testing::ReducerLayout layout_;
  std::vector<std::vector<float>> elsewhere_;
  std::unique_ptr<Reducer> reducer_;
};

std::vector<size_t> random_order(Random& random) {
  std::vector<size_t> order(kParameters);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = kParameters - 1; i > 0; --i)
    std::swap(order[i], order[random.below(i + 1)]);
  return order;
}

/// A rank that trains; programs differ in its actions at the end.
struct Rank {
  Run& run;
  int rank;
  Setting setting;
  Outcome& outcome;
  Random own;
  HostGroup group;
  std::optional<Model> model;

  Rank(Run& a_run, int a_rank, Setting::Backwards backwards)
      : run(a_run),
        rank(a_rank),
        setting(run, backwards),
        outcome(run.outcomes[static_cast<size_t>(rank)]),
        own(run.random_of(rank)),
        group(run.world.region(), rank, kNonce,
              {.timeout_s = 2, .warn_after_s = 1000, .spin_us = 0}) {
    group.session.join();
    model.emplace(group, setting);
    scheduler().start();
  }

  /// Marks `most` gradients of a backward.
  void mark_some(int number, size_t most) {
    const Backward& backward = setting.backwards[number];
    std::vector<size_t> order = random_order(own);
    std::erase_if(order, [&](size_t parameter) {
      return !backward.uses(rank, parameter);
    });
    model->reducer().set_weight(weight_in(backward, rank));
    order.resize(std::min(order.size(), most));
    for (const size_t parameter : order) model->mark(parameter, number);
  }

  void train(int number) {
    const Backward& backward = setting.backwards[number];
    if (backward.is_of(backward.kind.break_off, rank)) {
      break_off(number);
      return;
    }
    mark_some(number, kParameters);
    BackwardStatus status = BackwardStatus::without_data();
    if (backward.has_data(rank)) {
      const bool skips = backward.is_of(backward.kind.skip, rank);
      const bool goes_on = backward.is_of(backward.kind.go_on, rank);
      status = BackwardStatus(skips || goes_on ? 2 : 1);
      status.reached = goes_on ? 2 : 1;
    }
    uint32_t flags = model->reducer().finish(status, backward.allows(rank),
                                             backward.kind.globally_unused);
    ++outcome.good_backwards;
    // A rank that breaks off has marked some gradients, or all.
    if (backward.kind.break_off != kNone) flags &= ~kBackwardUnused;
    expect(flags == backward.kind.verdict,
           "another verdict than the ranks' own");
    if (!backward.kind.is_void) check(number);
    model->fill_with_garbage();
  }

  // The gradients are cleared before the others know: the next backward finds
  // them cleared.
  void break_off(int number) {
    mark_some(number, own.below(kParameters + 1));
    if (setting.is_elsewhere) model->fill_with_garbage();
    const uint32_t flags =
        model->reducer().finish(BackwardStatus::broken_off(), false);
    ++outcome.good_backwards;
    expect((flags & kBrokenOff) == kBrokenOff,
           "a backward that was broken off was good");
    if (!setting.is_elsewhere) model->fill_with_garbage();
  }

  double weight_in(const Backward& backward, int r) const {
    if (!backward.has_data(r)) return 0;
    return backward.has_weights ? weight_of(r, group.world()) : 1;
  }

  void check(int number) {
    const Backward& backward = setting.backwards[number];
    // kParameters asks for the weight in the sum of weights.
    model->check(number, [&](int r, size_t parameter) -> double {
      return backward.uses(r, parameter) ? weight_in(backward, r) : 0;
    });
  }
};

void train(Run& run, int index) {
  Rank rank(run, index, Setting::kAny);
  for (int p = 0; p < kBackwards; ++p) rank.train(p);
}

// Survivors keep their memory until all are back, and see late writes there.
void train_and_watch(Run& run, int index) {
  Rank rank(run, index, Setting::kGood);
  const bool watches = run.shared_random().one_in(2);
  try {
    for (int p = 0; p < kBackwards; ++p) rank.train(p);
  } catch (const Failure& failure) {
    rank.outcome.has_raised = true;
    rank.outcome.reason = failure.reason;
  }
  if (!watches) return;
  const auto before = rank.model->gradients();
  scheduler().wait_for_others();
  expect(rank.model->gradients() == before,
         "a gradient outside of the gradient buffer changed after its rank had "
         "raised");
}

void leave_in_mid_backward(Run& run, int index) {
  Rank rank(run, index, Setting::kPlain);
  Random random = run.shared_random();
  const int leaver =
      static_cast<int>(random.below(static_cast<uint64_t>(run.world.ranks())));
  const int last = static_cast<int>(random.below(kBackwards));
  for (int p = 0; p < kBackwards; ++p) {
    if (index == leaver && p == last) {
      rank.mark_some(p, random.below(kParameters));
      return;
    }
    rank.train(p);
  }
}

// Two reducers of one group, one of which comes and goes.
void several_reducers(Run& run, int index) {
  Rank rank(run, index, Setting::kPlain);
  for (int p = 0; p < 2; ++p) {
    Model passing(rank.group, rank.setting);
    for (size_t i = 0; i < kParameters; ++i) passing.mark(i, p);
    rank.mark_some(p, kParameters);
    expect(passing.reducer().finish(1, false) == 0, "another verdict");
    passing.check(p, [](int, size_t) { return 1.0; });
    expect(rank.model->reducer().finish(1, false) == 0, "another verdict");
    rank.check(p);
    rank.model->fill_with_garbage();
  }
}

std::string leaves_and_agree(const Run& run) {
  for (const Outcome& outcome : run.outcomes) {
    if (outcome.has_raised && outcome.reason != Reason::kLeft)
      return "the others raised something else than that a rank left";
  }
  return all_agree(run);
}

}  // namespace

void add_reducer_programs(std::vector<Program>& programs) {
  const auto add = [&](const char* name, int ranks, Events events, auto body,
                       auto judge) {
    programs.push_back({name, ranks, events, body, judge});
  };
  const Events death{.deaths = 1, .watches_races = false};
  const Events deaths{.deaths = 2, .watches_races = false};
  const Events deadline{
      .stops = 1, .time_passes = true, .watches_races = false};
  const Events both{.deaths = 1, .stops = 1, .watches_races = false};
  const Events leaving{.watches_races = false};
  add("backwards, 2 ranks", 2, {}, train, no_rank_raises);
  add("backwards, 3 ranks", 3, {}, train, no_rank_raises);
  add("backwards, 4 ranks, 2 cores", 4, {.cores = 2}, train, no_rank_raises);
  add("several reducers, 2 ranks", 2, {}, several_reducers, no_rank_raises);
  add("backwards, a stop, 2 ranks", 2, {.stops = 1}, train, no_rank_raises);
  add("backwards, a death, 2 ranks", 2, death, train_and_watch, all_agree);
  add("backwards, a death, 3 ranks", 3, death, train_and_watch, all_agree);
  add("backwards, two deaths, 4 ranks", 4, deaths, train_and_watch, all_agree);
  add("backwards, a death and a stop, 3 ranks", 3, both, train_and_watch,
      all_agree);
  add("backwards, stopped beyond the deadline, 3 ranks", 3, deadline,
      train_and_watch, all_agree);
  add("leaving in mid-backward, 3 ranks", 3, leaving, leave_in_mid_backward,
      leaves_and_agree);
}

}  // namespace paceline::schedules

// The Python class for Reducer.
#pragma once

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/gradient_taker.h"
#include "bind/py_host_group.h"
#include "reducer/reducer.h"

namespace paceline {

/// A Reducer that keeps its group alive.
class PyReducer final : public GradientTaker {
 public:
  PyReducer(nb::object group, size_t buffer_bytes,
            const std::vector<size_t>& offsets,
            const std::vector<size_t>& counts, const std::vector<int>& dtypes,
            const std::vector<std::pair<size_t, size_t>>& buckets,
            bool assigns_chunks,
            const std::vector<std::tuple<size_t, size_t, int>>& owned)
      : owner_(std::move(group)), group_(nb::cast<PyHostGroup*>(owner_)) {
    group_->collective(kUnlockBytes, -1, [&](HostGroup& core, double) {
      if (offsets.size() != counts.size() || offsets.size() != dtypes.size()) {
        misuse("offsets, counts and dtypes must have one entry per parameter");
      }
      std::vector<ParameterSpan> parameters;
      for (size_t i = 0; i < offsets.size(); ++i) {
        parameters.push_back({offsets[i], counts[i], checked_dtype(dtypes[i])});
      }
      std::vector<BucketSpan> spans;
      for (const auto& [begin, end] : buckets) spans.push_back({begin, end});
      std::vector<OwnedBytes> ranges;
      for (const auto& [begin, end, rank] : owned)
        ranges.push_back({begin, end, rank});
      reducer_ =
          std::make_unique<Reducer>(core.heap, buffer_bytes, parameters, spans,
                                    assigns_chunks, std::move(ranges));
    });
  }

  bool is_open() const override { return true; }  // mark_ready() itself raises
  void mark_ready(size_t parameter, Pointer gradient) override {
    check_not_nested();
    group_->call_without_waiting([&](HostGroup&) {
      reducer_->mark_ready(parameter, as_pointer(gradient));
    });
  }
  void mark_copied(size_t parameter, Pointer gradient, size_t bytes,
                   bool is_shared) override {
    memory_at(gradient, bytes, "mark_copied");
    check_not_nested();
    group_->call_without_waiting([&](HostGroup&) {
      reducer_->mark_copied(parameter, as_pointer(gradient), bytes, is_shared);
    });
  }
  void mark_unused(size_t parameter) {
    check_not_nested();
    group_->call_without_waiting(
        [&](HostGroup&) { reducer_->mark_unused(parameter); });
  }
  nb::object finish(const BackwardStatus& status, bool allow_unused,
                    bool allow_globally_unused) {
    check_not_nested();
    finishing_ = Turn::this_thread();
    struct Finished {
      Turn::Thread& finishing;
      ~Finished() { finishing = 0; }
    } const finished{finishing_};
    last_ = nb::none();
    group_->call(kUnlockBytes, [&](HostGroup&) {
      reducer_->finish(status, allow_unused, allow_globally_unused);
    });
    return last_ = nb::cast(reducer_->result());
  }
  /// The result of finish(), for a caller that did not receive it because of an
  /// exception; None: finish() has not completed.
  nb::object last() const { return last_; }
  /// Ends the group: this rank goes on with no backward, and the other ranks
  /// raise.
  void give_up(const char* why) { group_->group().session.abort(why); }
  void close() { reducer_->close(); }
  Reducer& reducer() {
    group_->check_not_forked();
    return *reducer_;
  }

 private:
  /// A signal handler may run inside finish(). It may use the group while a
  /// backward ends, but it must not start another backward of this reducer.
  void check_not_nested() {
    if (finishing_ == 0 || finishing_ != Turn::this_thread()) return;
    raise_failure({.reason = Reason::kNested,
                   .message = "the end of a backward pass, which waits for the "
                              "gradients of other ranks"},
                  &group_->group());
  }

  nb::object owner_;
  PyHostGroup* group_;
  std::unique_ptr<Reducer> reducer_;
  nb::object last_ = nb::none();
  Turn::Thread finishing_ = 0;  ///< the thread in finish(); 0: none
};

}  // namespace paceline

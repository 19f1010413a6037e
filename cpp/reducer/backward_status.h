// What a rank reports to the others when its backward ends.
//
// It is exchanged as one 64-bit word: in shared memory, where the reducer puts
// it, and in the messages that Python sends through process groups. Only
// pack(), unpack() and difference() know the format of the word:
//
//   bit 63: buffers were written, with the kinds 0 to 2
//   bit 62: this rank is asked to stop
//   bits 59-61, kind     bits 0-58, from the highest to the lowest
//   0  counts            digest of the inputs (19), forwards left over (20),
//                        forwards (20)
//   1  frozen            digest of the idle parameters (19), the rest as in 0
//   2  static graph      as in 0
//   3  graph changed     0
//   4  twice             index of the parameter
//   6  refused           index of the parameter
//   7  ended             2^59 - 2: finished; 2^59 - 1: interrupted
#pragma once

#include <cstdint>
#include <optional>

namespace paceline {

/// Ranks whose words are equal agree. A rank without data agrees with all
/// others. A rank whose backward was interrupted agrees with none, not even
/// with another such rank. Two ranks that report counts agree if one of the two
/// counts is the same: a rank that skipped a backward has made more forwards
/// than others, and has as many more left over. If only `forwards` differs,
/// some ranks have run more forwards per backward; if only the forwards left
/// over differ, some ranks have not used an output. But a rank that made no
/// forward at all is in a backward of its own, which the others do not make.
struct BackwardStatus {
  static constexpr uint32_t kValueBits = 59;
  static constexpr uint32_t kCountBits = 20;
  /// The bits of a digest (of frozen parameters or of inputs): what the two
  /// counts leave of the value.
  static constexpr uint32_t kDigestBits = kValueBits - 2 * kCountBits;

  // Not explicit: a number of forwards, all of them left over, is the plainest
  // status.
  constexpr BackwardStatus(uint32_t count = 0) : forwards(count) {}  // NOLINT

  static constexpr BackwardStatus without_data() {
    BackwardStatus status;
    status.finished = true;
    return status;
  }

  static constexpr BackwardStatus broken_off() {
    BackwardStatus status;
    status.interrupted = true;
    return status;
  }

  /// Forwards since the last synchronised backward.
  uint32_t forwards = 0;
  /// How many of them this backward has reached; the others are left over.
  uint32_t reached = 0;
  /// A parameter whose gradient cannot be averaged.
  std::optional<uint32_t> refused = {};
  /// A parameter whose gradient arrived again after it had been handed over.
  std::optional<uint32_t> twice = {};
  /// A digest of the frozen parameters that got no gradient.
  std::optional<uint32_t> frozen = {};
  /// A digest of the model's inputs, in which ranks should differ; 0: not
  /// reported. Not reported together with `frozen`.
  uint32_t inputs = 0;
  /// static_graph was promised, but other parameters were used than in the
  /// first backward.
  bool graph_changed = false;
  /// static_graph was promised after wrapping, and no good backward has shown
  /// yet that all ranks have promised it.
  bool static_graph = false;
  /// The user's program has written to buffers since they were synchronised.
  /// Ranks may differ in this.
  bool wrote_buffers = false;
  /// A signal asks this rank to stop. Ranks may differ in this.
  bool stops = false;
  /// This rank has no more data.
  bool finished = false;
  /// The backward has ended in an exception.
  bool interrupted = false;

  constexpr bool operator==(const BackwardStatus&) const = default;

  /// Whether it reports counts of forwards, alone or with something else.
  constexpr bool is_count() const {
    return !refused && !twice && !graph_changed && !finished && !interrupted;
  }
  /// Whether it reports counts of forwards and nothing else.
  constexpr bool is_plain() const {
    return is_count() && !static_graph && !frozen && !wrote_buffers && !stops &&
           inputs == 0;
  }

  /// Clears the status after a backward. static_graph stays: see there.
  constexpr void begin_next() {
    const bool promised = static_graph;
    *this = {};
    static_graph = promised;
  }

  /// Encodes the status as one word. If there is more than one thing to report,
  /// the word holds the most important one.
  constexpr uint64_t pack() const {
    const uint64_t flag = stops ? kStops : 0;
    if (interrupted) return kInterrupted | flag;
    if (finished) return kFinished | flag;
    if (refused) return word(Kind::kRefused, *refused) | flag;
    if (twice) return word(Kind::kTwice, *twice) | flag;
    if (graph_changed) return word(Kind::kGraphChanged, 0) | flag;
    const uint64_t counts = low(forwards) |
                            low(forwards - reached) << kCountBits |
                            (wrote_buffers ? kWroteBuffers : 0) | flag;
    if (frozen && !static_graph)
      return word(Kind::kFrozen, low(*frozen) << 2 * kCountBits) | counts;
    return word(static_graph ? Kind::kStaticGraph : Kind::kCounts,
                low(inputs) << 2 * kCountBits) |
           counts;
  }

  static constexpr BackwardStatus unpack(uint64_t word) {
    const uint64_t value = word & kValue;
    BackwardStatus status;
    status.stops = (word & kStops) != 0;
    switch (kind_of(word)) {
      case Kind::kFrozen:
        status.frozen = static_cast<uint32_t>(low(value >> 2 * kCountBits));
        break;
      case Kind::kStaticGraph:
        status.static_graph = true;
        status.inputs = static_cast<uint32_t>(low(value >> 2 * kCountBits));
        break;
      case Kind::kGraphChanged:
        status.graph_changed = true;
        return status;
      case Kind::kTwice:
        status.twice = static_cast<uint32_t>(value);
        return status;
      case Kind::kRefused:
        status.refused = static_cast<uint32_t>(value);
        return status;
      case Kind::kEnded:
        (value == kValue ? status.interrupted : status.finished) = true;
        return status;
      case Kind::kCounts:
        status.inputs = static_cast<uint32_t>(low(value >> 2 * kCountBits));
        break;
    }
    status.wrote_buffers = (word & kWroteBuffers) != 0;
    status.forwards = static_cast<uint32_t>(low(value));
    status.reached =
        static_cast<uint32_t>(low(value) - low(value >> kCountBits));
    return status;
  }

  /// What differs between two ranks, as bits. Ranks disagree if both bits
  /// occur, in any pairs of them. Any difference other than in counts sets both
  /// bits.
  enum Difference : uint32_t {
    kNone = 0,
    kInForwards = 1,
    kInLeft = 2,
    kInBoth = kInForwards | kInLeft
  };
  static constexpr Difference difference(uint64_t one, uint64_t other) {
    const uint64_t differs =
        (without_inputs(one) ^ without_inputs(other)) & ~kFlags;
    if (differs == 0) return kNone;
    const bool is_in_counts =
        differs >> 2 * kCountBits == 0 && kind_of(one) <= Kind::kStaticGraph;
    const bool has_one_none = (low(one) == 0) != (low(other) == 0);
    if (!is_in_counts || has_one_none) return kInBoth;
    if (low(differs) == 0) return kInLeft;
    return low(differs >> kCountBits) == 0 ? kInForwards : kInBoth;
  }

 private:
  enum class Kind : uint32_t {
    kCounts = 0,
    kFrozen = 1,
    kStaticGraph = 2,
    kGraphChanged = 3,
    kTwice = 4,
    kRefused = 6,
    kEnded = 7,
  };
  static constexpr uint64_t kValue = (uint64_t{1} << kValueBits) - 1;
  static constexpr uint64_t kWroteBuffers = uint64_t{1} << 63;
  static constexpr uint64_t kStops = uint64_t{1} << 62;
  static constexpr uint64_t kFlags = kWroteBuffers | kStops;
  static constexpr uint64_t low(uint64_t value) {
    return value & ((uint64_t{1} << kCountBits) - 1);
  }
  static constexpr Kind kind_of(uint64_t word) {
    return static_cast<Kind>((word & ~kFlags) >> kValueBits);
  }
  static constexpr uint64_t without_inputs(uint64_t word) {
    const Kind kind = kind_of(word);
    if (kind != Kind::kCounts && kind != Kind::kStaticGraph) return word;
    return word & ~(kValue >> 2 * kCountBits << 2 * kCountBits);
  }
  static constexpr uint64_t word(Kind kind, uint64_t value) {
    return static_cast<uint64_t>(kind) << kValueBits | (value & kValue);
  }
  static constexpr uint64_t kFinished =
      static_cast<uint64_t>(Kind::kEnded) << kValueBits | (kValue - 1);
  static constexpr uint64_t kInterrupted = kFinished + 1;
};

}  // namespace paceline

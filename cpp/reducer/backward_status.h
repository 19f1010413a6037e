// What a rank tells the others of its backward when it ends.
//
// It travels as one 64-bit word: in shared memory, where the reducer puts it,
// and in the messages that Python sends through process groups. pack(),
// unpack() and difference() alone know how the word is made:
//
//   bit 63: buffers were written, with the kinds 0 to 2
//   bit 62: this rank is asked to stop
//   bits 59-61, kind     bits 0-58, from the highest to the lowest
//   0  counts            digest of the inputs (19), forwards left (20),
//                        forwards (20)
//   1  frozen            digest of the idle parameters (19), the same
//   2  static graph      the same as 0
//   3  graph changed     0
//   4  twice             index of the parameter
//   6  refused           index of the parameter
//   7  ended             2^59 - 2: finished; 2^59 - 1: interrupted
#pragma once

#include <cstdint>
#include <optional>

namespace paceline {

/// Ranks whose words are equal agree; one without data agrees with all others,
/// one whose backward was broken off with none, nor with its like. Two that
/// tell counts agree if one of the two is the same: a rank that skipped a
/// backward has made more forwards than others, and has left one more of them.
/// Where only the forwards differ, some ranks have made longer episodes; where
/// only those differ that are left, some have not used an output. But whoever
/// made none at all is in a backward of its own, which others do not make.
struct BackwardStatus {
  static constexpr uint32_t kValueBits = 59;
  static constexpr uint32_t kCountBits = 20;
  /// Of a digest, frozen or inputs: what counts of forwards leave of the value.
  static constexpr uint32_t kDigestBits = kValueBits - 2 * kCountBits;

  // Not explicit: a number of forwards alone, all of them left, says the least.
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

  /// Since the last synchronised backward.
  uint32_t forwards = 0;
  /// How many of them this backward has come to; it has left the others.
  uint32_t reached = 0;
  /// A parameter whose gradient cannot be averaged.
  std::optional<uint32_t> refused = {};
  /// A parameter whose gradient came again after it had been handed over.
  std::optional<uint32_t> twice = {};
  /// A digest of the frozen parameters that got no gradient.
  std::optional<uint32_t> frozen = {};
  /// A digest of what the model was called with; 0: nothing is told of it.
  /// Ranks should differ in it. Left out where frozen parameters are told of.
  uint32_t inputs = 0;
  /// Other parameters were used than in the first backward, against a promise.
  bool graph_changed = false;
  /// That promise was made after wrapping, and no good backward has shown yet
  /// that all ranks have made it.
  bool static_graph = false;
  /// The user's program has written to buffers since they were synchronised.
  /// Ranks may differ in it.
  bool wrote_buffers = false;
  /// A signal asks this rank to stop. Ranks may differ in it.
  bool stops = false;
  /// There is no more data.
  bool finished = false;
  /// The backward has ended in an exception.
  bool interrupted = false;

  constexpr bool operator==(const BackwardStatus&) const = default;

  /// Whether it tells counts of forwards, alone or with something else.
  constexpr bool is_count() const {
    return !refused && !twice && !graph_changed && !finished && !interrupted;
  }
  /// Whether it tells counts of forwards and nothing else.
  constexpr bool is_plain() const {
    return is_count() && !static_graph && !frozen && !wrote_buffers && !stops &&
           inputs == 0;
  }

  /// Forgets the backward that is over. A promise stays: see static_graph.
  constexpr void begin_next() {
    const bool promised = static_graph;
    *this = {};
    static_graph = promised;
  }

  /// Encodes the status as one word. If there are several things to tell, the
  /// word tells the one that matters most.
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

  /// What differs between two ranks, as bits. Ranks disagree if both do, in
  /// whichever pairs of them; everything else than counts differs in both.
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

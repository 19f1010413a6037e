// What a rank tells the others of its pass when its backward ends.
//
// It travels as one 32-bit word: in shared memory, where the reducer puts it,
// and in the messages that Python sends through process groups. pack() and
// unpack() alone know how the word is made:
//
//   bits 28-31, kind     bits 0-27
//   0  a count           number of forwards
//   1  frozen            digest of the idle parameters (14), forwards (14)
//   2  static graph      number of forwards
//   3  graph changed     0
//   4  twice             index of the parameter
//   6  refused           index of the parameter
//   7  ended             2^28 - 2: finished; 2^28 - 1: interrupted
#pragma once

#include <cstdint>
#include <optional>

namespace paceline {

/// Ranks whose words are equal agree; one without data agrees with all others,
/// one whose backward was broken off with none, nor with its like.
struct PassStatus {
  // Not explicit: a number of forwards alone is the usual status.
  constexpr PassStatus(uint32_t count = 0) : forwards(count) {}  // NOLINT

  static constexpr PassStatus without_data() {
    PassStatus status;
    status.finished = true;
    return status;
  }

  static constexpr PassStatus broken_off() {
    PassStatus status;
    status.interrupted = true;
    return status;
  }

  /// Since the last synchronised pass.
  uint32_t forwards = 0;
  /// A parameter whose gradient cannot be averaged.
  std::optional<uint32_t> refused = {};
  /// A parameter whose gradient came again after it had been handed over.
  std::optional<uint32_t> twice = {};
  /// A digest of the frozen parameters that got no gradient.
  std::optional<uint32_t> frozen = {};
  /// Other parameters were used than in the first pass, against a promise.
  bool graph_changed = false;
  /// That promise was made after wrapping, and no good pass has shown yet that
  /// all ranks have made it.
  bool static_graph = false;
  /// There is no more data.
  bool finished = false;
  /// The backward has ended in an exception.
  bool interrupted = false;

  constexpr bool operator==(const PassStatus&) const = default;

  /// Whether it tells a number of forwards, alone or with something else.
  constexpr bool is_count() const {
    return !refused && !twice && !graph_changed && !finished && !interrupted;
  }
  /// Whether it tells a number of forwards and nothing else.
  constexpr bool is_plain() const {
    return is_count() && !static_graph && !frozen;
  }

  /// Forgets the pass that is over. A promise stays: see static_graph.
  constexpr void begin_next() {
    const bool promised = static_graph;
    *this = {};
    static_graph = promised;
  }

  /// Encodes the status as one word. If there are several things to tell, the
  /// word tells the one that matters most.
  constexpr uint32_t pack() const {
    if (interrupted) return kInterrupted;
    if (finished) return kFinished;
    if (refused) return word(Kind::kRefused, *refused);
    if (twice) return word(Kind::kTwice, *twice);
    if (graph_changed) return word(Kind::kGraphChanged, 0);
    if (static_graph) return word(Kind::kStaticGraph, forwards);
    if (!frozen) return forwards;
    const uint32_t digest = *frozen & kLow;
    return word(Kind::kFrozen, digest << kLowBits | (forwards & kLow));
  }

  static constexpr PassStatus unpack(uint32_t word) {
    const uint32_t value = word & kValue;
    PassStatus status;
    switch (static_cast<Kind>(word >> kValueBits)) {
      case Kind::kFrozen:
        status.frozen = value >> kLowBits;
        status.forwards = value & kLow;
        return status;
      case Kind::kStaticGraph:
        status.static_graph = true;
        status.forwards = value;
        return status;
      case Kind::kGraphChanged:
        status.graph_changed = true;
        return status;
      case Kind::kTwice:
        status.twice = value;
        return status;
      case Kind::kRefused:
        status.refused = value;
        return status;
      case Kind::kEnded:
        (word == kInterrupted ? status.interrupted : status.finished) = true;
        return status;
      case Kind::kCount:
        break;
    }
    return {word};
  }

 private:
  enum class Kind : uint32_t {
    kCount = 0,
    kFrozen = 1,
    kStaticGraph = 2,
    kGraphChanged = 3,
    kTwice = 4,
    kRefused = 6,
    kEnded = 7,
  };
  static constexpr uint32_t kValueBits = 28;
  static constexpr uint32_t kValue = (uint32_t{1} << kValueBits) - 1;
  static constexpr uint32_t kLowBits = kValueBits / 2;
  static constexpr uint32_t kLow = (uint32_t{1} << kLowBits) - 1;
  static constexpr uint32_t word(Kind kind, uint32_t value) {
    return static_cast<uint32_t>(kind) << kValueBits | (value & kValue);
  }
  static constexpr uint32_t kFinished =
      static_cast<uint32_t>(Kind::kEnded) << kValueBits | (kValue - 1);
  static constexpr uint32_t kInterrupted = kFinished + 1;
};

}  // namespace paceline

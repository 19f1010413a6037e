// The innermost loops, written so that the compiler vectorises them; see
// formats.h for the namespaces.
//
// Each processes one block. combine() reads the ranks' arrays and copy() writes
// them; in between, everything stays in the L1 cache.
#pragma once

#include "kernels/formats.h"

namespace paceline::PACELINE_ISA {
namespace {

constexpr int kFanIn = 4;  // inputs that combine() takes at a time
constexpr int kLanes = 16;

// Operators. Sums and products get integers as unsigned, which wrap.

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};

struct Product {
  // 1u keeps 16-bit operands from being promoted to int, which could overflow.
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(1u * a * b);
  }
};

// A NaN in `b` fails the comparison, so `b` is taken; the second test keeps one
// in `a`.
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct Max {
  template <class T>
  static T apply(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

// What is done to an element after all ranks are combined.

struct Keep {
  template <class T>
  T operator()(T x) const {
    return x;
  }
};

// Turns every NaN into the same one: see formats.h.
template <class T>
struct Canonical {
  static constexpr T kNan = sizeof(T) == 4 ? static_cast<T>(__builtin_nanf(""))
                                           : static_cast<T>(__builtin_nan(""));
  T operator()(T x) const { return x != x ? kNan : x; }
};

template <class T>
struct Multiply {
  T factor;
  T operator()(T x) const { return Canonical<T>()(x * factor); }
};

template <class T>
struct Divide {
  T divisor;
  T operator()(T x) const { return Canonical<T>()(x / divisor); }
};

template <class Op, int kInputs, class T, class Finish>
void combine(const T* const* inputs, size_t count, T* __restrict out,
             Finish finish) {
  const T* const a = inputs[0];
  const T* const b = inputs[kInputs > 1 ? 1 : 0];
  const T* const c = inputs[kInputs > 2 ? 2 : 0];
  const T* const d = inputs[kInputs > 3 ? 3 : 0];
  for (size_t i = 0; i < count; ++i) {
    T x = a[i];
    if constexpr (kInputs > 1) x = Op::apply(x, b[i]);
    if constexpr (kInputs == 3) x = Op::apply(x, c[i]);
    if constexpr (kInputs == 4) x = Op::apply(x, Op::apply(c[i], d[i]));
    out[i] = finish(x);
  }
}

template <class Op, class T, class Finish>
void combine(const T* const* inputs, int num_inputs, size_t count, T* out,
             Finish finish) {
  switch (num_inputs) {
    case 1:
      return combine<Op, 1>(inputs, count, out, finish);
    case 2:
      return combine<Op, 2>(inputs, count, out, finish);
    case 3:
      return combine<Op, 3>(inputs, count, out, finish);
    default:
      return combine<Op, 4>(inputs, count, out, finish);
  }
}

template <class Format>
bool has_nonfinite(const typename Format::Stored* in, size_t count) {
  using Bits = typename Format::Bits;
  Bits found = 0;
  for (size_t i = 0; i < count; ++i) {
    const Bits bits = __builtin_bit_cast(Bits, in[i]);
    found |= (bits & Format::kExponent) == Format::kExponent;
  }
  return found != 0;
}

// Element i goes to lane i % 16, whatever the width of a register: the compiler
// vectorises over the lanes.
template <class T>
void add_squares(const T* in, size_t count, double* lanes) {
  double sums[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) sums[lane] = lanes[lane];
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = static_cast<double>(in[i + lane]);
      sums[lane] += value * value;
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = sums[lane];
  for (int lane = 0; i < count; ++i, ++lane) {
    const double value = static_cast<double>(in[i]);
    lanes[lane] += value * value;
  }
}

// Adds one half of the lanes to the other until one lane is left: a tree, too.
double sum_lanes(const double* lanes) {
  double sums[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) sums[lane] = lanes[lane];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

template <class T>
void copy(const T* from, size_t count, T* __restrict to) {
  for (size_t i = 0; i < count; ++i) to[i] = from[i];
}

}  // namespace
}  // namespace paceline::PACELINE_ISA

// The innermost loops, written so that the compiler vectorises them; see
// formats.h for the namespaces.
//
// Each runs over one block, from L1 cache to L1 cache, except that combine()
// reads the ranks' arrays.
#pragma once

#include "kernels/formats.h"

namespace paceline::PACELINE_KERNELS {
namespace {

constexpr int kFanIn = 4;  // inputs that combine() takes at a time
constexpr int kLanes = 16;

// ---- Operators. Integers come as unsigned for sum and product, which wrap.
// -------------------------------

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};

struct Product {
  // The 1u keeps 16-bit operands from being promoted to int, which could
  // overflow.
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(1u * a * b);
  }
};

// A NaN in `b` fails the comparison and is taken, one in `a` is kept by the
// second test.
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return (a < b) | (a != a) ? a : b;
  }
};

struct Max {
  template <class T>
  static T apply(T a, T b) {
    return (a > b) | (a != a) ? a : b;
  }
};

// ---- Finishing touches, applied once all ranks are in
// ----------------------------------------------------

struct Keep {
  template <class T>
  T operator()(T x) const {
    return x;
  }
};

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

// ---- Loops
// -----------------------------------------------------------------------------------------------

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

template <class T>
void multiply(const T* in, T factor, size_t count, T* __restrict out) {
  for (size_t i = 0; i < count; ++i) out[i] = in[i] * factor;
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

// Element i goes to lane i % 16, whatever the width of a register. Spelled with
// the compiler's vectors, since GCC 12 leaves the plain loop scalar.
template <class T>
void add_squares(const T* in, size_t count, double* lanes) {
  typedef T Values __attribute__((vector_size(kLanes / 2 * sizeof(T))));
  typedef double Squares
      __attribute__((vector_size(kLanes / 2 * sizeof(double))));
  constexpr size_t kHalf = kLanes / 2;
  Squares sums[2];
  __builtin_memcpy(sums, lanes, sizeof(sums));
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Values low, high;
    __builtin_memcpy(&low, in + i, sizeof(low));
    __builtin_memcpy(&high, in + i + kHalf, sizeof(high));
    const Squares wide_low = __builtin_convertvector(low, Squares);
    const Squares wide_high = __builtin_convertvector(high, Squares);
    sums[0] += wide_low * wide_low;
    sums[1] += wide_high * wide_high;
  }
  __builtin_memcpy(lanes, sums, sizeof(sums));
  for (size_t lane = 0; i < count; ++i, ++lane) {
    const double value = static_cast<double>(in[i]);
    lanes[lane] += value * value;
  }
}

// The same tree as over ranks.
double sum_lanes(const double* lanes) {
  double sums[kLanes];
  __builtin_memcpy(sums, lanes, sizeof(sums));
  for (int n = kLanes; n > 1; n /= 2) {
    for (int i = 0; i < n / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
  return sums[0];
}

}  // namespace
}  // namespace paceline::PACELINE_KERNELS

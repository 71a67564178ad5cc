// What is summed over the columns two rows share, in vectors; see slipstream_sparse_op.
//
// step(sum, b, aux) adds the term of one query value and a vector of b; where b is zero it adds
// zero, because the dense head also holds rows that lack the column.

#pragma once

#include "lanes.h"

namespace {

template <typename T>
struct Dot {
  static constexpr bool uses_aux = false;
  Vec<T> x;
  Dot(T value, T, double) : x(splat(value)) {}
  Vec<T> step(Vec<T> sum, Vec<T> b, Vec<T>) const { return fma(x, b, sum); }
};

template <typename T>
struct Min {
  static constexpr bool uses_aux = false;
  Vec<T> x;
  Min(T value, T, double) : x(splat(value)) {}
  Vec<T> step(Vec<T> sum, Vec<T> b, Vec<T>) const { return sum + smaller(x, b); }
};

// The smaller magnitude where both have one sign: x's sign is moved to b, which then is positive.
template <typename T>
struct Common {
  static constexpr bool uses_aux = false;
  Vec<T> size;
  Bits<T> sign;
  Common(T value, T, double) : size(magnitude<T>(splat(value))) {
    sign = (Bits<T>)splat(value) & Lanes<T>::sign_mask;
  }
  Vec<T> common(Vec<T> b) const {
    return larger(smaller(size, (Vec<T>)((Bits<T>)b ^ sign)), Vec<T>{});
  }
  Vec<T> step(Vec<T> sum, Vec<T> b, Vec<T>) const { return sum + common(b); }
};

template <typename T>
struct Share {
  static constexpr bool uses_aux = false;
  Common<T> x;
  Share(T value, T aux, double power) : x(value, aux, power) {}
  Vec<T> step(Vec<T> sum, Vec<T> b, Vec<T>) const {
    const Vec<T> share = quotient(x.common(b), x.size + magnitude<T>(b));
    return fma(share, splat<T>(-2), sum - where_present<T>(b, splat<T>(1)));
  }
};

template <typename T>
struct ShareMin {
  static constexpr bool uses_aux = false;
  Vec<T> x;
  ShareMin(T value, T, double) : x(splat(value)) {}
  Vec<T> step(Vec<T> sum, Vec<T> b, Vec<T>) const {
    const Vec<T> share = quotient(smaller(x, b), x + b);
    return fma(share, splat<T>(-2), sum - where_present<T>(b, splat<T>(1)));
  }
};

template <typename T>
struct Equal {
  static constexpr bool uses_aux = false;
  Vec<T> x;
  Equal(T value, T, double) : x(splat(value)) {}
  Vec<T> step(Vec<T> sum, Vec<T> b, Vec<T>) const {
    const Vec<T> same = (Vec<T>)((Bits<T>)(b == x) & (Bits<T>)splat<T>(1));
    return sum - where_present<T>(b, splat<T>(1)) - same;
  }
};

// |x - b|^3 - |x|^3 - |b|^3.
template <typename T>
struct Cube {
  static constexpr bool uses_aux = false;
  Vec<T> x, cube;
  Cube(T value, T, double) : x(splat(value)), cube(of(x)) {}
  static Vec<T> of(Vec<T> d) { return magnitude<T>(d) * (d * d); }
  Vec<T> step(Vec<T> sum, Vec<T> b, Vec<T>) const {
    // of(x - 0) equals `cube` to the bit, hence nothing is added where b is zero.
    return sum + (of(x - b) - (cube + of(b)));
  }
};

// The same for any power; aux is |x|^p and |b|^p.
template <typename T>
struct Power {
  static constexpr bool uses_aux = true;
  T x, of_x;
  double p;
  Power(T value, T aux, double power) : x(value), of_x(aux), p(power) {}
  Vec<T> step(Vec<T> sum, Vec<T> b, Vec<T> of_b) const {
    for (int i = 0; i < Lanes<T>::width; ++i)
      if (b[i] != 0) sum[i] += (T)__builtin_pow(__builtin_fabs(x - b[i]), p) - (of_x + of_b[i]);
    return sum;
  }
};

// Aux is x ln x and b ln b.
template <typename T>
struct Entropy {
  static constexpr bool uses_aux = true;
  Vec<T> x, of_x;
  Entropy(T value, T aux, double) : x(splat(value)), of_x(splat(aux)) {}
  Vec<T> step(Vec<T> sum, Vec<T> b, Vec<T> of_b) const {
    const Vec<T> both = x + b;
    return sum + where_present<T>(b, fma(-both, logarithm<T>(both), of_x + of_b));
  }
};

}  // namespace

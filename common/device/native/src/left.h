// The left side (activations) of a matmul, in the layout that the kernels for a kind of weights read.
#pragma once
#include <algorithm>
#include <type_traits>

#include "pool.h"
#include "tile_matrix.h"
#include "tile_dispatch.h"

namespace kvferry {

template <class K>
struct Rows {
  const typename Sides<K>::Left* values;
  int64_t stride;
};

// Converts one row to another type, padded with zeros to `width`.
template <class T>
static inline void lay(const T* from, int64_t in, int64_t width, float* to) {
  int64_t k = 0;
  for (; k + kLanes <= in; k += kLanes) store<kLanes>(to + k, load<kLanes>(from + k));
  for (; k < in; k++) to[k] = to_float(from[k]);
  for (; k < width; k++) to[k] = 0.0f;
}

static inline void lay(const Bf16* from, int64_t in, int64_t width, Bf16* to) {
  std::copy(from, from + in, to);
  std::fill(to + in, to + width, Bf16{});
}

// Rounds `count` <= kRounded values to integers from -127 to 127, zero-padded; returns their scale, NaN if a value is.
template <class T>
static inline float round_group(const T* from, int64_t count, Simd<kLanes>::H* to) {
  const F<kLanes> shifter = splat<kLanes>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  alignas(64) float values[kRounded];
  lay(from, count, kRounded, values);
  U<kLanes> sizes = {};  // magnitudes compared as integers, where NaN is the largest
  for (int k = 0; k < kRounded; k += kLanes) {
    const U<kLanes> size = (U<kLanes>)load<kLanes>(values + k) & 0x7fffffffu;
    sizes = sizes < size ? size : sizes;
  }
  uint32_t largest = 0;
  for (int i = 0; i < kLanes; i++) largest = std::max(largest, uint32_t(sizes[i]));
  float most;
  std::memcpy(&most, &largest, sizeof most);
  const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
  for (int k = 0; k < kRounded; k += kLanes) {
    const F<kLanes> shifted = load<kLanes>(values + k) * inverse + shifter;
    *to++ = __builtin_convertvector((U<kLanes>)shifted - (U<kLanes>)shifter, Simd<kLanes>::H);
  }
  return most / 127.0f;
}

// Integers with a scale per group; groups without values are zero.
template <class T>
static inline void lay(const T* from, int64_t in, int64_t width, Rounded* to) {
  for (int64_t start = 0; start < width; start += kRounded, to++) {
    Simd<kLanes>::H rounded[kRounded / kLanes];
    to->scale = round_group(from + start, std::min<int64_t>(in - start, kRounded), rounded);
    std::memcpy(to->values, rounded, sizeof rounded);
  }
}

// Calls lay(r) for each of `rows` rows of `in` values, in parallel.
template <class Lay>
void each_row(int64_t rows, int64_t in, int threads, Lay&& lay) {
  const int64_t pieces = std::clamp<int64_t>(rows * in >> 15, 1, std::min<int64_t>(rows, threads * 2));
  parallel(threads, int(pieces), [&](int piece) {
    for (int64_t r = rows * piece / pieces; r < rows * (piece + 1) / pieces; r++) lay(r);
  });
}

// Rows in the kernel's layout: in place if possible, else a copy padded with zeros along k.
template <class K, class T>
Rows<K> left_side(const T* x, int64_t stride, int64_t rows, int64_t in, int threads) {
  typedef typename Sides<K>::Left Left;
  const int64_t width = packed_units<K>(in) * Sides<K>::kStep;
  if constexpr (std::is_same_v<Left, T>)
    if (width == in) return {x, stride};
  const int64_t each = std::is_same_v<Left, Rounded> ? units<K>(in) : width;
  Left* laid = static_cast<Left*>(scratch(kSlotRows, uint64_t(rows * each) * sizeof(Left)));
  each_row(rows, in, threads, [=](int64_t r) { lay(x + r * stride, in, width, laid + r * each); });
  return {laid, each};
}

}  // namespace kvferry

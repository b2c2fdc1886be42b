// The inner kernels over weights of 8 and 4 bits, and panels of them widened to float32 for many rows.
//
// Int8: [k][16], k padded to groups of 32; one scale per column, applied when the sums are stored.
// Int4: groups of 32 values of k, each value q * scale + low with one scale and one low per column and group.
// Int8Dynamic: the left side is integer too, with a scale per 64 values of k (`Rounded`), and the sums are exact;
// [k / 2][16] pairs, or [k / 4][16] groups of four if the matrix unit reads it (tile_rounded.h).
// A widened panel holds exactly the numbers that the direct kernel multiplies by: both ways give the same bits.
// common/device/native/panels.py makes these layouts.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "tile.h"

namespace kvferry {

struct Int8 {};
struct Int4 {};
struct Int8Dynamic {};

constexpr int kGroup = 32;
constexpr int kRounded = 64;
struct Rounded {
  float scale;
  int16_t values[kRounded];
};
struct Two8 {
  uint16_t bits;
};
struct Group4 {
  uint16_t scale[kPanel], low[kPanel];  // float16
  uint32_t values[kGroup / 8][kPanel];  // eight values of k, the lowest in the lowest four bits
};

template <>
struct Sides<Int8> {
  typedef float Left;
  typedef int8_t Right;
  static constexpr int kStep = 1;
  static constexpr int kUnit = kPanel;
};
template <>
struct Sides<Int4> {
  typedef float Left;
  typedef Group4 Right;
  static constexpr int kStep = kGroup;
  static constexpr int kUnit = 1;
};
template <>
struct Sides<Int8Dynamic> {
  typedef Rounded Left;
  typedef Two8 Right;
  static constexpr int kStep = kRounded;
  static constexpr int kUnit = kRounded / 2 * kPanel;
};

// Scales and lows take registers as well as the sums.
template <>
constexpr int tile_rows<Int4>() {
  return kLanes == 16 ? 6 : 4;
}
template <>
constexpr int panels_per_tile<Int4>(int rows) {
  return kLanes == 16 && rows <= 2 ? 4 : rows == 1 ? 2 : 1;
}

typedef Simd<kLanes>::I Whole;
typedef U<kLanes> Bits;

KVFERRY_INLINE Acc float_of(Whole v) { return __builtin_convertvector(v, Acc); }

#if defined(__AVX512F__)
KVFERRY_INLINE Acc int8_of(const int8_t* p) { return float_of((Whole)_mm512_cvtepi8_epi32(load_raw<__m128i>(p))); }
#elif defined(__AVX2__)
KVFERRY_INLINE Acc int8_of(const int8_t* p) { return float_of((Whole)_mm256_cvtepi8_epi32(_mm_loadu_si64(p))); }
#else
KVFERRY_INLINE Acc int8_of(const int8_t* p) {
  typedef int8_t Narrow __attribute__((vector_size(kLanes)));
  typedef int16_t Middle __attribute__((vector_size(kLanes * 2)));
  return float_of(__builtin_convertvector(__builtin_convertvector(load_raw<Narrow>(p), Middle), Whole));
}
#endif

// float16 to float32; the product shifts the exponent, which also handles subnormals.
KVFERRY_INLINE Acc half_of(const uint16_t* p) {
  const Bits h = __builtin_convertvector(load_raw<typename Simd<kLanes>::H>(p), Bits);
  const Acc size = (Acc)((h & 0x7fffu) << 13) * 0x1p112f;
  return (Acc)((Bits)size | (h & 0x8000u) << 16);
}

struct Affine {
  Acc scale, low;
  Affine() = default;
  __attribute__((always_inline)) Affine(const Group4& group, int part) : scale(half_of(group.scale + part * kLanes)), low(half_of(group.low + part * kLanes)) {}
  __attribute__((always_inline)) Acc of(Bits eight, int at) const { return float_of((Whole)((eight >> (4 * at)) & 15u)) * scale + low; }
};

template <int ROWS, int PANELS>
static inline void tile(const float* left, int64_t left_stride, const int8_t* right, int64_t right_stride,
                        int64_t count, float* out, Ahead ahead) {
  constexpr int kLine = 64 / kPanel;  // values of k per prefetched cache line
  Acc acc[ROWS][PANELS][kParts] = {};
  for (int64_t start = 0; start < count; start += kLine) {
    ahead.fetch(start);
#pragma GCC unroll 4
    for (int64_t k = start; k < start + kLine; k++) {
      Acc w[PANELS][kParts];
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
        for (int i = 0; i < kParts; i++) w[p][i] = int8_of(right + p * right_stride + k * kPanel + i * kLanes);
      add_products<ROWS, PANELS>(acc, w, left + k, left_stride);
    }
  }
  put_sums<ROWS, PANELS>(acc, out);
}

template <int ROWS, int PANELS>
static inline void tile(const float* left, int64_t left_stride, const Group4* right, int64_t right_stride,
                        int64_t count, float* out, Ahead ahead) {
  Acc acc[ROWS][PANELS][kParts] = {};
  for (int64_t g = 0; g < count; g++) {
    Affine affine[PANELS][kParts];
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
      for (int i = 0; i < kParts; i++) affine[p][i] = Affine(right[p * right_stride + g], i);
    for (int part = 0; part < kGroup / 8; part++) {
      Bits eight[PANELS][kParts];
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
        for (int i = 0; i < kParts; i++) eight[p][i] = load_raw<Bits>(right[p * right_stride + g].values[part] + i * kLanes);
#pragma GCC unroll 8
      for (int at = 0; at < 8; at++) {
        Acc w[PANELS][kParts];
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
          for (int i = 0; i < kParts; i++) w[p][i] = affine[p][i].of(eight[p][i], at);
        add_products<ROWS, PANELS>(acc, w, left + g * kGroup + part * 8 + at, left_stride);
      }
    }
  }
  put_sums<ROWS, PANELS>(acc, out);
}

// Pairs of integers, one pair per lane, the lower k in the lower half; and the sum of each lane's products.
#if defined(__AVX512BW__)
typedef __m512i Pairs;
KVFERRY_INLINE Pairs pairs_of(const Two8* right) { return _mm512_cvtepi8_epi16(load_raw<__m256i>(right)); }
KVFERRY_INLINE Pairs splat_pair(int32_t pair) { return _mm512_set1_epi32(pair); }
KVFERRY_INLINE Whole dot(Pairs a, Pairs b) { return (Whole)_mm512_madd_epi16(a, b); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
typedef __m256i Pairs;
KVFERRY_INLINE Pairs pairs_of(const Two8* right) { return _mm256_cvtepi8_epi16(load_raw<__m128i>(right)); }
KVFERRY_INLINE Pairs splat_pair(int32_t pair) { return _mm256_set1_epi32(pair); }
KVFERRY_INLINE Whole dot(Pairs a, Pairs b) { return (Whole)_mm256_madd_epi16(a, b); }
#else
typedef Whole Pairs;
KVFERRY_INLINE Pairs pairs_of(const Two8* right) {
  const Bits two = __builtin_convertvector(load_raw<typename Simd<kLanes>::H>(right), Bits);
  const Whole low = (Whole)(two << 24) >> 24, high = (Whole)(two << 16) >> 24;
  return (low & 0xffff) | (high << 16);
}
KVFERRY_INLINE Pairs splat_pair(int32_t pair) { return Whole{} + pair; }
KVFERRY_INLINE Whole dot(Pairs a, Pairs b) { return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16); }
#endif

// The stride of the left side is in groups.
template <int ROWS, int PANELS>
static inline void tile(const Rounded* left, int64_t left_stride, const Two8* right, int64_t right_stride, int64_t count,
                        float* out, Ahead ahead) {
  Acc acc[ROWS][PANELS][kParts] = {};
  for (int64_t g = 0; g < count; g++) {
    const Two8* group = right + g * Sides<Int8Dynamic>::kUnit;
    Whole sums[ROWS][PANELS][kParts] = {};
    for (int k = 0; k < kRounded / 2; k++) {
      ahead.fetch(g * (kRounded / 2) + k);
      Pairs w[PANELS][kParts];
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
        for (int i = 0; i < kParts; i++) w[p][i] = pairs_of(group + p * right_stride + k * kPanel + i * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        int32_t pair;
        std::memcpy(&pair, left[r * left_stride + g].values + 2 * k, sizeof pair);
        const Pairs x = splat_pair(pair);
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
          for (int i = 0; i < kParts; i++) sums[r][p][i] += dot(x, w[p][i]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const Acc scale = splat<kLanes>(left[r * left_stride + g].scale);
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
        for (int i = 0; i < kParts; i++) acc[r][p][i] += float_of(sums[r][p][i]) * scale;
    }
  }
  put_sums<ROWS, PANELS>(acc, out);
}

// A panel as [k][16] float32, without Int8's scales; k includes the padding of the last unit.
static inline void widen(const int8_t* panel, int64_t count, float* to) {
  for (int64_t at = 0; at < count * kPanel; at += kLanes) store<kLanes>(to + at, int8_of(panel + at));
}

static inline void widen(const Group4* panel, int64_t count, float* to) {
  for (int64_t g = 0; g < count; g++)
    for (int i = 0; i < kParts; i++) {
      const Affine affine(panel[g], i);
      for (int part = 0; part < kGroup / 8; part++) {
        const Bits eight = load_raw<Bits>(panel[g].values[part] + i * kLanes);
        for (int at = 0; at < 8; at++)
          store<kLanes>(to + (g * kGroup + part * 8 + at) * kPanel + i * kLanes, affine.of(eight, at));
      }
    }
}

}  // namespace kvferry

// The inner kernel of every matmul: a few rows times a few panels of 16 columns, each sum in order of k.
//
// A panel of float32 is [k][16]; one of bfloat16 is [k / 2][16] pairs (k, k + 1), the lower k in the lower half, an odd
// last value paired with zero. Panels of integers are in tile_quantized.h. Every result is one chain of multiply-adds
// over k starting at zero, however many rows and panels are computed together: a row's results do not depend on its
// neighbours.
#pragma once
#include <type_traits>

#include "simd.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace kvferry {

constexpr int kPanel = 16;
constexpr int kParts = kPanel / kLanes;  // vectors in a row of a panel
// Maximum rows of a tile: as many as leave registers for the right side (narrow weights need one more, for a mask).
constexpr int kMostRows = 6;
template <class K>
constexpr int tile_rows() {
  return kLanes == 16 || std::is_same_v<K, float> ? 6 : 5;
}
// Number of panels whose sums fit the registers, given the number of rows.
template <class K>
constexpr int panels_per_tile(int rows) {
  return kLanes == 16 ? 4 : rows == 1 ? 4 : rows == 2 || (rows == 3 && std::is_same_v<K, float>) ? 2 : 1;
}

// The element types of both sides and their units of k, for each kind K of weights.
template <class K>
struct Sides;
template <>
struct Sides<float> {
  typedef float Left;
  typedef float Right;
  static constexpr int kStep = 1;       // values of k in one unit of the right side
  static constexpr int kUnit = kPanel;  // values of Right in one unit of a panel
};
template <>
struct Sides<Bf16> {
#if defined(__AVX512BF16__)
  typedef Bf16 Left;
#else
  typedef float Left;  // converted once, by left_side
#endif
  typedef uint32_t Right;
  static constexpr int kStep = 2;
  static constexpr int kUnit = kPanel;
};

template <class K>
static inline int64_t units(int64_t k) {
  return (k + Sides<K>::kStep - 1) / Sides<K>::kStep;
}

typedef F<kLanes> Acc;

// Memory to prefetch: `step` bytes for each step of a kernel.
struct Ahead {
  const void* at;
  int64_t step;

  void fetch(int64_t k) const { __builtin_prefetch(static_cast<const char*>(at) + k * step, 0, 2); }
};

// Sums passed to a function stay in registers only if the call is inlined.
#define KVFERRY_INLINE static inline __attribute__((always_inline))

template <int ROWS, int PANELS>
KVFERRY_INLINE void put_sums(const Acc (&acc)[ROWS][PANELS][kParts], float* out) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
      for (int i = 0; i < kParts; i++) store<kLanes>(out + (r * PANELS + p) * kPanel + i * kLanes, acc[r][p][i]);
}

// Adds the products of one k: every row's value times one row of every panel.
template <int ROWS, int PANELS>
KVFERRY_INLINE void add_products(Acc (&acc)[ROWS][PANELS][kParts], const Acc (&w)[PANELS][kParts], const float* left,
                                int64_t left_stride) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    const Acc x = splat<kLanes>(left[r * left_stride]);
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
      for (int i = 0; i < kParts; i++) acc[r][p][i] += x * w[p][i];
  }
}

// left [ROWS] with a stride in values, right [PANELS] with a stride in units, `count` units of k -> out [ROWS][PANELS * 16]
template <int ROWS, int PANELS>
static inline void tile(const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t count,
                        float* out, Ahead ahead) {
  Acc acc[ROWS][PANELS][kParts] = {};
  for (int64_t k = 0; k < count; k++) {
    ahead.fetch(k);
    Acc w[PANELS][kParts];
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
      for (int i = 0; i < kParts; i++) w[p][i] = load<kLanes>(right + p * right_stride + k * kPanel + i * kLanes);
    add_products<ROWS, PANELS>(acc, w, left + k, left_stride);
  }
  put_sums<ROWS, PANELS>(acc, out);
}

#if defined(__AVX512BF16__)

template <int ROWS, int PANELS>
static inline void tile(const Bf16* left, int64_t left_stride, const uint32_t* right, int64_t right_stride,
                        int64_t count, float* out, Ahead ahead) {
  __m512 acc[ROWS][PANELS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) acc[r][p] = _mm512_setzero_ps();
  for (int64_t k = 0; k < count; k++) {
    ahead.fetch(k);
    __m512i w[PANELS];
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) w[p] = _mm512_loadu_si512(right + p * right_stride + k * kPanel);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      int32_t pair;
      std::memcpy(&pair, left + r * left_stride + 2 * k, sizeof pair);
      const __m512i x = _mm512_set1_epi32(pair);
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; p++) acc[r][p] = _mm512_dpbf16_ps(acc[r][p], (__m512bh)x, (__m512bh)w[p]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; p++) _mm512_storeu_ps(out + (r * PANELS + p) * kPanel, acc[r][p]);
}

#else

// One load yields two rows of a panel: upper halves are masked, lower halves shifted up.
template <int ROWS, int PANELS>
static inline void tile(const float* left, int64_t left_stride, const uint32_t* right, int64_t right_stride,
                        int64_t count, float* out, Ahead ahead) {
  Acc acc[ROWS][PANELS][kParts] = {};
  for (int64_t k = 0; k < count; k++) {
    ahead.fetch(k);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      Acc w[PANELS][kParts];
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
        for (int i = 0; i < kParts; i++) {
          const auto pair = load_raw<U<kLanes>>(right + p * right_stride + k * kPanel + i * kLanes);
          w[p][i] = (Acc)(odd ? pair & 0xffff0000u : pair << 16);
        }
      add_products<ROWS, PANELS>(acc, w, left + 2 * k + odd, left_stride);
    }
  }
  put_sums<ROWS, PANELS>(acc, out);
}

#endif

}  // namespace kvferry

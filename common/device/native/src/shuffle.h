// Shuffles between lanes of short vectors.
#pragma once
#include "simd.h"

namespace kvferry {

#if defined(__clang__)
#define KVFERRY_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KVFERRY_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Simd<8>::I{__VA_ARGS__})
#endif

static inline F<8> fold(F<8> v) { return v; }
static inline F<8> fold(F<16> v) {
  F<8> half[2];
  std::memcpy(half, &v, sizeof v);
  return half[0] + half[1];
}

static inline F<8> pair_sums(F<8> a, F<8> b) {
  return KVFERRY_SHUFFLE(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + KVFERRY_SHUFFLE(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}

// The lane sums of four vectors, adjacent in memory.
template <class V>
static inline void four_sums(V a, V b, V c, V d, float* out) {
  typedef float Four __attribute__((vector_size(16)));
  const F<8> all = pair_sums(pair_sums(fold(a), fold(b)), pair_sums(fold(c), fold(d)));
  Four half[2];
  std::memcpy(half, &all, sizeof all);
  const Four sums = half[0] + half[1];
  std::memcpy(out, &sums, sizeof sums);
}

// Transposes eight rows of eight four-byte units: to[i * to_stride + r] = rows[r][i].
static inline void transpose_eight(const uint32_t* const* rows, int64_t at, uint32_t* to, int64_t to_stride) {
  U<8> v[8], t[8];
  for (int r = 0; r < 8; r++) v[r] = load_raw<U<8>>(rows[r] + at);
  for (int r = 0; r < 8; r += 2) {
    t[r] = KVFERRY_SHUFFLE(v[r], v[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[r + 1] = KVFERRY_SHUFFLE(v[r], v[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int r = 0; r < 8; r += 4) {
    v[r] = KVFERRY_SHUFFLE(t[r], t[r + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    v[r + 1] = KVFERRY_SHUFFLE(t[r], t[r + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    v[r + 2] = KVFERRY_SHUFFLE(t[r + 1], t[r + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    v[r + 3] = KVFERRY_SHUFFLE(t[r + 1], t[r + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int r = 0; r < 4; r++) {
    const U<8> low = KVFERRY_SHUFFLE(v[r], v[r + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    const U<8> high = KVFERRY_SHUFFLE(v[r], v[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    std::memcpy(to + r * to_stride, &low, sizeof low);
    std::memcpy(to + (r + 4) * to_stride, &high, sizeof high);
  }
}

}  // namespace kvferry

// Short vectors of float32 and bfloat16 for the instruction set of the build. Knows no memory layout.
//
// The compiler must not reorder sums (no -ffast-math): the order of summation within a row is part of the kernels'
// guarantees.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace kvferry {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

#if defined(__AVX512BF16__)
constexpr bool kDotBf16 = true;  // the CPU multiplies pairs of bfloat16 and adds them up in float32
#else
constexpr bool kDotBf16 = false;
#endif

struct Bf16 {
  uint16_t bits;
};

template <int L>
struct Simd {
  typedef float F __attribute__((vector_size(L * 4)));
  typedef int32_t I __attribute__((vector_size(L * 4)));
  typedef uint32_t U __attribute__((vector_size(L * 4)));
  typedef uint16_t H __attribute__((vector_size(L * 2)));
};
template <int L>
using F = typename Simd<L>::F;
template <int L>
using U = typename Simd<L>::U;

template <class V>
static inline V load_raw(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <int L>
static inline F<L> splat(float x) {
  return x - F<L>{};
}

template <int L>
static inline F<L> load(const float* p) {
  return load_raw<F<L>>(p);
}

template <int L>
static inline F<L> load(const Bf16* p) {
  const auto half = load_raw<typename Simd<L>::H>(p);
  return (F<L>)(__builtin_convertvector(half, U<L>) << 16);
}

template <int L>
static inline void store(float* p, F<L> v) {
  std::memcpy(p, &v, sizeof v);
}

// Rounds to nearest, ties to even; NaN stays NaN. On CPUs with a matrix unit, which flushes subnormals to zero, this uses
// the CPU's own instruction, which does the same.
template <int L>
static inline void store(Bf16* p, F<L> v) {
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
  if constexpr (L == 16) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(p, &rounded, sizeof rounded);
    return;
  }
#endif
  const U<L> u = (U<L>)v;
  const U<L> rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U<L> kept = v == v ? rounded : (u >> 16) | 0x40u;
  const auto half = __builtin_convertvector(kept, typename Simd<L>::H);
  std::memcpy(p, &half, sizeof half);
}

static inline float to_float(float x) { return x; }
static inline float to_float(Bf16 x) {
  const uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}
static inline void put(float* p, float x) { *p = x; }
static inline void put(Bf16* p, float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  p->bits = x == x ? uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16) : uint16_t((u >> 16) | 0x40u);
}

// Adds the lanes in a fixed order.
template <int L>
static inline float sum_lanes(F<L> v) {
  float s = 0;
  for (int i = 0; i < L; i++) s += v[i];
  return s;
}

template <int L>
static inline F<L> larger(F<L> a, F<L> b) {
  return a < b ? b : a;
}

template <int L>
static inline float max_lanes(F<L> v) {
  float m = v[0];
  for (int i = 1; i < L; i++) m = m < v[i] ? v[i] : m;
  return m;
}

// exp to about one unit in the last place; 0 below the smallest normal result, infinity above the largest, NaN stays NaN.
// Cody-Waite reduction by ln 2 and a polynomial of degree 6 (the minimax coefficients of Cephes' expf).
template <int L>
static inline F<L> exp_of(F<L> x) {
  const F<L> low = splat<L>(-87.33654f), high = splat<L>(88.72283f);
  F<L> c = x < low ? low : x;  // this operand order lets NaN pass through
  c = c > high ? high : c;
  const F<L> shifter = splat<L>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F<L> shifted = c * 1.44269504088896341f + shifter;
  const F<L> n = shifted - shifter;
  const F<L> r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
  F<L> p = splat<L>(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#if defined(__AMX_BF16__) && defined(__AVX512F__)
  if constexpr (L == 16) {  // the same bits with one instruction; subnormal results are masked out
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ);
    const F<L> y = (F<L>)_mm512_maskz_scalef_ps(kept, (__m512)p, (__m512)n);
    return x > high ? splat<L>(INFINITY) : y;
  }
#endif
  // 2^n as two factors, so that the largest n does not overflow.
  const typename Simd<L>::I whole = (typename Simd<L>::I)shifted - (typename Simd<L>::I)shifter;
  const typename Simd<L>::I half = whole >> 1;
  const F<L> first = (F<L>)((half + 127) << 23), second = (F<L>)((whole - half + 127) << 23);
  F<L> y = p * first * second;
  y = x < low ? splat<L>(0.0f) : y;
  return x > high ? splat<L>(INFINITY) : y;
}

static inline float exp_of_one(float x) { return exp_of<8>(splat<8>(x))[0]; }

}  // namespace kvferry

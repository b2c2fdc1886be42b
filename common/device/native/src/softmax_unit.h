// One softmax row between the two matmuls of a prompt's attention on the matrix unit: scores to weights.
//
// The weights are rounded to bfloat16, so a shorter polynomial than that of `exp_of` is precise enough. Sums are kept per
// lane: a position adds to the same lane in every chunk.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "tile_matrix.h"

namespace kvferry {

#if defined(KVFERRY_MATRIX_UNIT)

constexpr float kLog2E = 1.44269504088896341f;

// 2^x with relative error 7e-6 for x <= 0; 0 below -125, NaN stays NaN. Subnormal results are masked before they are
// computed: each would take as long as a hundred normal ones.
static inline __m512 exp2_of(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(0.00965671f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.05583828f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.2402253f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69313673f));
  return _mm512_maskz_scalef_ps(normal, _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f)), n);
}

// A row's running state: largest score so far (times `scale`), sum of weights per lane, weighted sum of values.
struct RowState {
  float* largest;
  float* total;  // [16]
  float* sums;   // [size]
  int64_t size;
};

static inline void scale_row(const RowState& row, float kept) {
  const __m512 factor = _mm512_set1_ps(kept);
  _mm512_storeu_ps(row.total, _mm512_mul_ps(_mm512_loadu_ps(row.total), factor));
  for (int64_t d = 0; d < row.size; d += kPanel)
    _mm512_storeu_ps(row.sums + d, _mm512_mul_ps(_mm512_loadu_ps(row.sums + d), factor));
}

// Sixteen scores from j on; minus infinity for those outside [from, to). `ALL`: none is outside.
template <bool ALL>
static inline __m512 seen_scores(const float* scores, int64_t j, int64_t from, int64_t to) {
  if constexpr (ALL) return _mm512_loadu_ps(scores + j);
  const auto below = [j](int64_t end) { return (uint32_t(1) << std::clamp<int64_t>(end - j, 0, kPanel)) - 1; };
  return _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), __mmask16(below(to) & ~below(from)), scores + j);
}

template <bool ALL>
static inline void weigh_seen(const float* scores, Bf16* weights, int64_t from, int64_t to, int64_t width, float scale,
                              const RowState& row) {
  __m512 most = seen_scores<ALL>(scores, 0, from, to);
  for (int64_t j = kPanel; j < width; j += kPanel) most = _mm512_max_ps(most, seen_scores<ALL>(scores, j, from, to));
  const float before = *row.largest, largest = std::max(before, _mm512_reduce_max_ps(most) * scale);
  if (largest != before) {
    scale_row(row, _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(before - largest))));
    *row.largest = largest;
  }
  const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(largest);
  __m512 sum = _mm512_loadu_ps(row.total);
  for (int64_t j = 0; j < width; j += kPanel) {
    const __m512 weight = exp2_of(_mm512_fmsub_ps(seen_scores<ALL>(scores, j, from, to), factor, shift));
    sum = _mm512_add_ps(sum, weight);
    const __m256bh rounded = _mm512_cvtneps_pbh(weight);
    std::memcpy(static_cast<void*>(weights + j), &rounded, sizeof rounded);
  }
  _mm512_storeu_ps(row.total, sum);
}

// scores [width], visible in [from, to) -> weights [width]; width: a multiple of 32. `scale` includes log2(e).
static inline void weigh_row(const float* scores, Bf16* weights, int64_t from, int64_t to, int64_t width, float scale,
                             const RowState& row) {
  if (from >= to) std::memset(static_cast<void*>(weights), 0, uint64_t(width) * sizeof(Bf16));
  else if (from == 0 && to == width) weigh_seen<true>(scores, weights, from, to, width, scale, row);
  else weigh_seen<false>(scores, weights, from, to, width, scale, row);
}

#endif

}  // namespace kvferry

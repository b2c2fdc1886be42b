// Attention of one new token: every key and value is read once, for all query heads that share them.
#include <algorithm>

#include "attention.h"
#include "attention_unit.h"
#include "pool.h"
#include "shuffle.h"

namespace kvferry {
namespace {

// Query rows computed together: as many as leave enough registers for their sums.
int64_t rows_together(int64_t group) {
  if (kLanes == 16 && group % 4 == 0) return 4;
  return group % 3 == 0 ? 3 : group % 2 == 0 ? 2 : std::min<int64_t>(group, 3);
}

// Rows of the cache that are read next; prefetched one by one during the computation.
template <class T>
struct RowsAhead {
  const T* rows = nullptr;
  const int64_t* offsets = nullptr;
  int64_t count = 0, size = 0;

  void fetch(int64_t j) const {
    if (j >= count) return;
    const char* row = reinterpret_cast<const char*>(rows + offsets[j]);
    for (int64_t i = 0; i < size * int64_t(sizeof(T)); i += 64) __builtin_prefetch(row + i, 0, 2);
  }
};

// query [R][size] times four keys -> scores [R][...], four adjacent ones each.
template <class T, int L, int R>
inline void score_four(const float* query, const T* const (&keys)[4], int64_t size, float* scores) {
  F<L> sums[R][4] = {};
  for (int64_t d = 0; d < size; d += L) {
    // The queries stay in registers while the keys stream through: sums, queries and one key fill the registers.
    F<L> q[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) q[r] = load<L>(query + r * size + d);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const F<L> k = load<L>(keys[i] + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r][i] += q[r] * k;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) four_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3], scores + r * kDecodePart);
}

template <class T, int L, int R>
void score(const Attention<T>& a, const float* query, const int64_t* offsets, int64_t count, float* scores,
           const RowsAhead<T>& ahead) {
  for (int64_t j = 0; j < count; j += 4) {
    const T* keys[4];
    // Past the end the last key is repeated: no foreign memory is read, and `weigh` overwrites these scores.
    for (int64_t i = 0; i < 4; i++) {
      keys[i] = a.keys + offsets[std::min(j + i, count - 1)];
      ahead.fetch(j + i);
    }
    score_four<T, L, R>(query, keys, a.size, scores + j);
  }
}

// Scores to weights: subtracts the largest score, exponentiates; returns the largest score and the weights' sum.
inline void weigh(float* scores, int64_t count, float& largest, float& total) {
  for (int64_t j = count; j < (count + kLanes - 1) / kLanes * kLanes; j++) scores[j] = -INFINITY;
  F<kLanes> most = splat<kLanes>(-INFINITY);
  for (int64_t j = 0; j < count; j += kLanes) most = larger<kLanes>(most, load<kLanes>(scores + j));
  largest = max_lanes<kLanes>(most);
  F<kLanes> sum = {};
  for (int64_t j = 0; j < count; j += kLanes) {
    const F<kLanes> weight = exp_of<kLanes>(load<kLanes>(scores + j) - largest);
    store<kLanes>(scores + j, weight);
    sum += weight;
  }
  total = sum_lanes<kLanes>(sum);
}

template <class T, int L, int R, int V>
inline void gather_values(const T* values, const int64_t* offsets, int64_t count, const float* weights, float* out,
                          int64_t out_stride, const RowsAhead<T>& ahead) {
  F<L> sums[R][V] = {};
  for (int64_t j = 0; j < count; j++) {
    ahead.fetch(j);
    const T* value = values + offsets[j];
    F<L> w[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) w[r] = splat<L>(weights[r * kDecodePart + j]);
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) {
      const F<L> v = load<L>(value + i * L);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r][i] += w[r] * v;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) store<L>(out + r * out_stride + i * L, sums[r][i]);
}

template <class T>
struct Workspace {
  float *query, *scores;
  int64_t* offsets;
  RowsAhead<T> values, keys;  // this part's values, the next part's keys
};

// Query rows [0, R) of `query` over `count` keys -> out [R][size + 2].
template <class T, int L, int R>
void attend_group(const Attention<T>& a, const float* query, const Workspace<T>& work, int64_t count, float* out) {
  const int64_t stride = a.size + 2;
  const bool first = query == work.query;
  score<T, L, R>(a, query, work.offsets, count, work.scores, first ? work.values : RowsAhead<T>{});
  for (int r = 0; r < R; r++)
    weigh(work.scores + r * kDecodePart, count, out[r * stride + a.size], out[r * stride + a.size + 1]);
  constexpr int kWide = R == 1 ? 8 : 4;
  int64_t d = 0;
  for (; d + kWide * L <= a.size; d += kWide * L)
    gather_values<T, L, R, kWide>(a.values + d, work.offsets, count, work.scores, out + d, stride,
                                  first && d == 0 ? work.keys : RowsAhead<T>{});
  for (; d < a.size; d += L)
    gather_values<T, L, R, 1>(a.values + d, work.offsets, count, work.scores, out + d, stride, RowsAhead<T>{});
}

template <class T, int L>
void attend_all(const Attention<T>& a, const Workspace<T>& work, int64_t count, float* out) {
  const int64_t group = a.group(), together = rows_together(group), stride = a.size + 2;
  for (int64_t r = 0; r < group; r += together) {
    const float* query = work.query + r * a.size;
    switch (std::min(together, group - r)) {
      case 1: attend_group<T, L, 1>(a, query, work, count, out + r * stride); break;
      case 2: attend_group<T, L, 2>(a, query, work, count, out + r * stride); break;
      case 3: attend_group<T, L, 3>(a, query, work, count, out + r * stride); break;
      default: attend_group<T, L, 4>(a, query, work, count, out + r * stride);
    }
  }
}

template <class T>
T* output(const Attention<T>& a, int64_t sequence, int64_t head) {
  return a.out + (a.batch.starts[sequence] * a.heads + head * a.group()) * a.size;
}

template <class T>
void put_row(const float* sums, float total, int64_t size, T* out) {
  const float scale = 1.0f / total;
  for (int64_t d = 0; d < size; d += 8) store<8>(out + d, load<8>(sums + d) * scale);
}

// Computes a whole part with the matrix unit; false if it does not support the shape.
template <class T>
bool attend_by_unit(const Attention<T>& a, const T* query, const Workspace<T>& work, int64_t count, float* out) {
#if defined(KVFERRY_MATRIX_UNIT)
  if constexpr (std::is_same_v<T, Bf16>) {
    if (!fits_unit(a)) return false;
    const int64_t stride = a.size + 2;
    const UnitAttention unit(a, work.offsets, count);
    unit.score(query, work.scores, [&](int64_t j) { work.values.fetch(j); });
    for (int64_t r = 0; r < a.group(); r++)
      weigh(work.scores + r * kDecodePart, count, out[r * stride + a.size], out[r * stride + a.size + 1]);
    unit.gather(work.scores, out, stride, [&](int64_t j) { work.keys.fetch(j); });
    return true;
  }
#endif
  return false;
}

// The positions [first, end) of a part that are visible to its token.
struct Span {
  int64_t first, end;
  int64_t count() const { return end - first; }
};

template <class T>
Span span_of(const Attention<T>& a, const DecodePart& part) {
  const int64_t length = a.batch.lengths[part.sequence], start = part.part * kDecodePart;
  return {std::max(start, a.first_visible(length - 1)), std::min(start + kDecodePart, length)};
}

template <class T>
RowsAhead<T> keys_ahead(const Attention<T>& a, const DecodePart& next, int64_t* offsets) {
  const Span span = span_of(a, next);
  find_offsets(a, next.sequence, next.head, span.first, span.count(), offsets);
  return {a.keys, offsets, span.count(), a.size};
}

}  // namespace

template <class T>
void attend_decode(const Attention<T>& a, const DecodePart& own, const DecodePart* next, float* parts) {
  const int64_t group = a.group(), stride = a.size + 2;
  const Span span = span_of(a, own);
  const int64_t count = span.count();
  float* memory = static_cast<float*>(
      scratch(kSlotItem, uint64_t(group * (a.size + kDecodePart + stride) + 4 * kDecodePart) * sizeof(float)));
  Workspace<T> work = {};
  work.offsets = reinterpret_cast<int64_t*>(memory);
  work.query = memory + 4 * kDecodePart;
  work.scores = work.query + group * a.size;
  float* out = parts ? parts : work.scores + group * kDecodePart;
  find_offsets(a, own.sequence, own.head, span.first, count, work.offsets);
  work.values = {a.values, work.offsets, count, a.size};
  if (next) work.keys = keys_ahead(a, *next, work.offsets + kDecodePart);
  const T* query = a.query + a.batch.starts[own.sequence] * a.query_stride + own.head * group * a.size;
  if (!attend_by_unit(a, query, work, count, out)) {
    for (int64_t i = 0; i < group * a.size; i += 8) store<8>(work.query + i, load<8>(query + i) * a.scale);
    if (kLanes == 16 && a.size % 16 == 0) attend_all<T, kLanes>(a, work, count, out);
    else attend_all<T, 8>(a, work, count, out);
  }
  for (int64_t j = count; j < work.keys.count; j++) work.keys.fetch(j);
  if (parts) return;
  for (int64_t r = 0; r < group; r++)
    put_row(out + r * stride, out[r * stride + a.size + 1], a.size, output(a, own.sequence, own.head) + r * a.size);
}

template <class T>
void join_parts(const Attention<T>& a, int64_t sequence, int64_t head, const float* parts, int64_t count) {
  const int64_t group = a.group(), stride = a.size + 2, part_stride = group * stride;
  float* sums = static_cast<float*>(scratch(kSlotSmall, uint64_t(a.size) * sizeof(float)));
  for (int64_t r = 0; r < group; r++) {
    const float* own = parts + r * stride;
    float largest = own[a.size];
    for (int64_t p = 1; p < count; p++) largest = std::max(largest, own[p * part_stride + a.size]);
    std::fill(sums, sums + a.size, 0.0f);
    float total = 0;
    for (int64_t p = 0; p < count; p++) {
      const float* part = own + p * part_stride;
      const float weight = exp_of_one(part[a.size] - largest);
      total += weight * part[a.size + 1];
      for (int64_t d = 0; d < a.size; d += 8) store<8>(sums + d, load<8>(sums + d) + weight * load<8>(part + d));
    }
    put_row(sums, total, a.size, output(a, sequence, head) + r * a.size);
  }
}

template void attend_decode<float>(const Attention<float>&, const DecodePart&, const DecodePart*, float*);
template void attend_decode<Bf16>(const Attention<Bf16>&, const DecodePart&, const DecodePart*, float*);
template void join_parts<float>(const Attention<float>&, int64_t, int64_t, const float*, int64_t);
template void join_parts<Bf16>(const Attention<Bf16>&, int64_t, int64_t, const float*, int64_t);

}  // namespace kvferry

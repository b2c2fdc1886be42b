// Attention of several new tokens of one sequence: two small matmuls per block of keys, with an online softmax.
//
// Blocks of keys start at multiples of kKeys positions in every chunk, so a token's result does not depend on how its
// prompt was divided. A masked position gets a weight of exactly zero, but zero times NaN is NaN: a NaN among a prompt's
// values reaches earlier tokens of the same prompt that share its chunk and its block of keys. It does not reach other
// sequences.
#include <algorithm>

#include "attention.h"
#include "pool.h"
#include "shuffle.h"
#include "softmax_unit.h"
#include "tile_matrix.h"
#include "tile_dispatch.h"

namespace kvferry {
namespace {

constexpr int64_t kKeys = 128;
constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Whether prompts use the matrix unit; depends on the model's shape alone.
template <class T>
bool fits_unit(const Attention<T>& a) {
  return std::is_same_v<T, Bf16> && has_matrix_unit() && a.size % (2 * kMatrixPairs) == 0;
}

// Scratch memory of one piece of work.
template <class T>
struct Workspace {
  typedef typename Sides<T>::Left Left;
  typedef typename Sides<T>::Right Right;
  int64_t rows, size, padded;
  Left* query;     // [rows][size]
  Left* weights;   // [rows][kKeys]
  Right* keys;     // panels of 16 keys, over the head's size
  Right* values;   // panels of 16 values of the head, over the keys
  float* scores;   // [rows][kKeys]
  float* sums;     // [rows][padded]
  float* largest;  // [rows]
  float* total;    // [rows]
  float* lanes;    // [rows][16]: the matrix unit's variant of `total`, per lane
  int64_t* offsets;  // [kKeys]

  Workspace(int64_t rows_, int64_t size_) : rows(rows_), size(size_), padded(round_up(size_, kPanel)) {
    const int64_t whole = round_up(rows, kMatrixRows);
    const int64_t bytes[] = {kKeys * 8, whole * size * 4, whole * kKeys * 4, kKeys * size * 4, kKeys * padded * 4,
                             whole * kKeys * 4, whole * padded * 4, rows * 4, rows * 4, rows * kPanel * 4};
    int64_t at[11] = {};
    for (int i = 0; i < 10; i++) at[i + 1] = at[i] + round_up(bytes[i], 64);
    char* memory = static_cast<char*>(scratch(kSlotItem, uint64_t(at[10])));
    offsets = reinterpret_cast<int64_t*>(memory);
    query = reinterpret_cast<Left*>(memory + at[1]);
    weights = reinterpret_cast<Left*>(memory + at[2]);
    keys = reinterpret_cast<Right*>(memory + at[3]);
    values = reinterpret_cast<Right*>(memory + at[4]);
    scores = reinterpret_cast<float*>(memory + at[5]);
    sums = reinterpret_cast<float*>(memory + at[6]);
    largest = reinterpret_cast<float*>(memory + at[7]);
    total = reinterpret_cast<float*>(memory + at[8]);
    lanes = reinterpret_cast<float*>(memory + at[9]);
  }
};

// Packs keys into panels of sixteen; pads with zeros after the last key.
template <class T>
void pack_keys(const T* keys, const int64_t* offsets, int64_t count, int64_t size, typename Sides<T>::Right* to) {
  const int64_t width = units<T>(size);
  for (int64_t first = 0; first < count; first += kPanel, to += width * kPanel) {
    const uint32_t* rows[kPanel];
    auto* out = reinterpret_cast<uint32_t*>(to);
    for (int64_t i = 0; i < kPanel; i++)
      rows[i] = reinterpret_cast<const uint32_t*>(keys + offsets[std::min(first + i, count - 1)]);
    int64_t k = 0;
    for (; k + 8 <= width; k += 8)
      for (int half = 0; half < kPanel; half += 8) transpose_eight(rows + half, k, out + k * kPanel + half, kPanel);
    for (; k < width; k++)
      for (int i = 0; i < kPanel; i++) out[k * kPanel + i] = rows[i][k];
    for (int64_t i = count - first; i < kPanel; i++)
      for (k = 0; k < width; k++) out[k * kPanel + i] = 0;
  }
}

// Packs values into panels of `width` units; pads with zeros after the last key.
inline void pack_values(const float* values, const int64_t* offsets, int64_t count, int64_t size, int64_t width,
                        float* to) {
  for (int64_t d = 0; d < size; d += 8) {
    float* panel = to + d / kPanel * width * kPanel + d % kPanel;
    for (int64_t j = 0; j < count; j++) store<8>(panel + j * kPanel, load<8>(values + offsets[j] + d));
  }
}

inline void pack_values(const Bf16* values, const int64_t* offsets, int64_t count, int64_t size, int64_t width,
                        uint32_t* to) {
  for (int64_t d = 0; d < size; d += 8) {
    uint32_t* panel = to + d / kPanel * width * kPanel + d % kPanel;
    for (int64_t j = 0; j < count; j += 2) {
      const auto low = load_raw<Simd<8>::H>(values + offsets[j] + d);
      const auto high = j + 1 < count ? load_raw<Simd<8>::H>(values + offsets[j + 1] + d) : Simd<8>::H{};
      const U<8> pairs = __builtin_convertvector(low, U<8>) | __builtin_convertvector(high, U<8>) << 16;
      std::memcpy(panel + j / 2 * kPanel, &pairs, sizeof pairs);
    }
    for (int64_t pair = units<Bf16>(count); pair < width; pair++) std::fill_n(panel + pair * kPanel, 8, 0u);
  }
}

#if defined(KVFERRY_MATRIX_UNIT)

// left [rows] times all panels -> out [rows][out_row]; rows, panels and `count` must be multiples of a tile.
template <bool ADD>
void multiply_by_unit(MatrixUnit& unit, const Bf16* left, int64_t left_stride, int64_t rows, const uint32_t* right,
                      int64_t count, int64_t panels, float* out, int64_t out_row) {
  tiles_see_memory();
  for (int64_t panel = 0; panel < panels; panel += 2)
    for (int64_t row = 0; row < rows; row += kMatrixRows)
      unit.multiply_into<ADD>(kMatrixRows, left + row * left_stride, left_stride, right + panel * count * kPanel,
                              count * kPanel, count, out + row * out_row + panel * kPanel, out_row);
  tiles_see_memory();
}

// As `take_keys`. Every row is computed the same way, however many there are; padding after the last row is computed
// and discarded.
void take_keys_by_unit(const Attention<Bf16>& a, Workspace<Bf16>& work, int64_t from, int64_t count, int64_t position) {
  const int64_t width = round_up(count, 2 * kMatrixPairs), rows = round_up(work.rows, kMatrixRows), group = a.group();
  MatrixUnit unit;
  pack_keys(a.keys, work.offsets, count, a.size, work.keys);
  multiply_by_unit<false>(unit, work.query, a.size, rows, work.keys, units<Bf16>(a.size), width / kPanel, work.scores,
                          kKeys);
  for (int64_t row = 0; row < work.rows; row++) {
    const int64_t own = position + row / group;
    weigh_row(work.scores + row * kKeys, work.weights + row * kKeys,
              std::clamp<int64_t>(a.first_visible(own) - from, 0, count), std::clamp<int64_t>(own + 1 - from, 0, count),
              width, a.scale * kLog2E,
              {work.largest + row, work.lanes + row * kPanel, work.sums + row * work.padded, work.padded});
  }
  pack_values(a.values, work.offsets, count, a.size, width / 2, work.values);
  multiply_by_unit<true>(unit, work.weights, kKeys, rows, work.values, width / 2, work.padded / kPanel, work.sums,
                         work.padded);
}

#endif

// left [rows] times all panels; calls put(tile values, row, first column, columns) for each result.
template <class T, class Put>
void multiply(const typename Sides<T>::Left* left, int64_t left_stride, int64_t rows,
              const typename Sides<T>::Right* right, int64_t count, int64_t panels, Put&& put) {
  const int64_t tiles = (rows + tile_rows<T>() - 1) / tile_rows<T>(), panel_units = count * kPanel;
  alignas(64) float tile[kTileValues];
  for (int64_t t = 0, row = 0; t < tiles; t++) {
    const int height = int(rows * (t + 1) / tiles - rows * t / tiles), together = panels_per_tile<T>(height);
    for (int64_t panel = 0; panel < panels;) {
      const int width = panel + together <= panels ? together : 1;
      dispatch_tile<T>(height, width, left + row * left_stride, left_stride, right + panel * panel_units, panel_units, count,
                 tile, {right, 0});  // no prefetch: everything is in the cache
      for (int r = 0; r < height; r++) put(tile + r * width * kPanel, row + r, panel * kPanel, width * kPanel);
      panel += width;
    }
    row += height;
  }
}

// Converts one row's scores to weights; updates the largest score and the sum, and rescales the earlier sums.
template <class T>
void weigh(Workspace<T>& work, int64_t row, int64_t from, int64_t to, int64_t width, float scale) {
  float* scores = work.scores + row * kKeys;
  auto* weights = work.weights + row * kKeys;
  if (from >= to) {
    for (int64_t j = 0; j < width; j += kLanes) store<kLanes>(weights + j, F<kLanes>{});
    return;
  }
  std::fill(scores, scores + from, -INFINITY);
  std::fill(scores + to, scores + width, -INFINITY);
  F<kLanes> most = splat<kLanes>(-INFINITY);
  for (int64_t j = 0; j < width; j += kLanes) most = larger<kLanes>(most, load<kLanes>(scores + j));
  const float before = work.largest[row], largest = std::max(before, max_lanes<kLanes>(most) * scale);
  F<kLanes> sum = {};
  for (int64_t j = 0; j < width; j += kLanes) {
    const F<kLanes> weight = exp_of<kLanes>(load<kLanes>(scores + j) * scale - largest);
    sum += weight;
    store<kLanes>(weights + j, weight);
  }
  if (largest != before) {
    const float kept = exp_of_one(before - largest);
    work.total[row] *= kept;
    float* sums = work.sums + row * work.padded;
    for (int64_t d = 0; d < work.padded; d += kLanes) store<kLanes>(sums + d, load<kLanes>(sums + d) * kept);
  }
  work.largest[row] = largest;
  work.total[row] += sum_lanes<kLanes>(sum);
}

template <class T>
void begin(const Attention<T>& a, Workspace<T>& work, const T* query) {
  const int64_t group = a.group();
  for (int64_t row = 0; row < work.rows; row++) {
    const T* from = query + row / group * a.query_stride + row % group * a.size;
    for (int64_t d = 0; d < a.size; d += 8) store<8>(work.query + row * a.size + d, load<8>(from + d));
  }
  std::fill(work.sums, work.sums + work.rows * work.padded, 0.0f);
  std::fill(work.total, work.total + work.rows, 0.0f);
  std::fill(work.lanes, work.lanes + work.rows * kPanel, 0.0f);
  std::fill(work.largest, work.largest + work.rows, -INFINITY);
}

template <class T>
void end(const Attention<T>& a, const Workspace<T>& work, T* out) {
  const int64_t group = a.group();
  for (int64_t row = 0; row < work.rows; row++) {
    const float scale = 1.0f / work.total[row];
    T* to = out + (row / group * a.heads + row % group) * a.size;
    for (int64_t d = 0; d < a.size; d += 8) store<8>(to + d, load<8>(work.sums + row * work.padded + d) * scale);
  }
}

// Keys [from, from + count) for all rows; row 0 is at `position`.
template <class T>
void take_keys(const Attention<T>& a, Workspace<T>& work, int64_t from, int64_t count, int64_t position) {
  const int64_t value_units = units<T>(count), width = round_up(count, kPanel), group = a.group();
  pack_keys(a.keys, work.offsets, count, a.size, work.keys);
  multiply<T>(work.query, a.size, work.rows, work.keys, units<T>(a.size), width / kPanel,
              [&](const float* tile, int64_t row, int64_t column, int64_t columns) {
                std::memcpy(work.scores + row * kKeys + column, tile, columns * sizeof(float));
              });
  for (int64_t row = 0; row < work.rows; row++) {
    const int64_t own = position + row / group;
    weigh(work, row, std::clamp<int64_t>(a.first_visible(own) - from, 0, count),
          std::clamp<int64_t>(own + 1 - from, 0, count), width, a.scale);
  }
  pack_values(a.values, work.offsets, count, a.size, value_units, work.values);
  multiply<T>(work.weights, kKeys, work.rows, work.values, value_units, work.padded / kPanel,
              [&](const float* tile, int64_t row, int64_t column, int64_t columns) {
                float* sums = work.sums + row * work.padded + column;
                for (int64_t d = 0; d < columns; d += kLanes)
                  store<kLanes>(sums + d, load<kLanes>(sums + d) + load<kLanes>(tile + d));
              });
}

}  // namespace

template <class T>
void attend_rows(const Attention<T>& a, int64_t sequence, int64_t head, int64_t first, int64_t end_token) {
  const int64_t start = a.batch.starts[sequence], tokens = a.batch.starts[sequence + 1] - start;
  const int64_t position = a.batch.lengths[sequence] - tokens + first, last = position + end_token - first;
  Workspace<T> work((end_token - first) * a.group(), a.size);
  const bool by_unit = fits_unit(a);
  begin(a, work, a.query + (start + first) * a.query_stride + head * a.group() * a.size);
  // If a head's size is not a multiple of a panel, the last panel stays half empty.
  if (a.size % kPanel) std::fill(work.values, work.values + kKeys * work.padded, typename Sides<T>::Right(0));
  for (int64_t from = a.first_visible(position) / kKeys * kKeys; from < last; from += kKeys) {
    const int64_t count = std::min(kKeys, last - from);
    find_offsets(a, sequence, head, from, count, work.offsets);
#if defined(KVFERRY_MATRIX_UNIT)
    if constexpr (std::is_same_v<T, Bf16>)
      if (by_unit) {
        take_keys_by_unit(a, work, from, count, position);
        continue;
      }
#endif
    take_keys(a, work, from, count, position);
  }
  if (by_unit)
    for (int64_t row = 0; row < work.rows; row++) work.total[row] = sum_lanes<16>(load<16>(work.lanes + row * kPanel));
  end(a, work, a.out + ((start + first) * a.heads + head * a.group()) * a.size);
}

template void attend_rows<float>(const Attention<float>&, int64_t, int64_t, int64_t, int64_t);
template void attend_rows<Bf16>(const Attention<Bf16>&, int64_t, int64_t, int64_t, int64_t);

}  // namespace kvferry

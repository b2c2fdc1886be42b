// Attention of several new tokens of one sequence: two small matmuls for every block of keys, softmax carried along.
//
// Blocks of keys begin at multiples of kKeys positions, whatever the chunk: a token's result does not depend on how its
// prompt was cut. What a token must not see gets a weight of exactly zero, times which not-a-number stays what it is: in a
// value of the same prompt it reaches tokens before it whose chunk and block of keys have it. Other sequences it does not
// reach.
#include <algorithm>

#include "attention.h"
#include "pool.h"
#include "shuffle.h"
#include "softmax_unit.h"
#include "tile_matrix.h"
#include "tile_of.h"

namespace kvferry {
namespace {

constexpr int64_t kKeys = 128;
constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Whether a model's prompts pass through the matrix unit: by its shape alone.
template <class T>
bool fits_unit(const Attention<T>& a) {
  return std::is_same_v<T, Bf16> && has_matrix_unit() && a.size % (2 * kMatrixPairs) == 0;
}

// Memory of one piece of work.
template <class T>
struct Room {
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
  float* lanes;    // [rows][16]: the total of the matrix unit's way, by lanes
  int64_t* offsets;  // [kKeys]

  Room(int64_t rows_, int64_t size_) : rows(rows_), size(size_), padded(round_up(size_, kPanel)) {
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

// Sixteen keys to a panel; places behind the last key get zeros.
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

// Panels of `width` units; places behind the last key get zeros.
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

// left [rows] times all panels -> out [rows][out_row]; rows, panels and `count` fill whole tiles.
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

// As `take_keys`. Every row takes the same way through the unit, however many there are; what is behind the last row
// is computed and forgotten.
void take_keys_by_unit(const Attention<Bf16>& a, Room<Bf16>& room, int64_t from, int64_t count, int64_t position) {
  const int64_t width = round_up(count, 2 * kMatrixPairs), rows = round_up(room.rows, kMatrixRows), group = a.group();
  MatrixUnit unit;
  pack_keys(a.keys, room.offsets, count, a.size, room.keys);
  multiply_by_unit<false>(unit, room.query, a.size, rows, room.keys, units<Bf16>(a.size), width / kPanel, room.scores,
                          kKeys);
  for (int64_t row = 0; row < room.rows; row++) {
    const int64_t own = position + row / group;
    weigh_row(room.scores + row * kKeys, room.weights + row * kKeys,
              std::clamp<int64_t>(a.first_visible(own) - from, 0, count), std::clamp<int64_t>(own + 1 - from, 0, count),
              width, a.scale * kLog2E,
              {room.largest + row, room.lanes + row * kPanel, room.sums + row * room.padded, room.padded});
  }
  pack_values(a.values, room.offsets, count, a.size, width / 2, room.values);
  multiply_by_unit<true>(unit, room.weights, kKeys, rows, room.values, width / 2, room.padded / kPanel, room.sums,
                         room.padded);
}

#endif

// left [rows] times all panels; put(tile values, row, first column, columns) takes each result.
template <class T, class Put>
void multiply(const typename Sides<T>::Left* left, int64_t left_stride, int64_t rows,
              const typename Sides<T>::Right* right, int64_t count, int64_t panels, Put&& put) {
  const int64_t tiles = (rows + tile_rows<T>() - 1) / tile_rows<T>(), panel_units = count * kPanel;
  alignas(64) float tile[kTileValues];
  for (int64_t t = 0, row = 0; t < tiles; t++) {
    const int height = int(rows * (t + 1) / tiles - rows * t / tiles), together = panels_at_once<T>(height);
    for (int64_t panel = 0; panel < panels;) {
      const int width = panel + together <= panels ? together : 1;
      tile_of<T>(height, width, left + row * left_stride, left_stride, right + panel * panel_units, panel_units, count,
                 tile, {right, 0});  // all of it is at hand
      for (int r = 0; r < height; r++) put(tile + r * width * kPanel, row + r, panel * kPanel, width * kPanel);
      panel += width;
    }
    row += height;
  }
}

// One row's scores to weights; carries the largest score and the sum, and scales what was summed up before.
template <class T>
void weigh(Room<T>& room, int64_t row, int64_t from, int64_t to, int64_t width, float scale) {
  float* scores = room.scores + row * kKeys;
  auto* weights = room.weights + row * kKeys;
  if (from >= to) {
    for (int64_t j = 0; j < width; j += kLanes) store<kLanes>(weights + j, F<kLanes>{});
    return;
  }
  std::fill(scores, scores + from, -INFINITY);
  std::fill(scores + to, scores + width, -INFINITY);
  F<kLanes> most = splat<kLanes>(-INFINITY);
  for (int64_t j = 0; j < width; j += kLanes) most = larger<kLanes>(most, load<kLanes>(scores + j));
  const float before = room.largest[row], largest = std::max(before, max_lanes<kLanes>(most) * scale);
  F<kLanes> sum = {};
  for (int64_t j = 0; j < width; j += kLanes) {
    const F<kLanes> weight = exp_of<kLanes>(load<kLanes>(scores + j) * scale - largest);
    sum += weight;
    store<kLanes>(weights + j, weight);
  }
  if (largest != before) {
    const float kept = exp_of_one(before - largest);
    room.total[row] *= kept;
    float* sums = room.sums + row * room.padded;
    for (int64_t d = 0; d < room.padded; d += kLanes) store<kLanes>(sums + d, load<kLanes>(sums + d) * kept);
  }
  room.largest[row] = largest;
  room.total[row] += sum_lanes<kLanes>(sum);
}

template <class T>
void begin(const Attention<T>& a, Room<T>& room, const T* query) {
  const int64_t group = a.group();
  for (int64_t row = 0; row < room.rows; row++) {
    const T* from = query + row / group * a.query_stride + row % group * a.size;
    for (int64_t d = 0; d < a.size; d += 8) store<8>(room.query + row * a.size + d, load<8>(from + d));
  }
  std::fill(room.sums, room.sums + room.rows * room.padded, 0.0f);
  std::fill(room.total, room.total + room.rows, 0.0f);
  std::fill(room.lanes, room.lanes + room.rows * kPanel, 0.0f);
  std::fill(room.largest, room.largest + room.rows, -INFINITY);
}

template <class T>
void end(const Attention<T>& a, const Room<T>& room, T* out) {
  const int64_t group = a.group();
  for (int64_t row = 0; row < room.rows; row++) {
    const float scale = 1.0f / room.total[row];
    T* to = out + (row / group * a.heads + row % group) * a.size;
    for (int64_t d = 0; d < a.size; d += 8) store<8>(to + d, load<8>(room.sums + row * room.padded + d) * scale);
  }
}

// Keys [from, from + count) for all rows; row 0 is at `position`.
template <class T>
void take_keys(const Attention<T>& a, Room<T>& room, int64_t from, int64_t count, int64_t position) {
  const int64_t value_units = units<T>(count), width = round_up(count, kPanel), group = a.group();
  pack_keys(a.keys, room.offsets, count, a.size, room.keys);
  multiply<T>(room.query, a.size, room.rows, room.keys, units<T>(a.size), width / kPanel,
              [&](const float* tile, int64_t row, int64_t column, int64_t columns) {
                std::memcpy(room.scores + row * kKeys + column, tile, columns * sizeof(float));
              });
  for (int64_t row = 0; row < room.rows; row++) {
    const int64_t own = position + row / group;
    weigh(room, row, std::clamp<int64_t>(a.first_visible(own) - from, 0, count),
          std::clamp<int64_t>(own + 1 - from, 0, count), width, a.scale);
  }
  pack_values(a.values, room.offsets, count, a.size, value_units, room.values);
  multiply<T>(room.weights, kKeys, room.rows, room.values, value_units, room.padded / kPanel,
              [&](const float* tile, int64_t row, int64_t column, int64_t columns) {
                float* sums = room.sums + row * room.padded + column;
                for (int64_t d = 0; d < columns; d += kLanes)
                  store<kLanes>(sums + d, load<kLanes>(sums + d) + load<kLanes>(tile + d));
              });
}

}  // namespace

template <class T>
void attend_rows(const Attention<T>& a, int64_t sequence, int64_t head, int64_t first, int64_t end_token) {
  const int64_t start = a.batch.starts[sequence], tokens = a.batch.starts[sequence + 1] - start;
  const int64_t position = a.batch.lengths[sequence] - tokens + first, last = position + end_token - first;
  Room<T> room((end_token - first) * a.group(), a.size);
  const bool by_unit = fits_unit(a);
  begin(a, room, a.query + (start + first) * a.query_stride + head * a.group() * a.size);
  // A head's size that is no multiple of a panel leaves the last one half empty.
  if (a.size % kPanel) std::fill(room.values, room.values + kKeys * room.padded, typename Sides<T>::Right(0));
  for (int64_t from = a.first_visible(position) / kKeys * kKeys; from < last; from += kKeys) {
    const int64_t count = std::min(kKeys, last - from);
    find_offsets(a, sequence, head, from, count, room.offsets);
#if defined(KVFERRY_MATRIX_UNIT)
    if constexpr (std::is_same_v<T, Bf16>)
      if (by_unit) {
        take_keys_by_unit(a, room, from, count, position);
        continue;
      }
#endif
    take_keys(a, room, from, count, position);
  }
  if (by_unit)
    for (int64_t row = 0; row < room.rows; row++) room.total[row] = sum_lanes<16>(load<16>(room.lanes + row * kPanel));
  end(a, room, a.out + ((start + first) * a.heads + head * a.group()) * a.size);
}

template void attend_rows<float>(const Attention<float>&, int64_t, int64_t, int64_t, int64_t);
template void attend_rows<Bf16>(const Attention<Bf16>&, int64_t, int64_t, int64_t, int64_t);

}  // namespace kvferry

// Rounded rows times weights of 8 bits on the matrix unit: up to 16 rows times one panel, [k / 4][16] of four values of
// k, or a few rows times two panels: alternating between two memory streams reads faster than one.
//
// The sums of a group are exact, and groups are added as in `tile` of tile_quantized.h: the bits are the same.
#pragma once
#include "left.h"

namespace kvferry {

#if defined(KVFERRY_MATRIX_UNIT)

constexpr int kRoundedRows = 16;
constexpr int kFewRows = 4;  // up to so many rows, two panels are computed together
constexpr int kGroupUnits = Sides<Int8Dynamic>::kUnit;

struct Int8DynamicUnit {};
template <>
struct Sides<Int8DynamicUnit> {
  typedef int8_t Left;
};

// Integers [rows][groups * 64] and their scales [rows][groups]; memory is padded to whole tiles of rows.
struct RoundedRows {
  Rows<Int8DynamicUnit> x;
  const float* scales;
  int64_t groups;
};

template <class T>
RoundedRows rounded_rows(const T* x, int64_t stride, int64_t rows, int64_t in, int threads) {
  const int64_t groups = units<Int8Dynamic>(in), width = groups * kRounded;
  const int64_t places = (rows + kRoundedRows - 1) / kRoundedRows * kRoundedRows;
  auto* values = static_cast<int8_t*>(scratch(kSlotRows, uint64_t(places * (width + groups * 4))));
  auto* scales = reinterpret_cast<float*>(values + places * width);
  std::fill(scales + rows * groups, scales + places * groups, 0.0f);
  each_row(rows, in, threads, [=](int64_t r) {
    for (int64_t g = 0; g < groups; g++) {
      Simd<kLanes>::H rounded[kRounded / kLanes];
      const int64_t from = g * kRounded;
      scales[r * groups + g] = round_group(x + r * stride + from, std::min<int64_t>(in - from, kRounded), rounded);
      for (int i = 0; i < kRounded / kLanes; i++) {
        const __m128i narrow = _mm256_cvtepi16_epi8((__m256i)rounded[i]);
        std::memcpy(values + r * width + from + i * kLanes, &narrow, sizeof narrow);
      }
    }
  });
  return {{values, width}, scales, groups};
}

// Tiles 0 to 3: sums of a group; 4 and 5: rows; 6 and 7: panels. Multiplies one group while it adds the previous one.
class RoundedUnit {
 public:
  ~RoundedUnit() { _tile_release(); }

  // left [rows] -> out [rows][panels * 16]; `panels`: 1, or 2 for at most kFewRows rows, `panel_units` apart.
  void multiply(int rows, int panels, const RoundedRows& left, int64_t row, const Two8* right, int64_t panel_units,
                float* out) {
    if (rows != rows_) shape(rows);
    if (rows > 8) run<16, 1>(left, row, right, panel_units, out);
    else if (rows > kFewRows) run<8, 1>(left, row, right, panel_units, out);
    else if (panels == 1) run<kFewRows, 1>(left, row, right, panel_units, out);
    else if (rows > 1) run<kFewRows, 2>(left, row, right, panel_units, out);
    else run<1, 2>(left, row, right, panel_units, out);
  }

 private:
  void shape(int rows) {
    shape_tiles({rows, rows, rows, rows, rows, rows, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64});
    rows_ = rows;
  }

  template <int ROWS, int PANELS>
  void run(const RoundedRows& rows, int64_t row, const Two8* right, int64_t panel_units, float* out) {
    const int8_t* left = rows.x.values + row * rows.x.stride;
    const float* scales = rows.scales + row * rows.groups;
    const int64_t groups = rows.groups;
    __m512 acc[PANELS][ROWS];
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) acc[p][r] = _mm512_setzero_ps();
    begin<0, PANELS>(left, rows.x.stride, right, panel_units);
    for (int64_t g = 1; g < groups; g += 2) {
      begin<1, PANELS>(left + g * kRounded, rows.x.stride, right + g * kGroupUnits, panel_units);
      add<0>(acc, scales + g - 1, groups);
      if (g + 1 < groups)
        begin<0, PANELS>(left + (g + 1) * kRounded, rows.x.stride, right + (g + 1) * kGroupUnits, panel_units);
      add<1>(acc, scales + g, groups);
    }
    if (groups % 2) add<0>(acc, scales + groups - 1, groups);
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) _mm512_storeu_ps(out + (r * PANELS + p) * kPanel, acc[p][r]);
  }

  // Both branches are alike except for the tiles: the compiler accepts tile numbers only as literals.
  template <int SIDE, int PANELS>
  void begin(const int8_t* left, int64_t stride, const Two8* right, int64_t panel_units) {
    if constexpr (SIDE == 0) {
      _tile_zero(0);
      _tile_loadd(4, left, stride);
      _tile_loadd(6, right, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_stored(0, sums_[0][0], 64);
      if constexpr (PANELS > 1) {
        _tile_zero(2);
        _tile_loadd(7, right + panel_units, 64);
        _tile_dpbssd(2, 4, 7);
        _tile_stored(2, sums_[0][1], 64);
      }
    } else {
      _tile_zero(1);
      _tile_loadd(5, left, stride);
      _tile_loadd(7, right, 64);
      _tile_dpbssd(1, 5, 7);
      _tile_stored(1, sums_[1][0], 64);
      if constexpr (PANELS > 1) {
        _tile_zero(3);
        _tile_loadd(6, right + panel_units, 64);
        _tile_dpbssd(3, 5, 6);
        _tile_stored(3, sums_[1][1], 64);
      }
    }
    tiles_see_memory();
  }

  template <int SIDE, int PANELS, int ROWS>
  __attribute__((always_inline)) void add(__m512 (&acc)[PANELS][ROWS], const float* scales, int64_t groups) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const __m512 scale = _mm512_set1_ps(scales[r * groups]);
#pragma GCC unroll 2
      for (int p = 0; p < PANELS; p++) {
        const __m512 sums = _mm512_cvtepi32_ps(_mm512_load_si512(sums_[SIDE][p] + r * kPanel));
        acc[p][r] = _mm512_fmadd_ps(sums, scale, acc[p][r]);
      }
    }
  }

  int rows_ = 0;
  alignas(64) int32_t sums_[2][2][kRoundedRows * kPanel] = {};
};

#endif

}  // namespace kvferry

// The inner kernel over bfloat16 on CPUs with a matrix unit (AMX): up to 32 rows times up to four panels.
//
// The unit reads panels of bfloat16 unchanged, 16 pairs of k per tile. It sums in its own order, so all rows of a process
// use it or none: a row has the same bits alone and in a batch.
#pragma once
#include "tile_quantized.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__) && defined(__x86_64__)
#define KVFERRY_MATRIX_UNIT 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvferry {

constexpr int kMatrixRows = 32;    // two of the unit's tiles
constexpr int kMatrixPairs = 16;  // of k in a tile
constexpr int kMatrixValues = kMatrixRows * 2 * kPanel;

// Units of k in a panel of packed weights: padded with zeros to whole tiles if the matrix unit may read them, packed or
// unpacked.
template <class K>
static inline int64_t packed_units(int64_t k) {
#if defined(KVFERRY_MATRIX_UNIT)
  if constexpr (std::is_same_v<K, Bf16>) return (units<K>(k) + kMatrixPairs - 1) / kMatrixPairs * kMatrixPairs;
#endif
  if constexpr (std::is_same_v<K, Int8>) return (k + kGroup - 1) / kGroup * kGroup;
  return units<K>(k);
}

#if defined(KVFERRY_MATRIX_UNIT)

// Whether the system permits this process to use the unit; requested once.
inline bool has_matrix_unit() {
  constexpr int kAskPermission = 0x1023, kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
  return allowed;
}

// Must precede tile loads from memory that was just written: GCC does not know that the intrinsics read it.
static inline void tiles_see_memory() { __asm__ volatile("" : : : "memory"); }

// Sets the rows, and bytes per row, of the calling thread's eight tiles.
static inline void shape_tiles(const int (&rows)[8], const int (&bytes)[8]) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; i++) {
    config.bytes[i] = uint16_t(bytes[i]);
    config.rows[i] = uint8_t(rows[i]);
  }
  __asm__ volatile("" : : "r"(&config) : "memory");  // GCC does not know how much of it is read
  _tile_loadconfig(&config);
}

// Panels in the unit's layout; tile_unpacked.h makes them from fewer bits. `at`: the tile of a panel that starts at pair
// `k`, for which `prepare` must have been called.
struct PackedTiles {
  const uint32_t* panels;
  int64_t panel_units;

  template <int PANELS>
  void prepare(int64_t) const {}
  const uint32_t* at(int panel, int64_t k) const { return panels + panel * panel_units + k * kPanel; }
};

// The calling thread's tiles: 0 to 3 sums, 4 and 5 rows of the left side, 6 and 7 panels. The CPU prefetches panels by
// itself; explicit prefetches gain nothing here.
class MatrixUnit {
 public:
  ~MatrixUnit() { _tile_release(); }

  // As `tile`: left [rows], right [panels] (1, 2 or, for up to 16 rows, 4) -> out [rows][panels * 16]. Calls `between`
  // for every 16 pairs of k; its work overlaps with the unit's.
  template <class Tiles, class Between>
  void multiply(int rows, int panels, const Bf16* left, int64_t left_stride, Tiles&& right, int64_t count, float* out,
                Between&& between) {
    if (rows != rows_) shape(rows);
    clear();
    const int64_t stride = left_stride * int64_t(sizeof(Bf16)), out_stride = panels * kPanel * int64_t(sizeof(float));
    if (rows > 16) {
      if (panels == 1) tall<1>(left, stride, right, count, between);
      else tall<2>(left, stride, right, count, between);
      return put_tall(panels, out, out_stride);
    }
    if (panels == 1) flat<1>(left, stride, right, count, between);
    else if (panels == 2) flat<2>(left, stride, right, count, between);
    else flat<4>(left, stride, right, count, between);
    _tile_stored(0, out, out_stride);
    if (panels == 1) return;
    _tile_stored(1, out + kPanel, out_stride);
    if (panels == 2) return;
    _tile_stored(2, out + 2 * kPanel, out_stride);
    _tile_stored(3, out + 3 * kPanel, out_stride);
  }

  // As `multiply` for 17 to 32 rows and two panels, in place: `out` is overwritten or, with ADD, added to.
  template <bool ADD>
  void multiply_into(int rows, const Bf16* left, int64_t left_stride, const uint32_t* right, int64_t right_stride,
                     int64_t count, float* out, int64_t out_row) {
    if (rows != rows_) shape(rows);
    const int64_t out_stride = out_row * int64_t(sizeof(float));
    if constexpr (ADD) {
      _tile_loadd(0, out, out_stride);
      _tile_loadd(1, out + kPanel, out_stride);
      _tile_loadd(2, out + 16 * out_row, out_stride);
      _tile_loadd(3, out + 16 * out_row + kPanel, out_stride);
    } else {
      clear();
    }
    tall<2>(left, left_stride * int64_t(sizeof(Bf16)), PackedTiles{right, right_stride}, count, [] {});
    put_tall(2, out, out_stride);
  }

 private:
  static void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  static void put_tall(int panels, float* out, int64_t out_stride) {
    float* lower = out + 16 * (out_stride / int64_t(sizeof(float)));
    _tile_stored(0, out, out_stride);
    _tile_stored(2, lower, out_stride);
    if (panels == 1) return;
    _tile_stored(1, out + kPanel, out_stride);
    _tile_stored(3, lower + kPanel, out_stride);
  }

  void shape(int rows) {
    const bool tall = rows > 16;
    const int upper = tall ? 16 : rows, lower = tall ? rows - 16 : rows;
    shape_tiles({upper, upper, lower, lower, upper, lower, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64});
    rows_ = rows;
  }

  template <int PANELS, class Tiles, class Between>
  static void flat(const Bf16* left, int64_t stride, Tiles&& right, int64_t count, Between&& between) {
    right.template prepare<PANELS>(0);
    for (int64_t k = 0; k < count; k += kMatrixPairs) {
      _tile_loadd(4, left + 2 * k, stride);
      _tile_loadd(6, right.at(0, k), 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (PANELS > 1) {
        _tile_loadd(7, right.at(1, k), 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (PANELS > 2) {
        _tile_loadd(6, right.at(2, k), 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, right.at(3, k), 64);
        _tile_dpbf16ps(3, 4, 7);
      }
      if (k + kMatrixPairs < count) right.template prepare<PANELS>(k + kMatrixPairs);
      between();
    }
  }

  template <int PANELS, class Tiles, class Between>
  static void tall(const Bf16* left, int64_t stride, Tiles&& right, int64_t count, Between&& between) {
    const Bf16* lower = left + 8 * stride;
    right.template prepare<PANELS>(0);
    for (int64_t k = 0; k < count; k += kMatrixPairs) {
      _tile_loadd(4, left + 2 * k, stride);
      _tile_loadd(6, right.at(0, k), 64);
      _tile_loadd(5, lower + 2 * k, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (PANELS > 1) {
        _tile_loadd(7, right.at(1, k), 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      if (k + kMatrixPairs < count) right.template prepare<PANELS>(k + kMatrixPairs);
      between();
    }
  }

  int rows_ = 0;
};

#else

inline constexpr bool has_matrix_unit() { return false; }

#endif

}  // namespace kvferry

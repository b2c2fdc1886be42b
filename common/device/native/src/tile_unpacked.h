// Weights of 8 and 4 bits for the matrix unit: unpacks tiles to bfloat16 while the unit multiplies by earlier tiles.
//
// Integers of 8 bits are exact in bfloat16. Four bits represent q * scale + low, rounded to the nearest bfloat16, just as
// a checkpoint's own four bits are when it is loaded in bfloat16.
#pragma once
#include "tile_matrix.h"

namespace kvferry {

#if defined(KVFERRY_MATRIX_UNIT)

static inline __m512 of_int8(const int8_t* values) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_raw<__m128i>(values)));
}

// Combines the upper halves of two vectors: `even` in the lower half of each lane, `odd` in the upper.
static inline void store_pairs(__m512i even, __m512i odd, uint32_t* to) {
  _mm512_store_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(even, 16), odd));
}

// Unpacks pairs [pair, pair + 16) of k of a panel.
static inline void unpack_tile(const int8_t* panel, int64_t pair, uint32_t* to) {
  const int8_t* from = panel + 2 * pair * kPanel;
  for (int row = 0; row < kMatrixPairs; row++, from += 2 * kPanel, to += kPanel)
    store_pairs(_mm512_castps_si512(of_int8(from)), _mm512_castps_si512(of_int8(from + kPanel)), to);
}

// Value `at` of the eight in each lane, as floats. The table lookup uses only the lowest four bits of a lane.
static inline __m512 of_int4(__m512i eight, int at) {
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(eight, unsigned(4 * at)), table);
}

static inline void unpack_tile(const Group4* panel, int64_t pair, uint32_t* to) {
  const Group4& group = panel[pair / kMatrixPairs];
  const __m512 scale = _mm512_cvtph_ps(load_raw<__m256i>(group.scale)), low = _mm512_cvtph_ps(load_raw<__m256i>(group.low));
  const __m512i half = _mm512_set1_epi32(0x8000);  // half of the discarded bits' range, to round
  for (int part = 0; part < kGroup / 8; part++) {
    const __m512i eight = load_raw<__m512i>(group.values[part]);
#pragma GCC unroll 4
    for (int at = 0; at < 8; at += 2, to += kPanel) {
      const __m512 even = _mm512_fmadd_ps(of_int4(eight, at), scale, low);
      const __m512 odd = _mm512_fmadd_ps(of_int4(eight, at + 1), scale, low);
      store_pairs(_mm512_add_epi32(_mm512_castps_si512(even), half), _mm512_add_epi32(_mm512_castps_si512(odd), half), to);
    }
  }
}

// Prefetches the memory that `unpack_tile` reads.
template <class Right>
static inline void fetch_tile(const Right* panel, int64_t pair) {
  constexpr int64_t kTile = std::is_same_v<Right, Group4> ? sizeof(Group4) : 2 * kMatrixPairs * kPanel;
  const char* from = reinterpret_cast<const char*>(panel) + pair / kMatrixPairs * kTile;
  for (int64_t at = 0; at < kTile; at += 64) __builtin_prefetch(from + at, 0, 2);
}

// Unpacks whole panels, for rows that use them several times: `pairs` of k each, contiguous.
template <class Right>
PackedTiles unpack_panels(const Right* panels, int64_t panel_units, int count, int64_t pairs, uint32_t* to) {
  for (int p = 0; p < count; p++)
    for (int64_t k = 0; k < pairs; k += kMatrixPairs) {
      const Right* own = panels + p * panel_units;
      fetch_tile(own + count * panel_units, k);
      unpack_tile(own, k, to + (p * pairs + k) * kPanel);
    }
  tiles_see_memory();
  return {to, pairs * kPanel};
}

// As `PackedTiles`, for rows that use each tile once. Tiles are unpacked two steps before they are loaded: a tile load
// cannot be forwarded from stores that are still in flight.
template <class Right>
class UnpackedTiles {
 public:
  UnpackedTiles(const Right* panels, int64_t panel_units, int64_t pairs)
      : panels_(panels), panel_units_(panel_units), pairs_(pairs) {}

  template <int PANELS>
  void prepare(int64_t k) {
    if (k == 0) unpack<PANELS>(0);
    if (k + kMatrixPairs < pairs_) unpack<PANELS>(k + kMatrixPairs);
  }
  const uint32_t* at(int panel, int64_t k) { return slot(panel, k); }

 private:
  template <int PANELS>
  void unpack(int64_t k) {
    for (int p = 0; p < PANELS; p++) {
      const Right* own = panels_ + p * panel_units_;
      fetch_tile(own + PANELS * panel_units_, k);
      unpack_tile(own, k, slot(p, k));
    }
    tiles_see_memory();
  }
  uint32_t* slot(int panel, int64_t k) { return tiles_[k / kMatrixPairs % 3][panel]; }

  const Right* panels_;
  int64_t panel_units_, pairs_;
  alignas(64) uint32_t tiles_[3][4][kMatrixPairs * kPanel];
};

#endif

}  // namespace kvferry

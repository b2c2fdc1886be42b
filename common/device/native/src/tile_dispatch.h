// Selects the kernel for a number of rows and panels.
#pragma once
#include "tile.h"
#include "tile_quantized.h"

namespace kvferry {

constexpr int kTileValues = kMostRows * 4 * kPanel;

// `rows` (1 to 6) times `panels` (1, or panels_per_tile<K>(rows)).
template <class K>
static inline void dispatch_tile(int rows, int panels, const typename Sides<K>::Left* left, int64_t left_stride,
                           const typename Sides<K>::Right* right, int64_t right_stride, int64_t count, float* out,
                           Ahead ahead) {
#define KVFERRY_TILE(N)                                                                             \
  case N:                                                                                           \
    return panels == 1 ? tile<N, 1>(left, left_stride, right, right_stride, count, out, ahead)              \
                       : tile<N, panels_per_tile<K>(N)>(left, left_stride, right, right_stride, count, out, ahead);
  switch (rows) {
    KVFERRY_TILE(1)
    KVFERRY_TILE(2)
    KVFERRY_TILE(3)
    KVFERRY_TILE(4)
    KVFERRY_TILE(5)
    KVFERRY_TILE(6)
  }
#undef KVFERRY_TILE
}

}  // namespace kvferry

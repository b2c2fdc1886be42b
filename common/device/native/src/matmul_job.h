// A matmul in progress, shared by the kernels: its rows, its output, and its division into pieces.
#pragma once
#include <algorithm>

#include "left.h"
#include "matmul.h"

namespace kvferry {

// Rows and panels of one piece of work.
struct Block {
  int64_t first_row, rows, first_panel, end_panel;
};

// The panels of a weight of kind K.
template <class K>
struct Panels {
  typedef typename Sides<K>::Right Right;
  const Right* first;
  int64_t count, units;  // units of k per panel; values of Right per panel

  explicit Panels(const Weight& weight)
      : first(static_cast<const Right*>(weight.panels)),
        count(packed_units<K>(weight.in)),
        units(count * Sides<K>::kUnit) {}
  const Right* at(int64_t panel) const { return first + panel * units; }
};

// Rows of type T, in the layout for weights of kind K, times weights.
template <class K, class T>
struct Job {
  Rows<K> x;
  int64_t rows;
  const Weight* weight;
  T* out;
  int64_t out_stride;
  int64_t block_rows = 0, panels = 0, panels_a_piece = 0, pieces_a_block = 0;

  Block block(int64_t index) const {
    const int64_t row = index / pieces_a_block * block_rows, panel = index % pieces_a_block * panels_a_piece;
    return {row, std::min(block_rows, rows - row), panel, std::min(panel + panels_a_piece, panels)};
  }
};

template <class K, class T>
void put_tile(const Job<K, T>& job, const float* tile, int rows, int panels, int64_t row, int64_t panel) {
  const int64_t from = panel * kPanel, to = std::min(from + panels * kPanel, job.weight->out);
  const float *bias = job.weight->bias, *scales = job.weight->scales;
  for (int r = 0; r < rows; r++) {
    const float* values = tile + int64_t(r) * panels * kPanel;
    T* out = job.out + (row + r) * job.out_stride;
    int64_t n = from;
    for (; n + kLanes <= to; n += kLanes) {
      Acc v = load<kLanes>(values + n - from);
      if (scales) v *= load<kLanes>(scales + n);
      if (bias) v += load<kLanes>(bias + n);
      store<kLanes>(out + n, v);
    }
    for (; n < to; n++) {
      float v = values[n - from];
      if (scales) v *= scales[n];
      put(out + n, bias ? v + bias[n] : v);
    }
  }
}

}  // namespace kvferry

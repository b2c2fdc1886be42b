// Linear layers: bfloat16 weights are streamed as they are and widened in registers; there is no float32 copy of them.
#include "matmul.h"

#include <algorithm>

#include "pool.h"
#include "tile.h"

namespace kvferry {
namespace {

constexpr int64_t kBlockBytes = 192 << 10;  // rows that stay in a core's second-level cache beside a panel
constexpr int64_t kMinBlockRows = 48, kMaxBlockRows = 192;
constexpr int kPiecesPerThread = 6;  // so that a thread that is held up leaves little to wait for
constexpr int64_t kMinPieceWork = 1 << 15;  // multiply-adds; less is not worth handing over

template <class T>
struct Job {
  typedef typename Sides<T>::Left Left;
  typedef typename Sides<T>::Right Right;
  const Left* x;
  int64_t x_stride, rows, block_rows;
  const Weight* weight;
  T* out;
  int64_t out_stride;
  int64_t panels, panels_a_piece, pieces_a_block;
};

template <class T>
void put_tile(const Job<T>& job, const float* tile, int rows, int panels, int64_t row, int64_t panel) {
  const int64_t from = panel * kPanel, to = std::min(from + panels * kPanel, job.weight->out);
  const float* bias = job.weight->bias;
  for (int r = 0; r < rows; r++) {
    const float* values = tile + int64_t(r) * panels * kPanel;
    T* out = job.out + (row + r) * job.out_stride;
    int64_t n = from;
    for (; n + kLanes <= to; n += kLanes) {
      Acc v = load<kLanes>(values + n - from);
      if (bias) v += load<kLanes>(bias + n);
      store<kLanes>(out + n, v);
    }
    for (; n < to; n++) put(out + n, values[n - from] + (bias ? bias[n] : 0.0f));
  }
}

// One block of rows times one run of panels.
template <class T>
void run_piece(const Job<T>& job, int index) {
  const int64_t block = index / job.pieces_a_block, part = index % job.pieces_a_block;
  const int64_t first_row = block * job.block_rows, end_row = std::min(first_row + job.block_rows, job.rows);
  const int64_t first_panel = part * job.panels_a_piece;
  const int64_t end_panel = std::min(first_panel + job.panels_a_piece, job.panels);
  const int64_t count = units<T>(job.weight->in), panel_units = count * kPanel;
  const auto* right = static_cast<const typename Sides<T>::Right*>(job.weight->panels);
  // Rows in tiles of nearly one size: 8 are 4 and 4, not 6 and 2.
  const int64_t rows = end_row - first_row, tiles = (rows + tile_rows<T>() - 1) / tile_rows<T>();
  const int together = panels_at_once<T>(int((rows + tiles - 1) / tiles));
  alignas(64) float tile[kTileValues];
  for (int64_t panel = first_panel; panel < end_panel;) {
    const int panels = panel + together <= end_panel ? together : 1;
    for (int64_t t = 0, row = first_row; t < tiles; t++) {
      const int height = int(rows * (t + 1) / tiles - rows * t / tiles);
      const int width = panels == panels_at_once<T>(height) ? panels : 1;
      for (int p = 0; p < panels; p += width) {
        tile_of<T>(height, width, job.x + row * job.x_stride, job.x_stride, right + (panel + p) * panel_units, panel_units,
                count, tile);
        put_tile(job, tile, height, width, row, panel + p);
      }
      row += height;
    }
    panel += panels;
  }
}

inline const float* left_side(const float* x, int64_t&, int64_t, int64_t, int) { return x; }

// Rows as the kernel wants them: float32, or pairs with a zero behind an odd last one.
const Sides<Bf16>::Left* left_side(const Bf16* x, int64_t& stride, int64_t rows, int64_t in, int threads) {
  typedef Sides<Bf16>::Left Left;
  if (kDotBf16 && in % 2 == 0) return reinterpret_cast<const Left*>(x);
  const int64_t from_stride = stride, width = stride = units<Bf16>(in) * 2;
  Left* laid = static_cast<Left*>(scratch(kSlotRows, uint64_t(rows * width) * sizeof(Left)));
  const int64_t pieces = std::clamp<int64_t>(rows * in >> 15, 1, std::min<int64_t>(rows, threads * 2));
  parallel(threads, int(pieces), [=](int piece) {
    for (int64_t r = rows * piece / pieces; r < rows * (piece + 1) / pieces; r++) {
      const Bf16* from = x + r * from_stride;
      Left* to = laid + r * width;
      int64_t k = 0;
      for (; k + kLanes <= in; k += kLanes) store<kLanes>(to + k, load<kLanes>(from + k));
      for (; k < in; k++) put(to + k, to_float(from[k]));
      if (in % 2) put(to + in, 0.0f);
    }
  });
  return laid;
}

template <class T>
void pack_panel(const T* weight, int64_t out, int64_t in, int64_t panel, typename Sides<T>::Right* to);

template <>
void pack_panel<float>(const float* weight, int64_t out, int64_t in, int64_t panel, float* to) {
  for (int i = 0; i < kPanel; i++) {
    const int64_t n = panel * kPanel + i;
    for (int64_t k = 0; k < in; k++) to[k * kPanel + i] = n < out ? weight[n * in + k] : 0.0f;
  }
}

template <>
void pack_panel<Bf16>(const Bf16* weight, int64_t out, int64_t in, int64_t panel, uint32_t* to) {
  for (int i = 0; i < kPanel; i++) {
    const int64_t n = panel * kPanel + i;
    const Bf16* row = weight + n * in;
    for (int64_t k = 0; k < in; k += 2) {
      const uint32_t low = n < out ? row[k].bits : 0, high = n < out && k + 1 < in ? row[k + 1].bits : 0;
      to[k / 2 * kPanel + i] = low | high << 16;
    }
  }
}

template <class T>
void pack_all(const T* weight, int64_t out, int64_t in, typename Sides<T>::Right* to, int threads) {
  const int64_t panels = (out + kPanel - 1) / kPanel, panel_units = units<T>(in) * kPanel;
  parallel(threads, int(panels), [&](int panel) { pack_panel<T>(weight, out, in, panel, to + panel * panel_units); });
}

}  // namespace

int64_t packed_bytes(int64_t out, int64_t in, bool is_bf16) {
  return (out + kPanel - 1) / kPanel * kPanel * (is_bf16 ? units<Bf16>(in) : in) * 4;
}

void pack(const void* weight, int64_t out, int64_t in, bool is_bf16, void* panels, int threads) {
  if (is_bf16) pack_all(static_cast<const Bf16*>(weight), out, in, static_cast<uint32_t*>(panels), threads);
  else pack_all(static_cast<const float*>(weight), out, in, static_cast<float*>(panels), threads);
}

template <class T>
void linear(const T* x, int64_t x_stride, int64_t rows, const Weight& weight, T* out, int64_t out_stride, int threads) {
  if (rows <= 0) return;
  Job<T> job = {};
  job.x_stride = x_stride;
  job.x = left_side(x, job.x_stride, rows, weight.in, threads);
  job.rows = rows;
  const int64_t fitting = kBlockBytes / int64_t(weight.in * sizeof(typename Sides<T>::Left));
  job.block_rows = std::clamp(fitting, kMinBlockRows, kMaxBlockRows) / tile_rows<T>() * tile_rows<T>();
  job.weight = &weight;
  job.out = out;
  job.out_stride = out_stride;
  job.panels = (weight.out + kPanel - 1) / kPanel;
  const int64_t blocks = (rows + job.block_rows - 1) / job.block_rows;
  const int64_t wanted = (threads * kPiecesPerThread + blocks - 1) / blocks;
  const int64_t worth = std::max<int64_t>(1, std::min(rows, job.block_rows) * weight.in * weight.out / kMinPieceWork);
  const int64_t split = threads > 1 ? std::min(wanted, worth) : 1;
  job.panels_a_piece = std::max<int64_t>(1, (job.panels + split - 1) / split);
  if (job.panels_a_piece > 4) job.panels_a_piece = (job.panels_a_piece + 3) / 4 * 4;
  job.pieces_a_block = (job.panels + job.panels_a_piece - 1) / job.panels_a_piece;
  parallel(threads, int(blocks * job.pieces_a_block), [&](int index) { run_piece(job, index); });
}

template void linear<float>(const float*, int64_t, int64_t, const Weight&, float*, int64_t, int);
template void linear<Bf16>(const Bf16*, int64_t, int64_t, const Weight&, Bf16*, int64_t, int);

}  // namespace kvferry

// Linear layers: narrow weights are streamed as they are and widened in registers; there is no float32 copy of them.
#include "matmul.h"

#include <algorithm>
#include <type_traits>

#include "left.h"
#include "pool.h"
#include "tile_of.h"

namespace kvferry {
namespace {

constexpr int64_t kBlockBytes = 192 << 10;  // rows that stay in a core's second-level cache beside a panel
constexpr int64_t kMinBlockRows = 48, kMaxBlockRows = 192;
constexpr int64_t kUnitBlockBytes = 800 << 10, kUnitBlockRows = 256;  // of the matrix unit, whose cores have 2 MiB
constexpr int kPiecesPerThread = 6;  // so that a thread that is held up leaves little to wait for
constexpr int64_t kWidenRows = 16;
constexpr int64_t kMinPieceWork = 1 << 15;  // multiply-adds; less is not worth handing over

// Rows of type T times weights of kind K.
template <class K, class T>
struct Job {
  Rows<K> x;
  int64_t rows, block_rows;
  const Weight* weight;
  T* out;
  int64_t out_stride;
  int64_t panels, panels_a_piece, pieces_a_block;
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

// What lies behind `width` panels and comes next, for tile `t` of `tiles` over them: each asks for its share of it, so
// that memory is read all the time and not only by the first of them.
template <class Right>
Ahead next_of(const Right* panels, int64_t panel_units, int width, int64_t t, int64_t tiles) {
  const int64_t line = kPanel * int64_t(sizeof(Right)), units = width * panel_units;
  return {panels + units + units * t / tiles, std::min(line, line * width / tiles)};
}

// Tiles of the rows of one block times `panels` panels.
template <class K, class T, class Right>
void run_tiles(const Job<K, T>& job, int64_t first_row, int64_t rows, const Right* right, int64_t panel_units,
               int64_t count, int64_t panel, int panels) {
  typedef std::conditional_t<std::is_same_v<Right, float>, float, K> Multiplied;
  // Rows in tiles of nearly one size: 8 are 4 and 4, not 6 and 2.
  const int64_t tiles = (rows + tile_rows<Multiplied>() - 1) / tile_rows<Multiplied>();
  alignas(64) float tile[kTileValues];
  for (int64_t t = 0, row = first_row; t < tiles; t++) {
    const int height = int(rows * (t + 1) / tiles - rows * t / tiles);
    const int width = panels == panels_at_once<Multiplied>(height) ? panels : 1;
    for (int p = 0; p < panels; p += width) {
      const Right* own = right + p * panel_units;
      tile_of<Multiplied>(height, width, job.x.values + row * job.x.stride, job.x.stride, own, panel_units, count, tile,
                          next_of(own, panel_units, width, t, tiles));
      put_tile(job, tile, height, width, row, panel + p);
    }
    row += height;
  }
}

#if defined(KVFERRY_MATRIX_UNIT)

// A tile of results whose rows are put where they belong while the unit makes the next one.
class LateTile {
 public:
  explicit LateTile(const Job<Bf16, Bf16>& job) : job_(job) {}

  // Where the next tile goes: not where the rows lie that are still to be put.
  float* room() { return tiles_[own_ ^ 1]; }

  void put(int rows) {
    const int until = std::min(done_ + rows, rows_);
    put_tile(job_, tiles_[own_] + done_ * panels_ * kPanel, until - done_, panels_, row_ + done_, panel_);
    done_ = until;
  }

  // What lies in `room()` now is the tile; the one before is put as far as it was not.
  void follow(int rows, int panels, int64_t row, int64_t panel) {
    put(rows_);
    own_ ^= 1;
    done_ = 0;
    rows_ = rows;
    panels_ = panels;
    row_ = row;
    panel_ = panel;
  }

 private:
  const Job<Bf16, Bf16>& job_;
  int own_ = 0, done_ = 0, rows_ = 0, panels_ = 0;
  int64_t row_ = 0, panel_ = 0;
  alignas(64) float tiles_[2][kMatrixValues];
};

// A run of panels in which the rows of one block pass through the matrix unit.
void run_matrix_unit(const Job<Bf16, Bf16>& job, int64_t first_row, int64_t rows, int64_t first_panel,
                     int64_t end_panel) {
  const int64_t count = packed_units<Bf16>(job.weight->in), panel_units = count * kPanel;
  const auto* right = static_cast<const uint32_t*>(job.weight->panels);
  const int together = rows <= 16 ? 4 : 2, share = int((kMatrixRows * kMatrixPairs + count - 1) / count);
  MatrixUnit unit;
  LateTile late(job);
  for (int64_t panel = first_panel; panel < end_panel;) {
    const int panels = panel + together <= end_panel ? together : 1;
    for (int64_t row = first_row; row < first_row + rows; row += kMatrixRows) {
      const int height = int(std::min<int64_t>(kMatrixRows, first_row + rows - row));
      unit.multiply(height, panels, job.x.values + row * job.x.stride, job.x.stride, right + panel * panel_units,
                    panel_units, count, late.room(), [&] { late.put(share); });
      late.follow(height, panels, row, panel);
    }
    panel += panels;
  }
  late.put(kMatrixRows);
}

#endif

// One block of rows times one run of panels.
template <class K, class T>
void run_piece(const Job<K, T>& job, int index) {
  const int64_t block = index / job.pieces_a_block, part = index % job.pieces_a_block;
  const int64_t first_row = block * job.block_rows, rows = std::min(job.block_rows, job.rows - first_row);
  const int64_t first_panel = part * job.panels_a_piece;
  const int64_t end_panel = std::min(first_panel + job.panels_a_piece, job.panels);
#if defined(KVFERRY_MATRIX_UNIT)
  if constexpr (std::is_same_v<K, Bf16>)
    if (has_matrix_unit()) return run_matrix_unit(job, first_row, rows, first_panel, end_panel);
#endif
  const int64_t count = packed_units<K>(job.weight->in), panel_units = count * Sides<K>::kUnit;
  const auto* right = static_cast<const typename Sides<K>::Right*>(job.weight->panels);
  if constexpr (std::is_same_v<K, Int8> || std::is_same_v<K, Int4>) {
    if (rows > kWidenRows) {  // several tiles: the panel is widened once for all of them
      const int64_t wide = count * Sides<K>::kStep;
      float* widened = static_cast<float*>(scratch(kSlotWide, uint64_t(wide) * kPanel * sizeof(float)));
      for (int64_t panel = first_panel; panel < end_panel; panel++) {
        widen(right + panel * panel_units, count, widened);
        run_tiles(job, first_row, rows, widened, wide * kPanel, wide, panel, 1);
      }
      return;
    }
  }
  const int64_t tiles = (rows + tile_rows<K>() - 1) / tile_rows<K>();
  const int together = panels_at_once<K>(int((rows + tiles - 1) / tiles));
  for (int64_t panel = first_panel; panel < end_panel;) {
    const int panels = panel + together <= end_panel ? together : 1;
    run_tiles(job, first_row, rows, right + panel * panel_units, panel_units, count, panel, panels);
    panel += panels;
  }
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
    for (int64_t pair = units<Bf16>(in); pair < packed_units<Bf16>(in); pair++) to[pair * kPanel + i] = 0;
  }
}

template <class T>
void pack_all(const T* weight, int64_t out, int64_t in, typename Sides<T>::Right* to, int threads) {
  const int64_t panels = (out + kPanel - 1) / kPanel, panel_units = packed_units<T>(in) * kPanel;
  parallel(threads, int(panels), [&](int panel) { pack_panel<T>(weight, out, in, panel, to + panel * panel_units); });
}

}  // namespace

int64_t packed_bytes(int64_t out, int64_t in, bool is_bf16) {
  return (out + kPanel - 1) / kPanel * kPanel * (is_bf16 ? packed_units<Bf16>(in) : in) * 4;
}

void pack(const void* weight, int64_t out, int64_t in, bool is_bf16, void* panels, int threads) {
  if (is_bf16) pack_all(static_cast<const Bf16*>(weight), out, in, static_cast<uint32_t*>(panels), threads);
  else pack_all(static_cast<const float*>(weight), out, in, static_cast<float*>(panels), threads);
}

namespace {

template <class K, class T>
void multiply(const T* x, int64_t x_stride, int64_t rows, const Weight& weight, T* out, int64_t out_stride, int threads) {
  Job<K, T> job = {};
  job.x = left_side<K>(x, x_stride, rows, weight.in, threads);
  job.rows = rows;
  const bool by_unit = std::is_same_v<K, Bf16> && has_matrix_unit();
  const int64_t height = by_unit ? kMatrixRows : tile_rows<K>();
  const int64_t bytes = by_unit ? kUnitBlockBytes : kBlockBytes, most_rows = by_unit ? kUnitBlockRows : kMaxBlockRows;
  const int64_t fitting = bytes / int64_t(weight.in * sizeof(typename Sides<K>::Left));
  job.block_rows = std::clamp(fitting, kMinBlockRows, most_rows) / height * height;
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

}  // namespace

template <class T>
void linear(const T* x, int64_t x_stride, int64_t rows, const Weight& weight, T* out, int64_t out_stride, int threads) {
  if (rows <= 0) return;
  switch (weight.kind) {
    case kInt8:
      return multiply<Int8>(x, x_stride, rows, weight, out, out_stride, threads);
    case kInt4:
      return multiply<Int4>(x, x_stride, rows, weight, out, out_stride, threads);
    case kWhole8:
      return multiply<Whole8>(x, x_stride, rows, weight, out, out_stride, threads);
    default:
      return multiply<T>(x, x_stride, rows, weight, out, out_stride, threads);
  }
}

template void linear<float>(const float*, int64_t, int64_t, const Weight&, float*, int64_t, int);
template void linear<Bf16>(const Bf16*, int64_t, int64_t, const Weight&, Bf16*, int64_t, int);

}  // namespace kvferry

// Linear layers: weights are streamed as they are, widened in registers or, for many rows, a few panels at a time; there
// is no wide copy of them.
#include "matmul.h"

#include <algorithm>
#include <type_traits>

#include "matmul_unit.h"
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

// What lies behind `width` panels and comes next, for tile `t` of `tiles` over them: each asks for its share of it, so
// that memory is read all the time and not only by the first of them.
template <class Right>
Ahead next_of(const Right* panels, int64_t panel_units, int width, int64_t t, int64_t tiles) {
  const int64_t line = kPanel * int64_t(sizeof(Right)), units = width * panel_units;
  return {panels + units + units * t / tiles, std::min(line, line * width / tiles)};
}

// Tiles of the rows of one block times `panels` panels.
template <class K, class T, class Right>
void run_tiles(const Job<K, T>& job, const Block& block, const Right* right, int64_t panel_units, int64_t count,
               int64_t panel, int panels) {
  typedef std::conditional_t<std::is_same_v<Right, float>, float, K> Multiplied;
  const int64_t rows = block.rows;
  // Rows in tiles of nearly one size: 8 are 4 and 4, not 6 and 2.
  const int64_t tiles = (rows + tile_rows<Multiplied>() - 1) / tile_rows<Multiplied>();
  alignas(64) float tile[kTileValues];
  for (int64_t t = 0, row = block.first_row; t < tiles; t++) {
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

// One block of rows times one run of panels.
template <class K, class T>
void run_block(const Job<K, T>& job, const Block& block) {
  const Panels<K> panels(*job.weight);
  if constexpr (std::is_same_v<K, Int8> || std::is_same_v<K, Int4>) {
    if (block.rows > kWidenRows) {  // several tiles: the panel is widened once for all of them
      const int64_t wide = panels.count * Sides<K>::kStep;
      float* widened = static_cast<float*>(scratch(kSlotWide, uint64_t(wide) * kPanel * sizeof(float)));
      for (int64_t panel = block.first_panel; panel < block.end_panel; panel++) {
        widen(panels.at(panel), panels.count, widened);
        run_tiles(job, block, widened, wide * kPanel, wide, panel, 1);
      }
      return;
    }
  }
  const int64_t tiles = (block.rows + tile_rows<K>() - 1) / tile_rows<K>();
  const int most = panels_at_once<K>(int((block.rows + tiles - 1) / tiles));
  for (int64_t panel = block.first_panel; panel < block.end_panel;) {
    const int together = panel + most <= block.end_panel ? most : 1;
    run_tiles(job, block, panels.at(panel), panels.units, panels.count, panel, together);
    panel += together;
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

int rounded_together() { return has_matrix_unit() ? 4 : 2; }

int64_t packed_bytes(int64_t out, int64_t in, bool is_bf16) {
  return (out + kPanel - 1) / kPanel * kPanel * (is_bf16 ? packed_units<Bf16>(in) : in) * 4;
}

void pack(const void* weight, int64_t out, int64_t in, bool is_bf16, void* panels, int threads) {
  if (is_bf16) pack_all(static_cast<const Bf16*>(weight), out, in, static_cast<uint32_t*>(panels), threads);
  else pack_all(static_cast<const float*>(weight), out, in, static_cast<float*>(panels), threads);
}

namespace {

// What a core keeps of the left side while panels pass by.
struct Height {
  int64_t tile, bytes, least, most;
};

// Rows of kind K in pieces for the threads; `run` takes each.
template <class K, class T, class Run>
void share_out(Job<K, T>& job, const Height& height, int threads, Run&& run) {
  const int64_t in = job.weight->in, out = job.weight->out;
  const int64_t fitting = height.bytes / int64_t(in * sizeof(typename Sides<K>::Left));
  job.block_rows = std::clamp(fitting, height.least, height.most) / height.tile * height.tile;
  job.panels = (out + kPanel - 1) / kPanel;
  const int64_t blocks = (job.rows + job.block_rows - 1) / job.block_rows;
  const int64_t wanted = (threads * kPiecesPerThread + blocks - 1) / blocks;
  const int64_t worth = std::max<int64_t>(1, std::min(job.rows, job.block_rows) * in * out / kMinPieceWork);
  const int64_t split = threads > 1 ? std::min(wanted, worth) : 1;
  job.panels_a_piece = std::max<int64_t>(1, (job.panels + split - 1) / split);
  if (job.panels_a_piece > 4) job.panels_a_piece = (job.panels_a_piece + 3) / 4 * 4;
  job.pieces_a_block = (job.panels + job.panels_a_piece - 1) / job.panels_a_piece;
  parallel(threads, int(blocks * job.pieces_a_block), [&](int index) { run(job.block(index)); });
}

// What a matmul is asked for.
template <class T>
struct Asked {
  const T* x;
  int64_t x_stride, rows;
  const Weight& weight;
  T* out;
  int64_t out_stride;
  int threads;

  // With rows laid out as weights of kind K want them.
  template <class K>
  Job<K, T> job() const {
    return {left_side<K>(x, x_stride, rows, weight.in, threads), rows, &weight, out, out_stride};
  }
};

#if defined(KVFERRY_MATRIX_UNIT)

template <class K, class T>
void multiply_by_unit(const Asked<T>& asked) {
  const int64_t tile = std::is_same_v<K, Whole8> ? kRoundedRows : kMatrixRows;
  const Height height = {tile, kUnitBlockBytes, kMinBlockRows, kUnitBlockRows};
  if constexpr (std::is_same_v<K, Whole8>) {
    const RoundedRows rows = rounded_rows(asked.x, asked.x_stride, asked.rows, asked.weight.in, asked.threads);
    Job<Whole8OfUnit, T> job = {rows.x, asked.rows, &asked.weight, asked.out, asked.out_stride};
    share_out(job, height, asked.threads, [&](const Block& block) { run_rounded(job, rows, block); });
  } else {
    Job<Bf16, Bf16> job = asked.template job<Bf16>();
    share_out(job, height, asked.threads, [&](const Block& block) { run_matrix_unit<K>(job, block); });
  }
}

#endif

template <class K, class T>
void multiply(const Asked<T>& asked) {
#if defined(KVFERRY_MATRIX_UNIT)
  if constexpr (std::is_same_v<T, Bf16> || std::is_same_v<K, Whole8>)
    if (has_matrix_unit()) return multiply_by_unit<K>(asked);
#endif
  Job<K, T> job = asked.template job<K>();
  const Height height = {tile_rows<K>(), kBlockBytes, kMinBlockRows, kMaxBlockRows};
  share_out(job, height, asked.threads, [&](const Block& block) { run_block(job, block); });
}

}  // namespace

template <class T>
void linear(const T* x, int64_t x_stride, int64_t rows, const Weight& weight, T* out, int64_t out_stride, int threads) {
  if (rows <= 0) return;
  const Asked<T> asked = {x, x_stride, rows, weight, out, out_stride, threads};
  switch (weight.kind) {
    case kInt8:
      return multiply<Int8>(asked);
    case kInt4:
      return multiply<Int4>(asked);
    case kWhole8:
      return multiply<Whole8>(asked);
    default:
      return multiply<T>(asked);
  }
}

template void linear<float>(const float*, int64_t, int64_t, const Weight&, float*, int64_t, int);
template void linear<Bf16>(const Bf16*, int64_t, int64_t, const Weight&, Bf16*, int64_t, int);

}  // namespace kvferry

// Linear layers: weights are streamed in packed form and widened in registers or, for many rows, a few panels at a time.
// No widened copy of a whole weight exists.
#include "matmul.h"

#include <algorithm>
#include <type_traits>

#include "matmul_unit.h"
#include "pool.h"
#include "tile_dispatch.h"

namespace kvferry {
namespace {

constexpr int64_t kBlockBytes = 192 << 10;  // of rows that fit a core's second-level cache together with a panel
constexpr int64_t kMinBlockRows = 48, kMaxBlockRows = 192;
constexpr int64_t kUnitBlockBytes = 800 << 10, kUnitBlockRows = 256;  // for CPUs with a matrix unit, which have 2 MiB
constexpr int kPiecesPerThread = 6;  // small enough that a delayed thread leaves little to wait for
constexpr int64_t kWidenRows = 16;
constexpr int64_t kMinPieceWork = 1 << 15;  // multiply-adds; less is not worth dispatching to a thread

// Prefetch for tile `t` of `tiles` over `width` panels: its share of the panels that follow, so that memory is read
// continuously and not only by the first tile.
template <class Right>
Ahead next_of(const Right* panels, int64_t panel_units, int width, int64_t t, int64_t tiles) {
  const int64_t line = kPanel * int64_t(sizeof(Right)), units = width * panel_units;
  return {panels + units + units * t / tiles, std::min(line, line * width / tiles)};
}

// Computes the rows of one block times `panels` panels, tile by tile.
template <class K, class T, class Right>
void run_tiles(const Job<K, T>& job, const Block& block, const Right* right, int64_t panel_units, int64_t count,
               int64_t panel, int panels) {
  typedef std::conditional_t<std::is_same_v<Right, float>, float, K> Multiplied;
  const int64_t rows = block.rows;
  // Tiles of nearly equal height: 8 rows are 4 + 4, not 6 + 2.
  const int64_t tiles = (rows + tile_rows<Multiplied>() - 1) / tile_rows<Multiplied>();
  alignas(64) float tile[kTileValues];
  for (int64_t t = 0, row = block.first_row; t < tiles; t++) {
    const int height = int(rows * (t + 1) / tiles - rows * t / tiles);
    const int width = panels == panels_per_tile<Multiplied>(height) ? panels : 1;
    for (int p = 0; p < panels; p += width) {
      const Right* own = right + p * panel_units;
      dispatch_tile<Multiplied>(height, width, job.x.values + row * job.x.stride, job.x.stride, own, panel_units, count, tile,
                          next_of(own, panel_units, width, t, tiles));
      put_tile(job, tile, height, width, row, panel + p);
    }
    row += height;
  }
}

// Computes one block of rows times one run of panels.
template <class K, class T>
void run_block(const Job<K, T>& job, const Block& block) {
  const Panels<K> panels(*job.weight);
  if constexpr (std::is_same_v<K, Int8> || std::is_same_v<K, Int4>) {
    if (block.rows > kWidenRows) {  // several tiles: widen the panel once for all of them
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
  const int most = panels_per_tile<K>(int((block.rows + tiles - 1) / tiles));
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

int int8_dynamic_interleave() { return has_matrix_unit() ? 4 : 2; }

int64_t packed_bytes(int64_t out, int64_t in, bool is_bf16) {
  return (out + kPanel - 1) / kPanel * kPanel * (is_bf16 ? packed_units<Bf16>(in) : in) * 4;
}

void pack(const void* weight, int64_t out, int64_t in, bool is_bf16, void* panels, int threads) {
  if (is_bf16) pack_all(static_cast<const Bf16*>(weight), out, in, static_cast<uint32_t*>(panels), threads);
  else pack_all(static_cast<const float*>(weight), out, in, static_cast<float*>(panels), threads);
}

namespace {

// Size of a row block: the part of the left side that a core keeps in its cache while it streams panels.
struct BlockHeight {
  int64_t tile, bytes, least, most;
};

// Divides the rows into blocks and the panels into pieces; calls run(block) for each in parallel.
template <class K, class T, class Run>
void run_blocks(Job<K, T>& job, const BlockHeight& height, int threads, Run&& run) {
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

template <class T>
struct MatmulArgs {
  const T* x;
  int64_t x_stride, rows;
  const Weight& weight;
  T* out;
  int64_t out_stride;
  int threads;

  // The job, with rows in the layout for weights of kind K.
  template <class K>
  Job<K, T> job() const {
    return {left_side<K>(x, x_stride, rows, weight.in, threads), rows, &weight, out, out_stride};
  }
};

#if defined(KVFERRY_MATRIX_UNIT)

template <class K, class T>
void multiply_by_unit(const MatmulArgs<T>& args) {
  const int64_t tile = std::is_same_v<K, Int8Dynamic> ? kRoundedRows : kMatrixRows;
  const BlockHeight height = {tile, kUnitBlockBytes, kMinBlockRows, kUnitBlockRows};
  if constexpr (std::is_same_v<K, Int8Dynamic>) {
    const RoundedRows rows = rounded_rows(args.x, args.x_stride, args.rows, args.weight.in, args.threads);
    Job<Int8DynamicUnit, T> job = {rows.x, args.rows, &args.weight, args.out, args.out_stride};
    run_blocks(job, height, args.threads, [&](const Block& block) { run_rounded(job, rows, block); });
  } else {
    Job<Bf16, Bf16> job = args.template job<Bf16>();
    run_blocks(job, height, args.threads, [&](const Block& block) { run_matrix_unit<K>(job, block); });
  }
}

#endif

template <class K, class T>
void multiply(const MatmulArgs<T>& args) {
#if defined(KVFERRY_MATRIX_UNIT)
  if constexpr (std::is_same_v<T, Bf16> || std::is_same_v<K, Int8Dynamic>)
    if (has_matrix_unit()) return multiply_by_unit<K>(args);
#endif
  Job<K, T> job = args.template job<K>();
  const BlockHeight height = {tile_rows<K>(), kBlockBytes, kMinBlockRows, kMaxBlockRows};
  run_blocks(job, height, args.threads, [&](const Block& block) { run_block(job, block); });
}

}  // namespace

template <class T>
void linear(const T* x, int64_t x_stride, int64_t rows, const Weight& weight, T* out, int64_t out_stride, int threads) {
  if (rows <= 0) return;
  const MatmulArgs<T> args = {x, x_stride, rows, weight, out, out_stride, threads};
  switch (weight.kind) {
    case kInt8:
      return multiply<Int8>(args);
    case kInt4:
      return multiply<Int4>(args);
    case kInt8Dynamic:
      return multiply<Int8Dynamic>(args);
    default:
      return multiply<T>(args);
  }
}

template void linear<float>(const float*, int64_t, int64_t, const Weight&, float*, int64_t, int);
template void linear<Bf16>(const Bf16*, int64_t, int64_t, const Weight&, Bf16*, int64_t, int);

}  // namespace kvferry

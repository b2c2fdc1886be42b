// Pieces of a matmul on the matrix unit: bfloat16 rows times weights of 16, 8 or 4 bits.
#pragma once
#include "matmul_job.h"
#include "tile_rounded.h"
#include "tile_unpacked.h"

namespace kvferry {

#if defined(KVFERRY_MATRIX_UNIT)

// A tile of results whose rows are stored while the unit computes the next tile.
class DeferredTile {
 public:
  explicit DeferredTile(const Job<Bf16, Bf16>& job) : job_(job) {}

  // The buffer for the next tile; the other one holds rows that are not yet stored.
  float* buffer() { return tiles_[own_ ^ 1]; }

  void put(int rows) {
    const int until = std::min(done_ + rows, rows_);
    put_tile(job_, tiles_[own_] + done_ * panels_ * kPanel, until - done_, panels_, row_ + done_, panel_);
    done_ = until;
  }

  // Makes the contents of `buffer()` the current tile, after storing the rest of the previous one.
  void replace(int rows, int panels, int64_t row, int64_t panel) {
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

// Computes the rows of a block times `panels` panels.
template <class Tiles>
void run_rows(const Job<Bf16, Bf16>& job, MatrixUnit& unit, DeferredTile& deferred, const Block& block, Tiles&& right,
              int64_t panel, int panels) {
  const int64_t count = packed_units<Bf16>(job.weight->in), end = block.first_row + block.rows;
  const int share = int((kMatrixRows * kMatrixPairs + count - 1) / count);
  for (int64_t row = block.first_row; row < end; row += kMatrixRows) {
    const int height = int(std::min<int64_t>(kMatrixRows, end - row));
    unit.multiply(height, panels, job.x.values + row * job.x.stride, job.x.stride, right, count, deferred.buffer(),
                  [&] { deferred.put(share); });
    deferred.replace(height, panels, row, panel);
  }
}

// Computes a piece's rows times weights of kind K on the matrix unit.
template <class K>
void run_matrix_unit(const Job<Bf16, Bf16>& job, const Block& block) {
  const Panels<K> panels(*job.weight);
  const int64_t pairs = packed_units<Bf16>(job.weight->in);
  const int most = block.rows <= 16 ? 4 : 2;
  MatrixUnit unit;
  DeferredTile deferred(job);
  for (int64_t panel = block.first_panel; panel < block.end_panel;) {
    const int together = panel + most <= block.end_panel ? most : 1;
    if constexpr (std::is_same_v<K, Bf16>) {
      run_rows(job, unit, deferred, block, PackedTiles{panels.at(panel), panels.units}, panel, together);
    } else if (block.rows <= kMatrixRows) {
      run_rows(job, unit, deferred, block, UnpackedTiles(panels.at(panel), panels.units, pairs), panel, together);
    } else {
      auto* memory = static_cast<uint32_t*>(scratch(kSlotWide, uint64_t(together * pairs * kPanel) * sizeof(uint32_t)));
      const PackedTiles right = unpack_panels(panels.at(panel), panels.units, together, pairs, memory);
      run_rows(job, unit, deferred, block, right, panel, together);
    }
    panel += together;
  }
  deferred.put(kMatrixRows);
}

// As `run_matrix_unit`, with rounded rows.
template <class T>
void run_rounded(const Job<Int8DynamicUnit, T>& job, const RoundedRows& rows, const Block& block) {
  const Panels<Int8Dynamic> panels(*job.weight);
  const int most = block.rows <= kFewRows ? 2 : 1;
  alignas(64) float tile[kRoundedRows * kPanel];
  RoundedUnit unit;
  for (int64_t panel = block.first_panel; panel < block.end_panel;) {
    const int together = panel + most <= block.end_panel ? most : 1;
    for (int64_t row = block.first_row; row < block.first_row + block.rows; row += kRoundedRows) {
      const int height = int(std::min<int64_t>(kRoundedRows, block.first_row + block.rows - row));
      unit.multiply(height, together, rows, row, panels.at(panel), panels.units, tile);
      put_tile(job, tile, height, together, row, panel);
    }
    panel += together;
  }
}

#endif

}  // namespace kvferry

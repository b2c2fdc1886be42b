// Pieces of a matmul that the matrix unit does: bfloat16 rows times weights of 16, 8 or 4 bits.
#pragma once
#include "matmul_job.h"
#include "tile_rounded.h"
#include "tile_unpacked.h"

namespace kvferry {

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

// The rows of a block times `panels` panels.
template <class Tiles>
void run_rows(const Job<Bf16, Bf16>& job, MatrixUnit& unit, LateTile& late, const Block& block, Tiles&& right,
              int64_t panel, int panels) {
  const int64_t count = packed_units<Bf16>(job.weight->in), end = block.first_row + block.rows;
  const int share = int((kMatrixRows * kMatrixPairs + count - 1) / count);
  for (int64_t row = block.first_row; row < end; row += kMatrixRows) {
    const int height = int(std::min<int64_t>(kMatrixRows, end - row));
    unit.multiply(height, panels, job.x.values + row * job.x.stride, job.x.stride, right, count, late.room(),
                  [&] { late.put(share); });
    late.follow(height, panels, row, panel);
  }
}

// A piece's rows times weights of kind K, through the matrix unit.
template <class K>
void run_matrix_unit(const Job<Bf16, Bf16>& job, const Block& block) {
  const Panels<K> panels(*job.weight);
  const int64_t pairs = packed_units<Bf16>(job.weight->in);
  const int most = block.rows <= 16 ? 4 : 2;
  MatrixUnit unit;
  LateTile late(job);
  for (int64_t panel = block.first_panel; panel < block.end_panel;) {
    const int together = panel + most <= block.end_panel ? most : 1;
    if constexpr (std::is_same_v<K, Bf16>) {
      run_rows(job, unit, late, block, PackedTiles{panels.at(panel), panels.units}, panel, together);
    } else if (block.rows <= kMatrixRows) {
      run_rows(job, unit, late, block, UnpackedTiles(panels.at(panel), panels.units, pairs), panel, together);
    } else {
      auto* room = static_cast<uint32_t*>(scratch(kSlotWide, uint64_t(together * pairs * kPanel) * sizeof(uint32_t)));
      const PackedTiles right = unpack_panels(panels.at(panel), panels.units, together, pairs, room);
      run_rows(job, unit, late, block, right, panel, together);
    }
    panel += together;
  }
  late.put(kMatrixRows);
}

// The same with rounded rows.
template <class T>
void run_rounded(const Job<Whole8OfUnit, T>& job, const RoundedRows& rows, const Block& block) {
  const Panels<Whole8> panels(*job.weight);
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

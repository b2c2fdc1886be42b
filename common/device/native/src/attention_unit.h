// Attention of one new token with the CPU's matrix unit (AMX), for bfloat16: the same sums in another order, with weights
// rounded to bfloat16 as for longer chunks. Whether it is used depends on the model's shape alone.
#pragma once
#include <algorithm>

#include "attention.h"
#include "pool.h"
#include "tile_matrix.h"

namespace kvferry {

#if defined(KVFERRY_MATRIX_UNIT)

static inline bool fits_unit(const Attention<Bf16>& a) {
  return has_matrix_unit() && a.group() <= 16 && a.size % 32 == 0 && a.size <= 128;
}

// Tiles while scoring: 0 to 3 queries, 4 the scores of 16 keys, 6 and 7 keys. While gathering: 0 to 3 sums of values,
// 4 the weights of 32 keys, 6 and 7 their values.
class UnitAttention {
 public:
  static constexpr int64_t kKeys = 16, kWeights = 32, kWide = 64;  // keys, weights and dimensions at a time

  UnitAttention(const Attention<Bf16>& a, const int64_t* offsets, int64_t count)
      : a_(a), offsets_(offsets), count_(count), group_(a.group()) {
    const int64_t sizes[] = {group_ * a.size / 2, kDecodePart * group_, group_ * kDecodePart / 2, kKeys * a.size / 2,
                             kWeights / 2 * kWide};
    int64_t at[6] = {};
    for (int i = 0; i < 5; i++) at[i + 1] = at[i] + (sizes[i] + 15) / 16 * 16;
    auto* memory = static_cast<uint32_t*>(scratch(kSlotUnit, uint64_t(at[5]) * 4));
    queries_ = memory;
    raw_ = reinterpret_cast<float*>(memory + at[1]);
    weights_ = reinterpret_cast<Bf16*>(memory + at[2]);
    keys_ = reinterpret_cast<Bf16*>(memory + at[3]);
    values_ = memory + at[4];
  }
  ~UnitAttention() { _tile_release(); }

  // query [group][size] -> scores [group][kDecodePart], the first `count` valid. Calls before(j) for each key.
  template <class Before>
  void score(const Bf16* query, float* scores, Before&& before) const {
    for (int64_t pair = 0; pair < a_.size / 2; pair++)
      for (int64_t r = 0; r < group_; r++)
        std::memcpy(queries_ + pair * group_ + r, query + r * a_.size + 2 * pair, sizeof(uint32_t));
    load_queries();
    for (int64_t j = 0; j < count_; j += kKeys) {
      const Bf16* keys = rows(j);
      for (int64_t i = j; i < std::min(j + kKeys, count_); i++) before(i);
      score_keys(keys, raw_ + j * group_);
    }
    for (int64_t r = 0; r < group_; r++)
      for (int64_t j = 0; j < count_; j++) scores[r * kDecodePart + j] = raw_[j * group_ + r] * a_.scale;
  }

  // weights [group][kDecodePart] times the values -> out [group][out_stride]. Calls before(j) for each value.
  template <class Before>
  void gather(const float* weights, float* out, int64_t out_stride, Before&& before) const {
    round_weights(weights);
    const int g = int(group_);
    shape_tiles({g, g, g, g, g, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64});
    for (int64_t d = 0; d < a_.size; d += kWide) {
      const bool whole = d + kWide <= a_.size;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t j = 0; j < count_; j += kWeights) {
        if (d == 0)
          for (int64_t i = j; i < std::min(j + kWeights, count_); i++) before(i);
        pair_values(j, d, whole ? kWide : 32);
        tiles_see_memory();
        _tile_loadd(4, weights_ + j, kDecodePart * 2);
        _tile_loadd(6, values_, kWide * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, values_ + 16, kWide * 4);
        _tile_dpbf16ps(1, 4, 7);
        if (!whole) continue;
        _tile_loadd(6, values_ + 32, kWide * 4);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, values_ + 48, kWide * 4);
        _tile_dpbf16ps(3, 4, 7);
      }
      _tile_stored(0, out + d, out_stride * 4);
      _tile_stored(1, out + d + 16, out_stride * 4);
      if (!whole) continue;
      _tile_stored(2, out + d + 32, out_stride * 4);
      _tile_stored(3, out + d + 48, out_stride * 4);
    }
  }

 private:
  void load_queries() const {
    const int bytes = 4 * int(group_);
    shape_tiles({16, 16, 16, 16, 16, 16, 16, 16}, {bytes, bytes, bytes, bytes, bytes, 64, 64, 64});
    const int64_t part = 16 * group_;
    tiles_see_memory();
    _tile_loadd(0, queries_, bytes);
    if (a_.size > 32) _tile_loadd(1, queries_ + part, bytes);
    if (a_.size > 64) _tile_loadd(2, queries_ + 2 * part, bytes);
    if (a_.size > 96) _tile_loadd(3, queries_ + 3 * part, bytes);
  }

  void score_keys(const Bf16* keys, float* to) const {
    const int64_t stride = a_.size * int64_t(sizeof(Bf16));
    tiles_see_memory();
    _tile_zero(4);
    _tile_loadd(6, keys, stride);
    _tile_dpbf16ps(4, 6, 0);
    if (a_.size > 32) {
      _tile_loadd(7, keys + 32, stride);
      _tile_dpbf16ps(4, 7, 1);
    }
    if (a_.size > 64) {
      _tile_loadd(6, keys + 64, stride);
      _tile_dpbf16ps(4, 6, 2);
    }
    if (a_.size > 96) {
      _tile_loadd(7, keys + 96, stride);
      _tile_dpbf16ps(4, 7, 3);
    }
    _tile_stored(4, to, group_ * 4);
  }

  // Sixteen contiguous keys: in place, or a copy padded with zeros.
  const Bf16* rows(int64_t j) const {
    const int64_t here = std::min(kKeys, count_ - j);
    if (here == kKeys && in_order(j)) return a_.keys + offsets_[j];
    for (int64_t i = 0; i < here; i++) std::copy_n(a_.keys + offsets_[j + i], a_.size, keys_ + i * a_.size);
    std::fill(keys_ + here * a_.size, keys_ + kKeys * a_.size, Bf16{});
    return keys_;
  }

  bool in_order(int64_t j) const {
    for (int64_t i = j + 1; i < j + kKeys; i++)
      if (offsets_[i] - offsets_[i - 1] != a_.size) return false;
    return true;
  }

  void round_weights(const float* weights) const {
    const int64_t end = (count_ + kWeights - 1) / kWeights * kWeights, known = (count_ + kLanes - 1) / kLanes * kLanes;
    for (int64_t r = 0; r < group_; r++) {
      Bf16* own = weights_ + r * kDecodePart;
      for (int64_t j = 0; j < known; j += kLanes) store<kLanes>(own + j, load<kLanes>(weights + r * kDecodePart + j));
      std::fill(own + known, own + end, Bf16{});
    }
  }

  // Values [j, j + 32) of dimensions [d, d + width) as pairs of adjacent positions, padded with zeros.
  void pair_values(int64_t j, int64_t d, int64_t width) const {
    alignas(64) static constexpr Bf16 kNothing[32] = {};
    const __m512i first = interleaving(0), second = interleaving(16);
    for (int64_t pair = 0; pair < kWeights / 2; pair++) {
      const int64_t at = j + 2 * pair;
      for (int64_t i = 0; i < width; i += 32) {
        const __m512i low = _mm512_loadu_si512(at < count_ ? a_.values + offsets_[at] + d + i : kNothing);
        const __m512i high = _mm512_loadu_si512(at + 1 < count_ ? a_.values + offsets_[at + 1] + d + i : kNothing);
        uint32_t* to = values_ + pair * kWide + i;
        _mm512_store_si512(to, _mm512_permutex2var_epi16(low, first, high));
        _mm512_store_si512(to + 16, _mm512_permutex2var_epi16(low, second, high));
      }
    }
  }

  // Indices that interleave two vectors, starting at lane `from`.
  static __m512i interleaving(int from) {
    alignas(64) uint16_t picks[32];
    for (int i = 0; i < 32; i++) picks[i] = uint16_t(from + i / 2 + (i % 2) * 32);
    return _mm512_load_si512(picks);
  }

  const Attention<Bf16>& a_;
  const int64_t* offsets_;
  int64_t count_, group_;
  uint32_t *queries_, *values_;
  float* raw_;
  Bf16 *weights_, *keys_;
};

#endif

}  // namespace kvferry

// The operations between the matmuls of a layer, row by row.
#pragma once
#include <cstdint>

#include "simd.h"

namespace kvferry {

// out = norm(x) * weight; with `add`, x += add first. Contiguous rows of `size` values.
template <class T>
void rms_norm(T* x, const T* add, const T* weight, float eps, int64_t rows, int64_t size, T* out, int threads);

// [rows][2 * size] -> silu(first half) * second half.
template <class T>
void silu_mul(const T* gate_up, int64_t rows, int64_t size, T* out, int threads);

struct Heads {
  int64_t stride;  // values from one token to the next
  int64_t count;
};

// Half-split rotary embedding: cos and sin [rows][size] float32. Input and output may be the same memory.
template <class T>
void rotate(const T* x, Heads from, T* out, int64_t out_stride, const float* cos, const float* sin, int64_t rows,
            int64_t size, int threads);

// Writes into [block][head][token][size] at slots (block * block_size + offset).
template <class T>
void write_cache(const T* x, Heads from, const int64_t* slots, T* cache, int64_t block_size, int64_t rows, int64_t size,
                 int threads);

}  // namespace kvferry

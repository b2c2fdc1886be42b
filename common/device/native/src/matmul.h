// Linear layers over packed weights, for the other kernels. Sizes are in values unless stated otherwise.
#pragma once
#include <cstdint>

#include "simd.h"

namespace kvferry {

enum Kind : int32_t { kFloat32, kBfloat16, kInt8, kInt4, kInt8Dynamic };

struct Weight {
  int64_t out, in;
  int32_t kind;
  const void* panels;   // see tile.h and tile_quantized.h
  const float* bias;    // [out] or null
  const float* scales;  // [out]: factor of each column's sums, or null
};

// Size in bytes of a packed [out, in] weight that is not quantised.
int64_t packed_bytes(int64_t out, int64_t in, bool is_bf16);
void pack(const void* weight, int64_t out, int64_t in, bool is_bf16, void* panels, int threads);

// Adjacent values of k in a panel of kInt8Dynamic: four if the matrix unit reads it, else two.
int int8_dynamic_interleave();

// x [rows][in] and out [rows][weight.out], each with a stride. Weights of float32 and bfloat16 must have x's type.
template <class T>
void linear(const T* x, int64_t x_stride, int64_t rows, const Weight& weight, T* out, int64_t out_stride, int threads);

}  // namespace kvferry

// Linear layers over packed weights, as other kernels call them. All sizes in values unless said otherwise.
#pragma once
#include <cstdint>

#include "simd.h"

namespace kvferry {

enum Kind : int32_t { kFloat32, kBfloat16, kInt8, kInt4, kWhole8 };

struct Weight {
  int64_t out, in;
  int32_t kind;
  const void* panels;   // see tile.h and tile_quantized.h
  const float* bias;    // [out] or null
  const float* scales;  // [out]: what each column's sums are multiplied by, or null
};

// Bytes of the packed form of [out, in] weights that are not quantised.
int64_t packed_bytes(int64_t out, int64_t in, bool is_bf16);
void pack(const void* weight, int64_t out, int64_t in, bool is_bf16, void* panels, int threads);

// Values of k side by side in a panel of kWhole8: four where the matrix unit reads it, else two.
int rounded_together();

// x [rows][in] with a stride, out [rows][weight.out] with a stride. Weights of float32 and bfloat16 are of x's type.
template <class T>
void linear(const T* x, int64_t x_stride, int64_t rows, const Weight& weight, T* out, int64_t out_stride, int threads);

}  // namespace kvferry

// Linear layers over packed weights, as other kernels call them. All sizes in values unless said otherwise.
#pragma once
#include <cstdint>

#include "simd.h"

namespace kvferry {

struct Weight {
  int64_t out, in;
  int32_t is_bf16;
  const void* panels;   // see tile.h
  const float* bias;    // [out] or null
};

// Bytes of the packed form of [out, in] weights.
int64_t packed_bytes(int64_t out, int64_t in, bool is_bf16);
void pack(const void* weight, int64_t out, int64_t in, bool is_bf16, void* panels, int threads);

// x [rows][in] with a stride, out [rows][weight.out] with a stride.
template <class T>
void linear(const T* x, int64_t x_stride, int64_t rows, const Weight& weight, T* out, int64_t out_stride, int threads);

}  // namespace kvferry

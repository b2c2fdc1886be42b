// Whole decoder layers of Llama-like models in one call, without overhead between the ops.
#pragma once
#include "attention.h"
#include "matmul.h"

namespace kvferry {

struct Shape {
  int64_t hidden, heads, kv_heads, size, intermediate;
  float eps, scale;
};

// One layer; all vectors have the model's dtype.
struct Layer {
  const void *input_norm, *mlp_norm;
  const void *query_norm, *key_norm;  // [size], or null
  Weight qkv, output, gate_up, down;
  void *keys, *values;  // the layer's cache
  int64_t window;
};

struct Step {
  Batch batch;
  int64_t tokens;
  const int64_t* slots;     // [tokens]
  const float *cos, *sin;   // [tokens][size]
  void* residual;           // [tokens][hidden], read and written
  void* delta;              // [tokens][hidden]: still to be added to the residual
  int64_t has_delta;        // whether `delta` is valid on entry
};

template <class T>
void run_layers(const Shape& shape, const Layer* layers, int64_t count, const Step& step, int threads);

}  // namespace kvferry

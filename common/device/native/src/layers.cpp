// Norm, projections, rotary embedding, cache write, attention and MLP of each layer, over reused buffers.
#include "layers.h"

#include <algorithm>

#include "elementwise.h"
#include "pool.h"

namespace kvferry {
namespace {

constexpr int64_t kMlpRows = 256;  // tokens per MLP pass; limits the memory of its wide activations

template <class T>
struct Buffers {
  T *normed, *qkv, *attended, *gate_up, *active;

  Buffers(const Shape& s, int64_t tokens) {
    const int64_t rows = std::min(tokens, kMlpRows);
    const int64_t sizes[] = {tokens * s.hidden, tokens * (s.heads + 2 * s.kv_heads) * s.size, tokens * s.heads * s.size,
                             rows * 2 * s.intermediate, rows * s.intermediate};
    int64_t at[6] = {};
    for (int i = 0; i < 5; i++) at[i + 1] = at[i] + (sizes[i] + 63) / 64 * 64;
    T* memory = static_cast<T*>(scratch(kSlotStep, uint64_t(at[5]) * sizeof(T)));
    normed = memory;
    qkv = memory + at[1];
    attended = memory + at[2];
    gate_up = memory + at[3];
    active = memory + at[4];
  }
};

template <class T>
const T* typed(const void* p) {
  return static_cast<const T*>(p);
}

// Normalises every head of every token; tokens are `stride` values apart.
template <class T>
void norm_heads(T* x, int64_t stride, int64_t heads, const void* weight, const Shape& s, int64_t tokens) {
  for (int64_t token = 0; token < tokens; token++) {
    T* own = x + token * stride;
    rms_norm<T>(own, nullptr, typed<T>(weight), s.eps, heads, s.size, own, 1);
  }
}

template <class T>
void attention_block(const Shape& s, const Layer& layer, const Step& step, const Buffers<T>& b, T* delta, int threads) {
  const int64_t width = (s.heads + 2 * s.kv_heads) * s.size, tokens = step.tokens;
  linear<T>(b.normed, s.hidden, tokens, layer.qkv, b.qkv, width, threads);
  T *key = b.qkv + s.heads * s.size, *value = key + s.kv_heads * s.size;
  if (layer.query_norm) norm_heads<T>(b.qkv, width, s.heads, layer.query_norm, s, tokens);
  if (layer.key_norm) norm_heads<T>(key, width, s.kv_heads, layer.key_norm, s, tokens);
  const Heads rotated = {width, s.heads + s.kv_heads}, cached = {width, s.kv_heads};
  rotate<T>(b.qkv, rotated, b.qkv, width, step.cos, step.sin, tokens, s.size, threads);
  write_cache<T>(key, cached, step.slots, static_cast<T*>(layer.keys), step.batch.block_size, tokens, s.size, threads);
  write_cache<T>(value, cached, step.slots, static_cast<T*>(layer.values), step.batch.block_size, tokens, s.size, threads);
  Attention<T> a = {step.batch, b.qkv, width, typed<T>(layer.keys), typed<T>(layer.values), s.heads, s.kv_heads, s.size,
                    s.scale, layer.window, b.attended};
  attend(a, threads);
  linear<T>(b.attended, s.heads * s.size, tokens, layer.output, delta, s.hidden, threads);
}

template <class T>
void mlp_block(const Shape& s, const Layer& layer, int64_t tokens, const Buffers<T>& b, T* delta, int threads) {
  for (int64_t first = 0; first < tokens; first += kMlpRows) {
    const int64_t rows = std::min(kMlpRows, tokens - first);
    linear<T>(b.normed + first * s.hidden, s.hidden, rows, layer.gate_up, b.gate_up, 2 * s.intermediate, threads);
    silu_mul<T>(b.gate_up, rows, s.intermediate, b.active, threads);
    linear<T>(b.active, s.intermediate, rows, layer.down, delta + first * s.hidden, s.hidden, threads);
  }
}

}  // namespace

template <class T>
void run_layers(const Shape& s, const Layer* layers, int64_t count, const Step& step, int threads) {
  const Buffers<T> b(s, step.tokens);
  T *residual = static_cast<T*>(step.residual), *delta = static_cast<T*>(step.delta);
  for (int64_t i = 0; i < count; i++) {
    const Layer& layer = layers[i];
    const T* pending = i > 0 || step.has_delta ? delta : nullptr;
    rms_norm<T>(residual, pending, typed<T>(layer.input_norm), s.eps, step.tokens, s.hidden, b.normed, threads);
    attention_block<T>(s, layer, step, b, delta, threads);
    rms_norm<T>(residual, delta, typed<T>(layer.mlp_norm), s.eps, step.tokens, s.hidden, b.normed, threads);
    mlp_block<T>(s, layer, step.tokens, b, delta, threads);
  }
}

template void run_layers<float>(const Shape&, const Layer*, int64_t, const Step&, int);
template void run_layers<Bf16>(const Shape&, const Layer*, int64_t, const Step&, int);

}  // namespace kvferry

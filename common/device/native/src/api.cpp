// The library's C interface, called through ctypes. The caller must check shapes; nothing is checked here.
#include "attention.h"
#include "elementwise.h"
#include "layers.h"
#include "matmul.h"

using namespace kvferry;

#define KVFERRY_API extern "C" __attribute__((visibility("default")))
// Runs the given statement with T as Bf16 or float.
#define KVFERRY_TYPED(is_bf16, ...) \
  do {                              \
    if (is_bf16) {                  \
      using T = Bf16;               \
      __VA_ARGS__;                  \
    } else {                        \
      using T = float;              \
      __VA_ARGS__;                  \
    }                               \
  } while (0)

KVFERRY_API int64_t kvf_packed_bytes(int64_t out, int64_t in, int32_t is_bf16) { return packed_bytes(out, in, is_bf16); }

KVFERRY_API int32_t kvf_int8_dynamic_interleave() { return int8_dynamic_interleave(); }

KVFERRY_API void kvf_pack(const void* weight, int64_t out, int64_t in, int32_t is_bf16, void* panels, int32_t threads) {
  pack(weight, out, in, is_bf16, panels, threads);
}

KVFERRY_API void kvf_linear(int32_t is_bf16, const Weight* weight, const void* x, int64_t x_stride, int64_t rows, void* out,
                            int32_t threads) {
  KVFERRY_TYPED(is_bf16,
                linear<T>(static_cast<const T*>(x), x_stride, rows, *weight, static_cast<T*>(out), weight->out, threads));
}

KVFERRY_API void kvf_rms_norm(int32_t is_bf16, void* x, const void* add, const void* weight, float eps, int64_t rows,
                              int64_t size, void* out, int32_t threads) {
  KVFERRY_TYPED(is_bf16, rms_norm<T>(static_cast<T*>(x), static_cast<const T*>(add), static_cast<const T*>(weight), eps,
                                     rows, size, static_cast<T*>(out), threads));
}

KVFERRY_API void kvf_silu_mul(int32_t is_bf16, const void* gate_up, int64_t rows, int64_t size, void* out, int32_t threads) {
  KVFERRY_TYPED(is_bf16, silu_mul<T>(static_cast<const T*>(gate_up), rows, size, static_cast<T*>(out), threads));
}

KVFERRY_API void kvf_rotate(int32_t is_bf16, const void* x, int64_t x_stride, int64_t heads, void* out, const float* cos,
                            const float* sin, int64_t rows, int64_t size, int32_t threads) {
  KVFERRY_TYPED(is_bf16, rotate<T>(static_cast<const T*>(x), {x_stride, heads}, static_cast<T*>(out), heads * size, cos,
                                   sin, rows, size, threads));
}

KVFERRY_API void kvf_write_cache(int32_t is_bf16, const void* x, int64_t x_stride, int64_t heads, const int64_t* slots,
                                 void* cache, int64_t block_size, int64_t rows, int64_t size, int32_t threads) {
  KVFERRY_TYPED(is_bf16, write_cache<T>(static_cast<const T*>(x), {x_stride, heads}, slots, static_cast<T*>(cache),
                                        block_size, rows, size, threads));
}

KVFERRY_API void kvf_attention(int32_t is_bf16, const Batch* batch, const void* query, int64_t query_stride,
                               const void* keys, const void* values, int64_t heads, int64_t kv_heads, int64_t size,
                               float scale, int64_t window, void* out, int32_t threads) {
  KVFERRY_TYPED(is_bf16, Attention<T> a = {*batch, static_cast<const T*>(query), query_stride, static_cast<const T*>(keys),
                                           static_cast<const T*>(values), heads, kv_heads, size, scale, window,
                                           static_cast<T*>(out)};
                attend(a, threads));
}

KVFERRY_API void kvf_layers(int32_t is_bf16, const Shape* shape, const Layer* layers, int64_t count, const Step* step,
                            int32_t threads) {
  KVFERRY_TYPED(is_bf16, run_layers<T>(*shape, layers, count, *step, threads));
}

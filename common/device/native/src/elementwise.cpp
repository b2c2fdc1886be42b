// Norms, rotary embedding, activation and cache writes. Statistics and products in float32; results are rounded once.
#include "elementwise.h"

#include <algorithm>

#include "pool.h"

namespace kvferry {
namespace {

constexpr int64_t kWorthSharing = 1 << 14;  // values; dispatching fewer to a thread takes longer than computing them

// Divides rows into pieces and calls work(first, end) for each.
template <class Work>
void by_rows(int64_t rows, int64_t values_a_row, int threads, Work&& work) {
  if (rows <= 0) return;
  const int64_t total = rows * values_a_row;
  const int64_t pieces = threads > 1 ? std::clamp<int64_t>(total / kWorthSharing, 1, std::min<int64_t>(rows, threads * 4)) : 1;
  parallel(threads, int(pieces), [&](int i) { work(rows * i / pieces, rows * (i + 1) / pieces); });
}

template <class T>
float sum_of_squares(const T* x, int64_t size) {
  F<kLanes> sum = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const F<kLanes> v = load<kLanes>(x + i);
    sum += v * v;
  }
  float total = sum_lanes<kLanes>(sum);
  for (; i < size; i++) total += to_float(x[i]) * to_float(x[i]);
  return total;
}

template <class T>
void add_to(T* x, const T* y, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store<kLanes>(x + i, load<kLanes>(x + i) + load<kLanes>(y + i));
  for (; i < size; i++) put(x + i, to_float(x[i]) + to_float(y[i]));
}

template <class T>
void scale_by(const T* x, float scale, const T* weight, int64_t size, T* out) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store<kLanes>(out + i, load<kLanes>(x + i) * scale * load<kLanes>(weight + i));
  for (; i < size; i++) put(out + i, to_float(x[i]) * scale * to_float(weight[i]));
}

template <class T>
void rotate_one(const T* x, const float* cos, const float* sin, int64_t half, T* out) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F<kLanes> a = load<kLanes>(x + i), b = load<kLanes>(x + half + i);
    const F<kLanes> left = a * load<kLanes>(cos + i) - b * load<kLanes>(sin + i);
    const F<kLanes> right = b * load<kLanes>(cos + half + i) + a * load<kLanes>(sin + half + i);
    store<kLanes>(out + i, left);
    store<kLanes>(out + half + i, right);
  }
  for (; i < half; i++) {
    const float a = to_float(x[i]), b = to_float(x[half + i]);
    put(out + i, a * cos[i] - b * sin[i]);
    put(out + half + i, b * cos[half + i] + a * sin[half + i]);
  }
}

}  // namespace

template <class T>
void rms_norm(T* x, const T* add, const T* weight, float eps, int64_t rows, int64_t size, T* out, int threads) {
  by_rows(rows, size, threads, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
      T* own = x + row * size;
      if (add) add_to(own, add + row * size, size);
      const float mean = sum_of_squares(own, size) / float(size);
      scale_by(own, 1.0f / std::sqrt(mean + eps), weight, size, out + row * size);
    }
  });
}

template <class T>
void silu_mul(const T* gate_up, int64_t rows, int64_t size, T* out, int threads) {
  by_rows(rows, size * 4, threads, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
      const T *gate = gate_up + row * 2 * size, *up = gate + size;
      int64_t i = 0;
      for (; i + kLanes <= size; i += kLanes) {
        const F<kLanes> g = load<kLanes>(gate + i);
        store<kLanes>(out + row * size + i, g / (1.0f + exp_of<kLanes>(-g)) * load<kLanes>(up + i));
      }
      for (; i < size; i++) {
        const float g = to_float(gate[i]);
        put(out + row * size + i, g / (1.0f + exp_of_one(-g)) * to_float(up[i]));
      }
    }
  });
}

template <class T>
void rotate(const T* x, Heads from, T* out, int64_t out_stride, const float* cos, const float* sin, int64_t rows,
            int64_t size, int threads) {
  by_rows(rows, from.count * size, threads, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++)
      for (int64_t head = 0; head < from.count; head++)
        rotate_one(x + row * from.stride + head * size, cos + row * size, sin + row * size, size / 2,
                   out + row * out_stride + head * size);
  });
}

template <class T>
void write_cache(const T* x, Heads from, const int64_t* slots, T* cache, int64_t block_size, int64_t rows, int64_t size,
                 int threads) {
  by_rows(rows, from.count * size, threads, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
      const int64_t block = slots[row] / block_size, offset = slots[row] % block_size;
      for (int64_t head = 0; head < from.count; head++)
        std::memcpy(cache + ((block * from.count + head) * block_size + offset) * size,
                    x + row * from.stride + head * size, size * sizeof(T));
    }
  });
}

#define KVFERRY_FOR(T)                                                                                             \
  template void rms_norm<T>(T*, const T*, const T*, float, int64_t, int64_t, T*, int);                             \
  template void silu_mul<T>(const T*, int64_t, int64_t, T*, int);                                                  \
  template void rotate<T>(const T*, Heads, T*, int64_t, const float*, const float*, int64_t, int64_t, int);        \
  template void write_cache<T>(const T*, Heads, const int64_t*, T*, int64_t, int64_t, int64_t, int);
KVFERRY_FOR(float)
KVFERRY_FOR(Bf16)
#undef KVFERRY_FOR

}  // namespace kvferry

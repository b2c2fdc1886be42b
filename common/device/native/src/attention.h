// Causal attention of a ragged batch over paged keys and values, read in place: [block][kv head][token][size].
#pragma once
#include <cstdint>

#include "simd.h"

namespace kvferry {

struct Batch {
  int64_t sequences;
  const int64_t* starts;   // [sequences + 1] offsets into the token axis
  const int64_t* lengths;  // [sequences] cached positions plus this step's tokens
  const int32_t* tables;   // [sequences][table_stride] block numbers
  int64_t table_stride;
  int64_t block_size;
};

template <class T>
struct Attention {
  Batch batch;
  const T* query;  // [tokens][heads][size], tokens query_stride values apart
  int64_t query_stride;
  const T* keys;
  const T* values;
  int64_t heads, kv_heads, size;  // size: a multiple of 8
  float scale;
  int64_t window;  // number of newest positions visible to a token; 0: all
  T* out;          // [tokens][heads * size]

  int64_t group() const { return heads / kv_heads; }
  // Offset from the start of the keys (and of the values) to a position of a head of a sequence.
  int64_t offset(int64_t sequence, int64_t head, int64_t position) const {
    const int64_t block = batch.tables[sequence * batch.table_stride + position / batch.block_size];
    return ((block * kv_heads + head) * batch.block_size + position % batch.block_size) * size;
  }
  int64_t first_visible(int64_t position) const {
    return window > 0 && position + 1 > window ? position + 1 - window : 0;
  }
};

// The offsets of positions [first, first + count) of one head.
template <class T>
void find_offsets(const Attention<T>& a, int64_t sequence, int64_t head, int64_t first, int64_t count, int64_t* to) {
  for (int64_t i = 0; i < count;) {
    int64_t at = a.offset(sequence, head, first + i);
    const int64_t left = a.batch.block_size - (first + i) % a.batch.block_size;
    for (int64_t end = i + (left < count - i ? left : count - i); i < end; i++, at += a.size) to[i] = at;
  }
}

template <class T>
void attend(const Attention<T>& a, int threads);

// One new token of a sequence: keys [part * kDecodePart, ...) of one kv head, for all its query heads. With `parts`,
// writes the partial result there ([group][size + 2]: sums, largest score, weight), else the final output. `next` (or
// null): the part that the calling thread computes next; its keys are prefetched. It does not affect the result.
constexpr int64_t kDecodePart = 128;
struct DecodePart {
  int64_t sequence, head, part;
};
template <class T>
void attend_decode(const Attention<T>& a, const DecodePart& own, const DecodePart* next, float* parts);
template <class T>
void join_parts(const Attention<T>& a, int64_t sequence, int64_t head, const float* parts, int64_t count);

// New tokens [first, end) of a sequence, counted within the step, for one kv head.
template <class T>
void attend_rows(const Attention<T>& a, int64_t sequence, int64_t head, int64_t first, int64_t end);

}  // namespace kvferry

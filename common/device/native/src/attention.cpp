// Divides a batch's attention into pieces for the threads. The boundaries depend only on a sequence's own length, and a
// piece's arithmetic on nothing else, so neither the batch nor the number of threads changes any result.
#include "attention.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "tile_matrix.h"

namespace kvferry {
namespace {

constexpr int64_t kChunkRows = 96;  // query rows (tokens times heads of a group) per pass over the keys
constexpr int64_t kUnitChunkRows = 192;  // for the matrix unit, where packing the keys dominates the cost
constexpr int kRunsPerThread = 6;  // of decode parts; small enough that a delayed thread leaves little to wait for

struct Chunk {
  int64_t sequence, head, first, end;
};
struct Decode {
  DecodePart part;
  int64_t parts_at;  // offset of its partial result; -1: the sequence has one part only
};
struct Join {
  int64_t sequence, head, parts_at, count;
};
struct WorkList {
  std::vector<Chunk> chunks;
  std::vector<Decode> decodes;
  std::vector<Join> joins;
  int64_t floats = 0;
};

// All heads of a part are consecutive: they are adjacent in the cache.
template <class T>
void add_decode(const Attention<T>& a, int64_t sequence, WorkList& list) {
  const int64_t length = a.batch.lengths[sequence];
  const int64_t first = a.first_visible(length - 1) / kDecodePart, end = (length + kDecodePart - 1) / kDecodePart;
  const int64_t count = end - first, floats = a.group() * (a.size + 2);
  for (int64_t part = first; part < end; part++)
    for (int64_t head = 0; head < a.kv_heads; head++) {
      const int64_t parts_at = list.floats + (head * count + part - first) * floats;
      list.decodes.push_back({{sequence, head, part}, count == 1 ? -1 : parts_at});
    }
  if (count == 1) return;
  for (int64_t head = 0; head < a.kv_heads; head++)
    list.joins.push_back({sequence, head, list.floats + head * count * floats, count});
  list.floats += a.kv_heads * count * floats;
}

template <class T>
void add_chunk(const Attention<T>& a, int64_t sequence, int64_t count, WorkList& list) {
  const bool by_unit = std::is_same_v<T, Bf16> && has_matrix_unit();
  const int64_t step = std::max<int64_t>(1, (by_unit ? kUnitChunkRows : kChunkRows) / a.group());
  const int64_t pieces = (count + step - 1) / step;
  for (int64_t piece = pieces - 1; piece >= 0; piece--)  // the longest first
    for (int64_t head = 0; head < a.kv_heads; head++)
      list.chunks.push_back({sequence, head, piece * step, std::min(count, (piece + 1) * step)});
}

// Computes decode parts [first, end) of the list, in order.
template <class T>
void attend_decodes(const Attention<T>& a, const WorkList& list, int64_t first, int64_t end, float* parts) {
  for (int64_t i = first; i < end; i++) {
    const Decode& own = list.decodes[size_t(i)];
    const DecodePart* next = i + 1 < end ? &list.decodes[size_t(i + 1)].part : nullptr;
    attend_decode(a, own.part, next, own.parts_at < 0 ? nullptr : parts + own.parts_at);
  }
}

}  // namespace

template <class T>
void attend(const Attention<T>& a, int threads) {
  thread_local WorkList list;
  list.chunks.clear();
  list.decodes.clear();
  list.joins.clear();
  list.floats = 0;
  for (int64_t s = 0; s < a.batch.sequences; s++) {
    const int64_t count = a.batch.starts[s + 1] - a.batch.starts[s];
    if (count > 1) add_chunk(a, s, count, list);
    else if (count == 1) add_decode(a, s, list);
  }
  float* parts = nullptr;
  if (list.floats) parts = static_cast<float*>(scratch(kSlotParts, uint64_t(list.floats) * sizeof(float)));
  const WorkList& made = list;
  const int64_t chunks = int64_t(list.chunks.size()), decodes = int64_t(list.decodes.size());
  const int64_t runs = std::min<int64_t>(decodes, threads * kRunsPerThread);
  parallel(threads, int(chunks + runs), [&](int64_t i) {
    if (i >= chunks) return attend_decodes(a, made, decodes * (i - chunks) / runs, decodes * (i - chunks + 1) / runs, parts);
    const Chunk& chunk = made.chunks[size_t(i)];
    attend_rows(a, chunk.sequence, chunk.head, chunk.first, chunk.end);
  });
  for (const Join& join : list.joins) join_parts(a, join.sequence, join.head, parts + join.parts_at, join.count);
}

template void attend<float>(const Attention<float>&, int);
template void attend<Bf16>(const Attention<Bf16>&, int);

}  // namespace kvferry

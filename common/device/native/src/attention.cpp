// Cuts a batch's attention into pieces. Where the cuts lie depends on one sequence's own length alone, and a piece's
// arithmetic on nothing else, so neither the batch nor the threads change any result.
#include "attention.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "tile_matrix.h"

namespace kvferry {
namespace {

constexpr int64_t kRowsAtOnce = 96;  // query rows (tokens times heads of a group) that share one reading of the keys
constexpr int64_t kRowsOfUnit = 192;  // where the matrix unit takes them: then packing the keys is what costs
constexpr int kRunsPerThread = 6;    // of lone tokens, so that a thread that is held up leaves little to wait for

struct Chunk {
  int64_t sequence, head, first, end;
};
struct Lone {
  DecodePart part;
  int64_t parts_at;  // where its unfinished result goes; -1: it has only one part
};
struct Join {
  int64_t sequence, head, parts_at, count;
};
struct Plan {
  std::vector<Chunk> chunks;
  std::vector<Lone> lone;
  std::vector<Join> joins;
  int64_t floats = 0;
};

// All heads of a part follow one another: they lie side by side in the cache.
template <class T>
void plan_one(const Attention<T>& a, int64_t sequence, Plan& plan) {
  const int64_t length = a.batch.lengths[sequence];
  const int64_t first = a.first_visible(length - 1) / kDecodePart, end = (length + kDecodePart - 1) / kDecodePart;
  const int64_t count = end - first, floats = a.group() * (a.size + 2);
  for (int64_t part = first; part < end; part++)
    for (int64_t head = 0; head < a.kv_heads; head++) {
      const int64_t parts_at = plan.floats + (head * count + part - first) * floats;
      plan.lone.push_back({{sequence, head, part}, count == 1 ? -1 : parts_at});
    }
  if (count == 1) return;
  for (int64_t head = 0; head < a.kv_heads; head++)
    plan.joins.push_back({sequence, head, plan.floats + head * count * floats, count});
  plan.floats += a.kv_heads * count * floats;
}

template <class T>
void plan_chunk(const Attention<T>& a, int64_t sequence, int64_t count, Plan& plan) {
  const bool by_unit = std::is_same_v<T, Bf16> && has_matrix_unit();
  const int64_t step = std::max<int64_t>(1, (by_unit ? kRowsOfUnit : kRowsAtOnce) / a.group());
  const int64_t pieces = (count + step - 1) / step;
  for (int64_t piece = pieces - 1; piece >= 0; piece--)  // the longest first
    for (int64_t head = 0; head < a.kv_heads; head++)
      plan.chunks.push_back({sequence, head, piece * step, std::min(count, (piece + 1) * step)});
}

// Lone tokens [first, end) of the plan, one behind the other.
template <class T>
void attend_lone(const Attention<T>& a, const Plan& plan, int64_t first, int64_t end, float* parts) {
  for (int64_t i = first; i < end; i++) {
    const Lone& own = plan.lone[size_t(i)];
    const DecodePart* next = i + 1 < end ? &plan.lone[size_t(i + 1)].part : nullptr;
    attend_one(a, own.part, next, own.parts_at < 0 ? nullptr : parts + own.parts_at);
  }
}

}  // namespace

template <class T>
void attend(const Attention<T>& a, int threads) {
  thread_local Plan plan;
  plan.chunks.clear();
  plan.lone.clear();
  plan.joins.clear();
  plan.floats = 0;
  for (int64_t s = 0; s < a.batch.sequences; s++) {
    const int64_t count = a.batch.starts[s + 1] - a.batch.starts[s];
    if (count > 1) plan_chunk(a, s, count, plan);
    else if (count == 1) plan_one(a, s, plan);
  }
  float* parts = nullptr;
  if (plan.floats) parts = static_cast<float*>(scratch(kSlotParts, uint64_t(plan.floats) * sizeof(float)));
  const Plan& made = plan;
  const int64_t chunks = int64_t(plan.chunks.size()), lone = int64_t(plan.lone.size());
  const int64_t runs = std::min<int64_t>(lone, threads * kRunsPerThread);
  parallel(threads, int(chunks + runs), [&](int64_t i) {
    if (i >= chunks) return attend_lone(a, made, lone * (i - chunks) / runs, lone * (i - chunks + 1) / runs, parts);
    const Chunk& chunk = made.chunks[size_t(i)];
    attend_rows(a, chunk.sequence, chunk.head, chunk.first, chunk.end);
  });
  for (const Join& join : plan.joins) join_parts(a, join.sequence, join.head, parts + join.parts_at, join.count);
}

template void attend<float>(const Attention<float>&, int);
template void attend<Bf16>(const Attention<Bf16>&, int);

}  // namespace kvferry

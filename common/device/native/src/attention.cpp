// Cuts a batch's attention into pieces. Where the cuts lie depends on one sequence's own length alone, and a piece's
// arithmetic on nothing else, so neither the batch nor the threads change any result.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "pool.h"

namespace kvferry {
namespace {

constexpr int64_t kRowsAtOnce = 96;  // query rows (tokens times heads of a group) that share one reading of the keys

struct Item {
  int64_t sequence, head, first, end;  // tokens of a chunk; of a lone token: its part, and -1
  int64_t parts_at;                    // where its unfinished result goes; -1: it has only one part
};
struct Join {
  int64_t sequence, head, parts_at, count;
};
struct Plan {
  std::vector<Item> items;
  std::vector<Join> joins;
  int64_t floats = 0;
};

template <class T>
void plan_one(const Attention<T>& a, int64_t sequence, Plan& plan) {
  const int64_t length = a.batch.lengths[sequence];
  const int64_t first = a.first_visible(length - 1) / kDecodePart, end = (length + kDecodePart - 1) / kDecodePart;
  for (int64_t head = 0; head < a.kv_heads; head++) {
    const bool whole = end - first == 1;
    if (!whole) plan.joins.push_back({sequence, head, plan.floats, end - first});
    for (int64_t part = first; part < end; part++) {
      plan.items.push_back({sequence, head, part, -1, whole ? -1 : plan.floats});
      if (!whole) plan.floats += a.group() * (a.size + 2);
    }
  }
}

template <class T>
void plan_chunk(const Attention<T>& a, int64_t sequence, int64_t count, Plan& plan) {
  const int64_t step = std::max<int64_t>(1, kRowsAtOnce / a.group());
  const int64_t pieces = (count + step - 1) / step;
  for (int64_t piece = pieces - 1; piece >= 0; piece--)  // the longest first
    for (int64_t head = 0; head < a.kv_heads; head++)
      plan.items.push_back({sequence, head, piece * step, std::min(count, (piece + 1) * step), -1});
}

}  // namespace

template <class T>
void attend(const Attention<T>& a, int threads) {
  thread_local Plan plan;
  plan.items.clear();
  plan.joins.clear();
  plan.floats = 0;
  for (int64_t s = 0; s < a.batch.sequences; s++)
    if (const int64_t count = a.batch.starts[s + 1] - a.batch.starts[s]; count > 1) plan_chunk(a, s, count, plan);
  for (int64_t s = 0; s < a.batch.sequences; s++)
    if (a.batch.starts[s + 1] - a.batch.starts[s] == 1) plan_one(a, s, plan);
  float* parts = plan.floats ? static_cast<float*>(scratch(kSlotParts, uint64_t(plan.floats) * sizeof(float))) : nullptr;
  const std::vector<Item>& items = plan.items;
  parallel(threads, int(items.size()), [&](int i) {
    const Item& item = items[size_t(i)];
    if (item.end >= 0) attend_rows(a, item.sequence, item.head, item.first, item.end);
    else attend_one(a, item.sequence, item.head, item.first, item.parts_at < 0 ? nullptr : parts + item.parts_at);
  });
  for (const Join& join : plan.joins) join_parts(a, join.sequence, join.head, parts + join.parts_at, join.count);
}

template void attend<float>(const Attention<float>&, int);
template void attend<Bf16>(const Attention<Bf16>&, int);

}  // namespace kvferry

// Helper threads for numbered pieces of work. The result of a piece must not depend on the thread that runs it.
#pragma once
#include <cstdint>

namespace kvferry {

typedef void (*Piece)(void* context, int index);

// Runs piece(context, 0 .. count - 1) on this thread and up to threads - 1 helpers; returns when all are done.
// Waits only for pieces that were started, not for helpers that the system has not scheduled in time.
void run_pieces(int threads, int count, Piece piece, void* context);

template <class Work>
void parallel(int threads, int count, Work&& work) {
  if (threads <= 1 || count <= 1) {
    for (int i = 0; i < count; i++) work(i);
    return;
  }
  run_pieces(threads, count, [](void* context, int i) { (*static_cast<Work*>(context))(i); }, &work);
}

// At least `bytes` of memory of the calling thread, aligned to a cache line, valid until the next call with the same
// slot. Not zeroed.
enum Slot { kSlotRows, kSlotWide, kSlotItem, kSlotParts, kSlotSmall, kSlotStep, kSlotUnit, kSlots };
void* scratch(Slot slot, uint64_t bytes);

}  // namespace kvferry

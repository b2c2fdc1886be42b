// Threads that help the calling one with numbered pieces of work. What a piece computes must not depend on who runs it.
#pragma once
#include <cstdint>

namespace kvferry {

typedef void (*Piece)(void* context, int index);

// Runs piece(context, 0 .. count - 1) on this thread and up to threads - 1 helpers; returns when all are done.
// Helpers that the system does not run in time are not waited for: only pieces that were begun are.
void run_pieces(int threads, int count, Piece piece, void* context);

template <class Work>
void parallel(int threads, int count, Work&& work) {
  if (threads <= 1 || count <= 1) {
    for (int i = 0; i < count; i++) work(i);
    return;
  }
  run_pieces(threads, count, [](void* context, int i) { (*static_cast<Work*>(context))(i); }, &work);
}

// At least `bytes` of memory for the calling thread, aligned to a cache line, kept until asked for again with the same
// slot. Not zeroed.
enum Slot { kSlotRows, kSlotWide, kSlotItem, kSlotParts, kSlotSmall, kSlotStep, kSlotUnit, kSlots };
void* scratch(Slot slot, uint64_t bytes);

}  // namespace kvferry

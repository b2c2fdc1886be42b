// The helper threads. One job at a time; a second concurrent caller runs its work alone.
//
// A job is published in one 64-bit ticket (epoch, pieces, next piece), so a helper claims a piece with one compare and
// swap, and a delayed helper can never claim a piece of a finished job. There is no barrier: if the cores are busy
// otherwise, the caller runs the unclaimed pieces itself.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define KVFERRY_PAUSE() _mm_pause()
#else
#define KVFERRY_PAUSE() std::this_thread::yield()
#endif

namespace kvferry {
namespace {

constexpr int kMaxPieces = (1 << 20) - 1;
constexpr auto kSpin = std::chrono::microseconds(60);  // longer than the gap between two ops of a step
constexpr int kPausesPerLook = 32;

uint64_t ticket_of(uint64_t epoch, uint64_t count) { return epoch << 40 | count << 20; }
int pieces_of(uint64_t ticket) { return int(ticket >> 20 & kMaxPieces); }
int next_of(uint64_t ticket) { return int(ticket & kMaxPieces); }

class Pool {
 public:
  bool run(int threads, int count, Piece piece, void* context) {
    std::unique_lock<std::mutex> only(callers_, std::try_to_lock);
    if (!only.owns_lock()) return false;
    while (helpers_ < threads - 1 && start_helper()) {
    }
    piece_ = piece;
    context_ = context;
    limit_.store(threads - 1, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(ticket_of(++epoch_, uint64_t(count)), std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
    while (work_once()) {
    }
    wait_for(count);
    return true;
  }

 private:
  // False if the system cannot create another thread; the job then runs with fewer helpers.
  bool start_helper() {
    const int index = helpers_;
    try {
      std::thread([this, index] { help(index); }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    helpers_++;
    return true;
  }

  // Claims and runs one piece; false when none is left.
  bool work_once() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
      if (next_of(ticket) >= pieces_of(ticket)) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel));
    // The claimed piece is not done, so the caller still waits and the job's fields are valid.
    piece_(context_, next_of(ticket));
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void wait_for(int count) {
    for (int looks = 0; done_.load(std::memory_order_acquire) < count; looks++) {
      if (looks < 4096) KVFERRY_PAUSE();
      else std::this_thread::yield();  // the thread with the last piece may need this core to finish
    }
  }

  void help(int index) {
    for (;;) {
      const uint64_t seen = ticket_.load(std::memory_order_acquire);
      if (index < limit_.load(std::memory_order_relaxed)) while (work_once()) {
      }
      if (!spin_until_new(seen)) sleep_until_new(seen);
    }
  }

  static bool is_new_job(uint64_t now, uint64_t seen) { return now >> 40 != seen >> 40; }

  bool spin_until_new(uint64_t seen) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < kPausesPerLook; i++) {
        if (is_new_job(ticket_.load(std::memory_order_acquire), seen)) return true;
        KVFERRY_PAUSE();
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  void sleep_until_new(uint64_t seen) {
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    job_posted_.wait(lock, [&] { return is_new_job(ticket_.load(std::memory_order_seq_cst), seen); });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  void wake() {
    { std::lock_guard<std::mutex> lock(sleep_); }
    job_posted_.notify_all();
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<int> limit_{0};
  Piece piece_ = nullptr;
  void* context_ = nullptr;
  uint64_t epoch_ = 0;
  int helpers_ = 0;
  std::mutex callers_, sleep_;
  std::condition_variable job_posted_;
};

// Never destroyed: helpers may still access it while the process exits.
Pool& pool() {
  static Pool* const only = new Pool;
  return *only;
}

struct Scratch {
  void* memory[kSlots] = {};
  uint64_t size[kSlots] = {};
  ~Scratch() {
    for (void* part : memory) std::free(part);
  }
};

}  // namespace

void run_pieces(int threads, int count, Piece piece, void* context) {
  if (count > kMaxPieces || !pool().run(threads, count, piece, context))
    for (int i = 0; i < count; i++) piece(context, i);
}

void* scratch(Slot slot, uint64_t bytes) {
  thread_local Scratch own;
  if (own.size[slot] < bytes) {
    std::free(own.memory[slot]);
    own.size[slot] = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    own.memory[slot] = std::aligned_alloc(64, own.size[slot]);
    if (!own.memory[slot]) std::abort();  // out of memory
  }
  return own.memory[slot];
}

}  // namespace kvferry

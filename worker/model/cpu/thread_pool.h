// Threads that compute a list of phases together and never wait for one that has no core.
//
// All threads run the same function, a parallel region. What it shares out is a phase: chunks,
// handed out by a counter. A chunk is computed into memory of the thread's own and then committed, which is a short
// copy. A phase is over when all its chunks are committed, not when all threads have arrived: a
// thread that finds no chunk left waits for a moment, and then computes again what another one took
// and did not bring back. Whoever commits first has done it. So a thread that the system takes off
// its core costs the others one chunk computed twice, where a barrier costs them a time slice.
//
// A thread that comes back late computes from operands that have changed meanwhile. What comes of
// it is never committed; but it reads. Hence the rules for a region:
//   - what steers a thread (sizes, indices, addresses) lies in the region's record, which is
//     written again only when no thread is in it any more;
//   - only `commit` writes to memory that others see, unless the phase is computed `once`;
//   - operands stay mapped until `settle` has returned.

#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace threads {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr int kMaxThreads = 1024;
constexpr int64_t kMaxChunks = 4096;  // of a phase; larger ones are cut more coarsely
constexpr int kChunkBits = 16;        // of a ticket; the others count phases: enough for decades
// A waiting thread takes over another's chunk after twice the time of its own, within these bounds.
constexpr microseconds kLeastPatience{20}, kMostPatience{200};
constexpr microseconds kNap{50};         // where there is nothing left to take over
constexpr microseconds kIdleSpin{100};   // between regions, before a thread sleeps

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Spins until `is_over` or for so long; returns whether it is over.
template <class Over> inline bool spin(Clock::duration at_most, const Over& is_over) {
  for (int i = 0; i < 64; ++i) {
    if (is_over()) return true;
    relax();
  }
  for (const auto end = Clock::now() + at_most; Clock::now() < end;)
    for (int i = 0; i < 32; ++i) {
      if (is_over()) return true;
      relax();
    }
  return false;
}

class Pool;

// One thread's part in the regions of a pool.
class alignas(64) Member {
 public:
  // Shares out items [0, items), `grain` together. `compute(first, last, room)` writes to `room`
  // only, grain * item_bytes; `commit(first, last, room)` brings it to where it belongs, and is
  // called once for each chunk. All members must come with the same numbers. Returns when all is
  // committed. With `once` nobody computes a chunk again: `compute` may write to where others see it,
  // and they wait for whoever has lost its core.
  template <class Compute, class Commit>
  void share(int64_t items, int64_t grain, int64_t item_bytes, const Compute& compute,
             const Commit& commit, bool once = false);

  // Whether the phase is over whose chunk is being computed: then the rest of it is for nothing.
  inline bool is_late() const;
  int num_threads() const { return num_threads_; }

 private:
  friend class Pool;

  char* room(int64_t bytes) {
    if (bytes > room_bytes_) {
      room_bytes_ = bytes + bytes / 2;
      room_.reset(new char[room_bytes_ + 64]);
    }
    return (char*)(((uintptr_t)room_.get() + 63) & ~(uintptr_t)63);
  }

  Pool* pool_ = nullptr;  // null: alone
  int place_ = 0;         // in the pool
  int num_threads_ = 1;   // of the region
  uint64_t phase_ = 0;    // that it is in, or enters next
  std::atomic<int> record_{-1};  // of the region that it may be reading
  std::unique_ptr<char[]> room_;
  int64_t room_bytes_ = -1;
};

// A region's function and what it reads: `keep` copies arrays that end with the call.
class Record {
 public:
  void begin(int64_t bytes) {
    if (bytes > (int64_t)memory_.size()) memory_.resize(bytes + bytes / 2);
    used_ = 0;
  }

  template <class T> const T* keep(const T* items, int64_t count) {
    auto* here = (T*)(memory_.data() + used_);
    if (count > 0) memcpy(here, items, count * sizeof(T));
    used_ += bytes_of<T>(count);
    return here;
  }

  // What `keep` takes for so many.
  template <class T> static int64_t bytes_of(int64_t count) {
    return ((int64_t)(count * sizeof(T)) + 63) / 64 * 64;
  }

 private:
  friend class Pool;
  std::vector<char> memory_;
  int64_t used_ = 0;
  void (*run_)(const void*, Member&) = nullptr;
  const void* region_ = nullptr;
  uint64_t first_phase_ = 0;
  int num_threads_ = 1;
};

class Pool {
 public:
  // Threads of regions from now on, the caller among them.
  void set_num_threads(int count) {
    std::lock_guard<std::mutex> hold(callers_);
    num_threads_ = std::clamp(count, 1, kMaxThreads);
  }

  // Calls `(*region)(member)` on all threads, the region being what `fill(record)` returns: all of
  // its memory is the record's. Callers take turns. Returns when all phases are over.
  template <class Fill> void work(const Fill& fill) {
    std::lock_guard<std::mutex> hold(callers_);
    const int count = start_members();
    const int index = free_record();
    Record& record = *records_[index];
    const auto* region_there = fill(record);
    using Region = decltype(region_there);
    record.region_ = region_there;
    record.run_ = [](const void* region, Member& self) { (*(Region)region)(self); };
    record.num_threads_ = count;
    Member& caller = *members_[0];
    caller.num_threads_ = count;
    if (count == 1) {
      caller.pool_ = nullptr;
      return record.run_(record.region_, caller);
    }
    caller.pool_ = this;
    caller.phase_ = record.first_phase_ = ticket_.load(std::memory_order_relaxed) >> kChunkBits;
    const uint64_t region = (current_.load() >> kChunkBits) + 1;
    current_.store(region << kChunkBits | index);
    if (sleepers_.load() > 0) {
      { std::lock_guard<std::mutex> all_asleep(sleep_); }
      wake_.notify_all();
    }
    record.run_(record.region_, caller);
    over_.store(region);  // whoever wakes from now on does not enter it
  }

  // Returns when no thread reads anything of the regions before. Operands may go then.
  void settle() {
    std::lock_guard<std::mutex> hold(callers_);
    for (const auto& member : members_)
      while (member->record_.load() >= 0)
        if (!spin(kLeastPatience, [&] { return member->record_.load() < 0; }))
          std::this_thread::sleep_for(kNap);
  }

 private:
  friend class Member;

  // Returns the number of threads, which is smaller than asked for where the system starts no more.
  int start_members() {
    while ((int)members_.size() < num_threads_) {
      auto member = std::make_unique<Member>();
      member->place_ = (int)members_.size();
      member->pool_ = this;
      if (member->place_ && !start(member.get())) break;
      members_.push_back(std::move(member));
    }
    return std::min(num_threads_, (int)members_.size());
  }

  bool start(Member* member) {
    // Signals are for the threads that know what to do about them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool is_started = true;
    try {
      std::thread([this, member] { serve(*member); }).detach();
    } catch (const std::system_error&) {
      is_started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return is_started;
  }

  // One that no thread reads, or is about to: the last region's is always kept.
  int free_record() {
    const int last = (int)(current_.load() & kIndexMask);
    for (int i = 0;; ++i) {
      const bool is_read = std::any_of(members_.begin(), members_.end(), [&](const auto& member) {
        return member->record_.load() == i;
      });
      if (i == last || is_read) continue;
      if (!records_[i]) records_[i] = std::make_unique<Record>();
      return i;
    }
  }

  [[noreturn]] void serve(Member& self) {
    uint64_t done = 0;
    for (;;) {
      const auto is_news = [&] { return current_.load(std::memory_order_acquire) != done; };
      if (!spin(kIdleSpin, is_news)) {
        std::unique_lock<std::mutex> hold(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(hold, [&] { return current_.load() != done; });
        sleepers_.fetch_sub(1);
      }
      const uint64_t region = current_.load();
      self.record_.store((int)(region & kIndexMask));
      // Only now may it be read: a caller that writes a record has seen that it is free.
      if (over_.load() == region >> kChunkBits) {
        done = region;
      } else if (current_.load() == region) {
        const Record& record = *records_[region & kIndexMask];
        if (self.place_ < record.num_threads_) {
          self.phase_ = record.first_phase_;
          self.num_threads_ = record.num_threads_;
          record.run_(record.region_, self);
        }
        done = region;
      }
      self.record_.store(-1);
    }
  }

  // Neighbours are committed by different threads: they have cache lines of their own.
  static int64_t place_of(int64_t chunk) {
    constexpr int64_t kOfLine = 64 / sizeof(uint64_t), kLines = kMaxChunks / kOfLine;
    return chunk % kLines * kOfLine + chunk / kLines;
  }

  static constexpr uint64_t kIndexMask = (1u << kChunkBits) - 1;

  // What threads write while a phase runs has cache lines of its own.
  alignas(64) std::atomic<uint64_t> ticket_{1 << kChunkBits};  // phase, next chunk to hand out
  alignas(64) std::atomic<int64_t> num_committed_{0};          // of the phase
  alignas(64) std::atomic<uint64_t> last_commit_[kMaxChunks] = {};  // of each chunk: in which phase
  alignas(64) std::atomic<uint64_t> over_{0};                       // region that has returned
  alignas(64) std::atomic<uint64_t> current_{0};                    // region, its record
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex sleep_;
  std::condition_variable wake_;

  std::mutex callers_;
  int num_threads_ = 1;
  std::vector<std::unique_ptr<Member>> members_;  // the first is whoever calls
  // As many as may be read at once, the last region's, and a free one.
  std::unique_ptr<Record> records_[kMaxThreads + 1];
};

inline bool Member::is_late() const {
  return pool_ && pool_->ticket_.load(std::memory_order_relaxed) >> kChunkBits != phase_;
}

template <class Compute, class Commit>
void Member::share(int64_t items, int64_t grain, int64_t item_bytes, const Compute& compute,
                   const Commit& commit, bool once) {
  if (items <= 0) return;
  grain = std::max(grain, (items + kMaxChunks - 1) / kMaxChunks);
  const int64_t chunks = (items + grain - 1) / grain;
  char* const own = room(grain * item_bytes);
  const auto bounds = [&](int64_t chunk) {
    return std::make_pair(chunk * grain, std::min(items, (chunk + 1) * grain));
  };
  if (!pool_) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const auto [first, last] = bounds(chunk);
      compute(first, last, own);
      commit(first, last, own);
    }
    return;
  }
  auto& ticket = pool_->ticket_;
  const auto is_over = [&] {
    return ticket.load(std::memory_order_acquire) >> kChunkBits != phase_;
  };
  const auto last_commit = [&](int64_t chunk) -> std::atomic<uint64_t>& {
    return pool_->last_commit_[Pool::place_of(chunk)];
  };
  const auto is_done = [&](int64_t chunk) {
    return last_commit(chunk).load(std::memory_order_acquire) >= phase_;
  };
  const auto count = [&](int64_t done) {
    if (pool_->num_committed_.fetch_add(done, std::memory_order_acq_rel) + done < chunks) return;
    pool_->num_committed_.store(0, std::memory_order_relaxed);
    ticket.store((phase_ + 1) << kChunkBits, std::memory_order_release);
  };
  int64_t own_chunks = 0;  // `once`: nobody asks which chunks are done, so they are counted together
  const auto do_chunk = [&](int64_t chunk) {
    const auto [first, last] = bounds(chunk);
    compute(first, last, own);
    if (once) {
      commit(first, last, own);
      ++own_chunks;
      return;
    }
    // Phases only grow: what is of this one, or of a later one, has been done by somebody else.
    uint64_t before = last_commit(chunk).load(std::memory_order_acquire);
    if (before >= phase_ || !last_commit(chunk).compare_exchange_strong(before, phase_)) return;
    commit(first, last, own);
    count(1);
  };
  Clock::duration patience = Clock::duration::zero();
  for (;;) {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    if (seen >> kChunkBits != phase_) return void(++phase_);
    const int64_t chunk = (int64_t)(seen & Pool::kIndexMask);
    if (chunk >= chunks) break;
    if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
    if (patience != Clock::duration::zero()) {
      do_chunk(chunk);
      continue;
    }
    const auto begin = Clock::now();  // once: asking costs as much as the smallest chunks
    do_chunk(chunk);
    patience = 2 * (Clock::now() - begin);
  }
  if (own_chunks) count(own_chunks);
  if (!spin(std::clamp<Clock::duration>(patience, kLeastPatience, kMostPatience), is_over)) {
    const int64_t start = chunks * place_ / num_threads_;
    for (int64_t i = 0; i < chunks && !once && !is_over(); ++i)
      if (const int64_t chunk = (start + i) % chunks; !is_done(chunk)) do_chunk(chunk);
    while (!spin(kLeastPatience, is_over)) std::this_thread::sleep_for(kNap);
  }
  ++phase_;
}

}  // namespace threads

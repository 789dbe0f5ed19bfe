// Drives thread_pool.h as the kernels do, with threads that lose their core for a while. What a late
// thread may read while others write is atomic here, so that ThreadSanitizer sees every other race.
// Prints what is wrong and exits with 1.

#include "thread_pool.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

using namespace threads;
using Value = std::atomic<int64_t>;

static void check(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::fflush(stdout);
  std::_Exit(1);
}

// `rounds` phases in place: every value becomes 3 * value + round, each time exactly once.
struct Rounds {
  Value* values;
  int64_t size, grain, rounds;
  int delay_one_in;  // of the chunks; 0: none

  void operator()(Member& self) const;
};

static void delay(int one_in) {
  thread_local std::mt19937 draw(std::random_device{}());
  if (one_in && draw() % one_in == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
}

void Rounds::operator()(Member& self) const {
  const Rounds& region = *this;
  for (int64_t round = 0; round < region.rounds; ++round) {
    self.share(
        region.size, region.grain, sizeof(int64_t),
        [&](int64_t first, int64_t last, char* room) {
          auto* out = (int64_t*)room;
          for (int64_t i = first; i < last; ++i)
            out[i - first] = 3 * region.values[i].load(std::memory_order_relaxed) + round;
          delay(region.delay_one_in);
        },
        [&](int64_t first, int64_t last, const char* room) {
          const auto* in = (const int64_t*)room;
          delay(8 * region.delay_one_in);
          for (int64_t i = first; i < last; ++i)
            region.values[i].store(in[i - first], std::memory_order_relaxed);
        });
    self.share(1, 1, 0, [](int64_t, int64_t, char*) {}, [](int64_t, int64_t, const char*) {});
  }
}

template <class Region> static void work(Pool& pool, const Region& region) {
  pool.work([&](Record& record) {
    record.begin(Record::bytes_of<Region>(1));
    return record.keep(&region, 1);
  });
}

static void check_rounds(Pool& pool, int threads, int64_t size, int64_t grain, int one_in) {
  pool.set_num_threads(threads);
  std::vector<Value> values(size);
  std::vector<int64_t> expected(size);
  for (int64_t i = 0; i < size; ++i) values[i] = expected[i] = i % 7;
  const int64_t rounds = 12;
  for (int64_t& value : expected)
    for (int64_t round = 0; round < rounds; ++round) value = 3 * value + round;
  work(pool, Rounds{values.data(), size, grain, rounds, one_in});
  for (int64_t i = 0; i < size; ++i) check(values[i] == expected[i], "a value is wrong");
  pool.settle();
}

static void stress(int regions) {
  auto* pool = new Pool;
  std::mt19937 draw(1);
  for (int region = 0; region < regions; ++region)
    for (int threads : {1, 2, 3, 8})
      check_rounds(*pool, threads, 1 + draw() % 300, 1 + draw() % 9, region % 3 ? 0 : 40);
  check_rounds(*pool, 3, 3 * kMaxChunks + 5, 1, 0);  // more items than a phase has chunks
}

// A thread that is kept inside a chunk until the region is over: the others must do without it.
struct Held {
  std::atomic<int>* inside;
  std::atomic<bool>* may_go;
  Value* sum;
  std::thread::id caller;
  bool holds_caller;  // or whoever else comes first

  void operator()(Member& self) const {
    self.share(
        8, 1, 0,
        [&](int64_t, int64_t, char*) {
          const bool is_caller = std::this_thread::get_id() == caller;
          if (is_caller != holds_caller || inside->fetch_add(1))
            return std::this_thread::sleep_for(std::chrono::milliseconds(1));
          while (!*may_go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        },
        [&](int64_t first, int64_t, const char*) { sum->fetch_add(1 << first); });
  }
};

static void lost_core() {
  auto* pool = new Pool;
  pool->set_num_threads(2);
  std::atomic<int> inside{0};
  std::atomic<bool> may_go{false};
  for (int tries = 0; !inside; ++tries) {
    check(tries < 1000, "no other thread came");
    Value sum{0};
    work(*pool, Held{&inside, &may_go, &sum, std::this_thread::get_id(), false});
    check(sum == 255, "a chunk was committed twice, or never");
  }
  // Its region is over without it. Those that follow go on without it, too.
  for (int region = 0; region < 50; ++region) {
    std::vector<Value> values(40);
    work(*pool, Rounds{values.data(), 40, 3, 5, 0});
    for (const Value& value : values) check(value == 58, "a value is wrong");
  }
  std::thread frees([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    may_go = true;
  });
  pool->settle();
  check(may_go, "settle came back while a thread was inside a region");
  frees.join();
}

// The caller itself is held: the others finish its region, and it comes back to find it done.
static void lost_caller() {
  auto* pool = new Pool;
  pool->set_num_threads(3);
  for (int region = 0; region < 20; ++region) {
    std::atomic<int> inside{0};
    std::atomic<bool> may_go{false};
    Value sum{0};
    std::thread frees([&] {
      while (sum != 255) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      may_go = true;
    });
    work(*pool, Held{&inside, &may_go, &sum, std::this_thread::get_id(), true});
    frees.join();
    check(sum == 255, "a chunk was committed twice, or never");
    pool->settle();
  }
}

// Reads an operand outside its phases, as a kernel's region reads its work list.
struct Reading {
  const std::atomic<bool>* may_read;

  void operator()(Member& self) const {
    for (int i = 0; i < 40; ++i) check(*may_read, "an operand is read after settle");
    self.share(4, 1, 0, [](int64_t, int64_t, char*) {}, [](int64_t, int64_t, const char*) {});
  }
};

// Threads that wake when the region has returned and settled must not enter it.
static void latecomers(int rounds) {
  auto* pool = new Pool;
  pool->set_num_threads(4);
  auto* may_read = new std::atomic<bool>[rounds];
  for (int round = 0; round < rounds; ++round) {
    may_read[round] = true;
    work(*pool, Reading{may_read + round});
    pool->settle();
    may_read[round] = false;
    // Long enough for all to fall asleep now and then: waking them takes longest.
    if (round % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(150));
  }
}

int main(int count, char** words) {
  const std::string what = count > 1 ? words[1] : "";
  if (what == "stress") stress(count > 2 ? std::atoi(words[2]) : 60);
  else if (what == "lost-core") lost_core();
  else if (what == "lost-caller") lost_caller();
  else if (what == "latecomers") latecomers(500 * (count > 2 ? std::atoi(words[2]) : 60));
  else check(false, "stress, lost-core, lost-caller or latecomers");
  std::fflush(stdout);
  std::_Exit(0);  // threads of pools run for as long as their process
}

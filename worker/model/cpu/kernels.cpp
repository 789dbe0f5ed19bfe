// Kernels of the native tier: a plain C ABI over bfloat16, no torch headers, loaded with ctypes.
//
// Every function has a torch twin that is its specification and its test. Sizes are counted in
// elements. Pointers need no alignment unless said. All functions compute on the threads of one
// pool; what a region of it may read and write, and when, is said in thread_pool.h.

#include "amx.h"
#include "thread_pool.h"
#include "vectors.h"

using i64 = int64_t;
using threads::Member;
using threads::Record;
#if !defined(HAS_PAIRS)
#define HAS_PAIRS 0
#endif
#define API extern "C" __attribute__((visibility("default")))

static std::atomic<threads::Pool*> the_pool{nullptr};

static threads::Pool* new_pool(int num_threads) {
  auto* pool = new threads::Pool;  // for as long as the process lives, as its threads do
  pool->set_num_threads(num_threads);
  return pool;
}

static int wanted_threads = 1;

// The pool of this process: a child begins anew, because threads stay behind in the parent.
static threads::Pool& pool() {
  static const bool is_ready = [] {
    the_pool = new_pool(wanted_threads);
    pthread_atfork(nullptr, nullptr, [] { the_pool = new_pool(wanted_threads); });
    return true;
  }();
  (void)is_ready;
  return *the_pool.load(std::memory_order_relaxed);
}

// Threads of all functions from now on.
API void set_num_threads(i64 count) {
  wanted_threads = (int)count;
  pool().set_num_threads((int)count);
}

// Returns when no thread reads operands of calls that have returned: they may be freed then.
API void settle() { pool().settle(); }

// ---- matrix products -------------------------------------------------------------------------
//
// Weights lie in panels of 32 output columns, [panel][K/2][32][2] for bf16 and [panel][K/4][32][4]
// for int8, so that each panel is one sequential stream and no sum crosses lanes. Rows of x are
// repacked in tiles of at most kTileRows, [K/2][rows][2]: then one base register serves them all.
// A gated panel is 16 gate columns and the 16 up columns that belong to them.
//
// A panel of four-bit weights has, for each 32 of K, the columns' factors [32], 1 to 15, their offsets
// [32], 0 to 127, and nibbles [4][2][16][4] bytes: of 2 x 16 columns the quadruples 2 i in the lower
// halves of the bytes, 2 i + 1 in the upper ones. A nibble times its factor, less its offset, is an int8
// weight: all else is that of int8.

enum Gate : i64 { kNoGate = 0, kSilu = 1, kGeluTanh = 2 };

struct Product {
  const void* w;          // from `panel` on
  const float* bias;      // [panels * 32] or null
  const float* scales;    // int8: of the columns, [panels * 32]
  const int32_t* offset;  // int8: 128 * sum of the column, what x's zero point adds
  const float* row_scales;
  bf16* y;  // from `row` and `column` on, rows `stride` apart
  i64 stride, row, column;
  i64 n, k;  // columns in all; rows of the weight
  i64 gate;  // a Gate
  i64 panel;
};

INLINE void put(bf16* y, F x, i64 room) {
  if (room >= 16) return store(y, x);
  bf16 whole[16];
  store(whole, x);
  memcpy(y, whole, std::max<i64>(room, 0) * sizeof(bf16));
}

// Brings a tile's sums to their place; of an int8 weight they are scaled first, less the columns'
// offsets already.
template <bool INT8>
static void finish(const Product& p, i64 panel, i64 row, int rows, const float (*sums)[32]) {
  const i64 first = panel * 32, column = p.gate ? panel * 16 : first, room = p.n - column;
  bf16* y = p.y + (row - p.row) * p.stride + column - p.column;
  for (int m = 0; m < rows; ++m, y += p.stride) {
    F a = load(sums[m]), b = load(sums[m] + 16);
    if constexpr (INT8) {
      const F scale = splat(p.row_scales[row + m]);
      a = mul(a, mul(load(p.scales + first), scale));
      b = mul(b, mul(load(p.scales + first + 16), scale));
    }
    if (p.bias) a = add(a, load(p.bias + first)), b = add(b, load(p.bias + first + 16));
    if (p.gate) {
      put(y, mul(p.gate == kSilu ? silu(a) : gelu_tanh(a), b), room);
    } else {
      put(y, a, room);
      put(y + 16, b, room - 16);
    }
  }
}

struct Bf16 {
  static constexpr int kRows = kTileRows;
  template <int M> static void tile(const Product& p, i64 panel, i64 row, const void* rows) {
    const auto* x = (const bf16*)rows;
    const auto* w = (const bf16*)p.w + (panel - p.panel) * 32 * p.k;
    F acc[M][2];
    UNROLL for (int m = 0; m < M; ++m) acc[m][0] = acc[m][1] = splat(0.0f);
    for (i64 k = 0; k < p.k; k += 2, w += 64, x += 2 * M) {
      fetch((const char*)w + 4096);
      fetch((const char*)w + 4160);
      const W w0 = load_w(w), w1 = load_w(w + 32);
      UNROLL for (int m = 0; m < M; ++m) {
        const W pair = splat_w(x + 2 * m);
        acc[m][0] = dot2(acc[m][0], w0, pair);
        acc[m][1] = dot2(acc[m][1], w1, pair);
      }
    }
    float sums[M][32];
    UNROLL for (int m = 0; m < M; ++m) store(sums[m], acc[m][0]), store(sums[m] + 16, acc[m][1]);
    finish<false>(p, panel, row, M, sums);
  }
};

// A tile's sums over int8 weights of 32 columns.
template <int M> struct Int8Sums {
  I acc[M][2];

  INLINE_MEMBER Int8Sums() {
    UNROLL for (int m = 0; m < M; ++m) acc[m][0] = acc[m][1] = zero_i();
  }
  // Four numbers of each row, from x on, times 2 x 16 columns'.
  INLINE_MEMBER void add(W w0, W w1, const uint8_t* x) {
    UNROLL for (int m = 0; m < M; ++m) {
      const W four = splat_w(x + 4 * m);
      acc[m][0] = dot4(acc[m][0], four, w0);
      acc[m][1] = dot4(acc[m][1], four, w1);
    }
  }
  // `offset` [32] is what x's zero point adds to the sums.
  INLINE_MEMBER void finish(const Product& p, i64 panel, i64 row, const int32_t* offset) const {
    float sums[M][32];
    UNROLL for (int m = 0; m < M; ++m) {
      store(sums[m], minus(acc[m][0], offset));
      store(sums[m] + 16, minus(acc[m][1], offset + 16));
    }
    ::finish<true>(p, panel, row, M, sums);
  }
};

struct Int8 {
  static constexpr int kRows = kTileRows;
  template <int M> static void tile(const Product& p, i64 panel, i64 row, const void* rows) {
    const auto* x = (const uint8_t*)rows;
    const auto* w = (const int8_t*)p.w + (panel - p.panel) * 32 * p.k;
    Int8Sums<M> sums;
    for (i64 k = 0; k < p.k; k += 4, w += 128, x += 4 * M) {
      fetch((const char*)w + 4096);
      fetch((const char*)w + 4160);
      sums.add(load_w(w), load_w(w + 64), x);
    }
    sums.finish(p, panel, row, p.offset + panel * 32);
  }
};

constexpr i64 kGroup4 = 32;                          // numbers of a column with one factor
constexpr i64 kGroup4Bytes = 64 + kGroup4 * 32 / 2;  // of a panel

// Calls `visit(i, w0, w1)` with the quadruples i of a panel's group, of 2 x 16 columns, as int8.
template <class Visit> INLINE void for_quadruples(const uint8_t* w, const Visit& visit) {
  const W factors[2] = {two_of_each(w), two_of_each(w + 16)};
  const W offsets[2] = {four_of_each(w + 32), four_of_each(w + 48)};
  w += 64;
  for (int i = 0; i < 8; i += 2, w += 128) {
    const W a = load_w(w), b = load_w(w + 64);
    const auto columns = [&](W x, int half) { return widened(x, factors[half], offsets[half]); };
    visit(i, columns(both(a, 0x0f0f0f0f), 0), columns(both(b, 0x0f0f0f0f), 1));
    visit(i + 1, columns(high_nibbles(a), 0), columns(high_nibbles(b), 1));
  }
}

// Weights of four bits.
struct Int4 {
  static constexpr int kRows = kTileRows;
  // Whether every tile of rows reads the panel as it is: large ones hide beside their products what
  // widening costs. Otherwise a panel is unpacked once for several tiles.
  static constexpr bool kIsReadByTiles = kTileRows >= 8;
  static i64 panel_bytes(i64 k) { return k / kGroup4 * kGroup4Bytes; }
  template <int M> static void tile(const Product& p, i64 panel, i64 row, const void* rows) {
    const auto* x = (const uint8_t*)rows;
    const auto* w = (const uint8_t*)p.w + (panel - p.panel) * panel_bytes(p.k);
    Int8Sums<M> sums;
    for (i64 k = 0; k < p.k; k += kGroup4, w += kGroup4Bytes, x += kGroup4 * M) {
      for (i64 line = 0; line < kGroup4Bytes; line += 64) fetch((const char*)w + 4096 + line);
#if HAS_PAIRS
      add_group<M>(w, x, sums);
#else
      for_quadruples(w, [&](int i, W w0, W w1) { sums.add(w0, w1, x + i * 4 * M); });
#endif
    }
    static constexpr int32_t kNothing[32] = {};
    sums.finish(p, panel, row, HAS_PAIRS ? kNothing : p.offset + panel * 32);
  }
#if HAS_PAIRS
  // A group's products with numbers around 0: those of the nibbles by their columns' factors, less
  // the sums of the numbers by the offsets.
  template <int M> INLINE void add_group(const uint8_t* w, const uint8_t* x, Int8Sums<M>& sums) {
    __m256i inputs[M];
    UNROLL for (int m = 0; m < M; ++m) {
      inputs[m] = _mm256_setzero_si256();
      UNROLL for (int i = 0; i < 8; ++i)
        inputs[m] = add_pairs(inputs[m], _mm256_set1_epi8(1), splat_signed(x + (i * M + m) * 4));
    }
    UNROLL for (int half = 0; half < 2; ++half) {
      __m256i pairs[M][2];
      UNROLL for (int m = 0; m < M; ++m) pairs[m][0] = pairs[m][1] = _mm256_setzero_si256();
      UNROLL for (int i = 0; i < 4; ++i) {
        const W all = load_w(w + 64 + i * 128 + half * 64);
        const W low = both(all, 0x0f0f0f0f), high = high_nibbles(all);
        UNROLL for (int m = 0; m < M; ++m) {
          const __m256i a = splat_signed(x + (2 * i * M + m) * 4);
          pairs[m][0] = add_pairs(pairs[m][0], low.a, a);
          pairs[m][1] = add_pairs(pairs[m][1], low.b, a);
        }
        UNROLL for (int m = 0; m < M; ++m) {
          const __m256i b = splat_signed(x + ((2 * i + 1) * M + m) * 4);
          pairs[m][0] = add_pairs(pairs[m][0], high.a, b);
          pairs[m][1] = add_pairs(pairs[m][1], high.b, b);
        }
      }
      const W factors = two_of_each(w + half * 16), offsets = two_of_each(w + 32 + half * 16);
      UNROLL for (int m = 0; m < M; ++m) {
        I& sum = sums.acc[m][half];
        sum.a = ::add_group(sum.a, pairs[m][0], factors.a, inputs[m], offsets.a);
        sum.b = ::add_group(sum.b, pairs[m][1], factors.b, inputs[m], offsets.b);
      }
    }
  }
#endif
  // The panel as Int8 reads it; the next call of the thread overwrites it.
  static const int8_t* unpacked(const Product& p, i64 panel) {
    thread_local std::vector<int8_t> room;
    if ((i64)room.size() < p.k * 32) room.resize(p.k * 32);
    const auto* w = (const uint8_t*)p.w + (panel - p.panel) * panel_bytes(p.k);
    int8_t* to = room.data();
    for (i64 k = 0; k < p.k; k += kGroup4, w += kGroup4Bytes, to += kGroup4 * 32) {
      for (i64 line = 0; line < kGroup4Bytes; line += 64) fetch((const char*)w + 4096 + line);
      for_quadruples(w, [&](int i, W w0, W w1) {
        store_w(to + i * 128, w0), store_w(to + i * 128 + 64, w1);
      });
    }
    return room.data();
  }
};

#if HAS_AMX
// Rows of x as they come, [rows, k]. The sums are those of the other kinds, bf16 in another order.
struct AmxBf16 {
  static constexpr int kRows = kAmxRows;
  static void tile(int rows, const Product& p, i64 panel, i64 row, const void* x) {
    alignas(64) float sums[kAmxRows][32];
    const i64 row_bytes = p.k * sizeof(bf16);
    amx_tile<false>((const char*)p.w + (panel - p.panel) * 32 * row_bytes, (const char*)x, rows, row_bytes,
                    (int32_t*)sums);
    finish<false>(p, panel, row, rows, sums);
  }
};

struct AmxInt8 {
  static constexpr int kRows = kAmxRows;
  static void tile(int rows, const Product& p, i64 panel, i64 row, const void* x) {
    alignas(64) int32_t whole[kAmxRows][32];
    float sums[kAmxRows][32];
    const auto* w = (const char*)p.w + (panel - p.panel) * 32 * p.k;
    amx_tile<true>(w, (const char*)x, rows, p.k, whole[0]);
    const int32_t* offset = p.offset + panel * 32;
    for (int m = 0; m < rows; ++m) {
      store(sums[m], minus(load_i(whole[m]), offset));
      store(sums[m] + 16, minus(load_i(whole[m] + 16), offset + 16));
    }
    finish<true>(p, panel, row, rows, sums);
  }
};
#endif

template <class Kind, int M = kTileRows>
static void dispatch(int rows, const Product& p, i64 panel, i64 row, const void* x) {
  if constexpr (Kind::kRows != kTileRows) return Kind::tile(rows, p, panel, row, x);
  else {
    if (rows == M) return Kind::template tile<M>(p, panel, row, x);
    if constexpr (M > 1) dispatch<Kind, M - 1>(rows, p, panel, row, x);
  }
}

static i64 num_tiles(i64 m, i64 most = kTileRows) { return (m + most - 1) / most; }
static i64 tile_start(i64 m, i64 tile, i64 most = kTileRows) {
  return m * tile / num_tiles(m, most);
}

// From so many rows on a chunk writes straight to its place. Copies would take up to a tenth of the
// time, and phases are so long that the loss of a core weighs less.
constexpr i64 kManyRows = 16;

constexpr i64 kResultBytes = 64 << 10;  // of a chunk: in the cache until they are committed
constexpr i64 kBlockBytes = 512 << 10;  // of rows of x: with a panel they fit a core's second cache

// Groups of panels to hand out: up to 8 for each thread, but none of less than some 10 µs, of which
// the handing out would be too large a part. As many for each thread as for the others.
static i64 num_groups(i64 panels, i64 panel_bytes, i64 k, i64 m, i64 threads) {
  const i64 panel_ns = std::max(panel_bytes / 16, m * k * 32 / 100);  // roughly, of one core
  const i64 each = std::clamp<i64>(panels * panel_ns / (10'000 * threads), 1, 8);
  return std::min(panels, each * threads);
}

// Blocks of rows, which all groups of panels take one after the other: of a size that stays in the
// cache. Few panels of many rows would leave threads without one at the end: a block more each is up
// to 16 chunks for each thread, none of less than some 20 µs, and 4 tiles at least.
static i64 num_blocks(i64 groups, i64 panels, i64 row_bytes, i64 k, i64 m, i64 tiles, i64 threads) {
  const i64 at_least = (m * row_bytes + kBlockBytes - 1) / kBlockBytes;
  const i64 each = std::clamp<i64>(panels * m * k * 32 / 100 / (20'000 * threads), 1, 16);
  const i64 wanted = (each * threads + groups - 1) / groups;
  return std::clamp<i64>(std::max(at_least, wanted), 1, std::max<i64>(tiles / 4, 1));
}

// `Kind` of a product whose panels are unpacked before, of four-bit weights.
template <class Kind> struct FromInt4 : Kind {};

template <class Kind> constexpr bool kIsFromInt4 = false;
template <class Kind> constexpr bool kIsFromInt4<FromInt4<Kind>> = true;

// Panels are handed out as threads ask for them. Neighbours go out together, because a long stream
// is read faster than short ones. A panel stays in the cache for all its tiles. Where panels do not
// divide evenly the larger groups go first, and what is left for the end is small.
template <class Kind>
static void multiply(Member& self, const Product& whole, bf16* y, const char* x, i64 m,
                     i64 row_bytes) {
  if (!m) return;
  const i64 width = whole.gate ? 16 : 32, panels = (whole.n + width - 1) / width;
  const i64 tiles = num_tiles(m, Kind::kRows);
  const i64 row_of_panel = width * sizeof(bf16);
  const bool is_int4 = kIsFromInt4<Kind> || std::is_same_v<Kind, Int4>;
  const i64 panel_bytes = is_int4 ? Int4::panel_bytes(whole.k)
                                  : whole.k * 32 * (whole.scales ? 1 : sizeof(bf16));
  const bool straight = m >= kManyRows;
  const i64 at_most = straight ? panels : std::max<i64>(1, kResultBytes / (m * row_of_panel));
  const i64 groups = std::max(num_groups(panels, panel_bytes, whole.k, m, self.num_threads()),
                              (panels + at_most - 1) / at_most);
  const i64 blocks =
      straight ? num_blocks(groups, panels, row_bytes, whole.k, m, tiles, self.num_threads()) : 1;
  const i64 together = (panels + groups - 1) / groups;  // at most
  const i64 chunk_bytes = straight ? 0 : m * together * row_of_panel;
  // Of block i / groups, group i % groups: its tiles, and its panels.
  const auto start_of = [=](i64 tile) { return tile_start(m, tile, Kind::kRows); };
  const auto panel_of = [=](i64 group) {
    return panels / groups * group + std::min(group, panels % groups);
  };
  const auto tile_of = [=](i64 block) { return tiles * block / blocks; };
  self.share(
      groups * blocks, 1, chunk_bytes,
      [&](i64 first, i64 last, char* room) {
        for (i64 i = first; i < last; ++i, room += chunk_bytes) {
          const i64 block = i / groups, group = i % groups;
          Product p = whole;
          p.y = straight ? y : (bf16*)room;
          p.stride = straight ? whole.n : together * width;
          p.row = straight ? 0 : start_of(tile_of(block));
          p.column = straight ? 0 : panel_of(group) * width;
          for (i64 panel = panel_of(group); panel < panel_of(group + 1); ++panel) {
            if constexpr (kIsFromInt4<Kind>) {
              p.w = Int4::unpacked(whole, panel);
              p.panel = panel;
            }
            for (i64 tile = tile_of(block); tile < tile_of(block + 1); ++tile) {
              if (!straight && self.is_late()) return;
              const i64 row = start_of(tile);
              const int rows = (int)(start_of(tile + 1) - row);
              dispatch<Kind>(rows, p, panel, row, x + row * row_bytes);
            }
          }
        }
      },
      [&](i64 first, i64 last, const char* room) {
        for (i64 i = first; i < last && !straight; ++i, room += chunk_bytes) {  // all rows
          const i64 column = panel_of(i) * width;
          const i64 columns = std::min(panel_of(i + 1) * width, whole.n) - column;
          for (i64 r = 0; r < m; ++r)
            memcpy(y + r * whole.n + column, room + r * together * row_of_panel,
                   columns * sizeof(bf16));
        }
      },
      straight);
}

// Calls `visit` with the first of each four of `rows` rows, at least 4; the last may overlap.
template <class Visit> static void for_fours(i64 rows, const Visit& visit) {
  for (i64 r = 0; r + 4 <= rows; r += 4) visit(r);
  if (rows % 4) visit(rows - 4);
}

// Tiles of rows of k numbers that are handed out together, to be brought into the products' form.
static i64 tiles_together(i64 m, i64 k, const Member& self) {
  constexpr i64 kWorthwhile = 8 << 10;  // numbers
  return std::max(kWorthwhile / (kTileRows * k), num_tiles(m) / (8 * self.num_threads()));
}

// `rows` rows of items of 4 bytes, `stride` bytes apart, as columns: item i of row r at i * rows + r.
static void turn_tile(const char* x, i64 stride, char* to, i64 rows, i64 items) {
  constexpr i64 kLine = 16;  // items: rows may lie so that few of their lines fit the cache at once
  if (rows < 4) {
    for (i64 r = 0; r < rows; ++r)
      for (i64 i = 0; i < items; ++i) memcpy(to + (i * rows + r) * 4, x + r * stride + i * 4, 4);
    return;
  }
  for (i64 begin = 0; begin < items; begin += kLine)
    for_fours(rows, [&](i64 r) {
      for (i64 i = begin; i < std::min(begin + kLine, items); i += 4)
        turn_four(x + r * stride + i * 4, stride, to + (i * rows + r) * 4, rows * 4);
    });
}

// A row of x [k] as the int8 products quantize it, in y: times `factors` [2 k], and spread by Hadamard
// transforms of each 16 numbers and of the first groups of 16, the largest power of two of them. Where
// that is not all, the last groups, which are about twice as many as the rest, follow, with the factors
// behind the first k.
static void spread(const bf16* x, i64 k, const float* factors, float* y) {
  i64 first = 16;
  while (2 * first <= k) first *= 2;
  const auto within = [&](i64 i, F scale) {
    return hadamard(mul(mul(load(x + i), load(factors + i)), scale));
  };
  for (i64 i = first; i < k; i += 16) store(y + i, within(i, splat(0.25f)));
  const F scale = splat(1.0f / std::sqrt((float)first));
  mix_vectors(y, first, [&](i64 i) { return within(i, scale); });
  if (first == k) return;
  i64 last = std::min<i64>(first, 8 * 16);
  while (last < first && last < 2 * (k - first)) last *= 2;
  y += k - last, factors += k + k - last;
  const F last_scale = splat(4.0f / std::sqrt((float)last));
  mix_vectors(y, last, [&](i64 i) { return mul(mul(load(y + i), load(factors + i)), last_scale); });
}

// ROWS rows of x, 1 or 4, spread, as u8 around 128: every 4 numbers of a row `stride` bytes apart, the
// rows 4 bytes. Their scales go to `scales`, which need not be aligned.
template <int ROWS>
static void quantize(const bf16* x, i64 k, const float* factors, uint8_t* q, i64 stride, char* scales) {
  thread_local std::vector<float> room;
  if ((i64)room.size() < ROWS * k) room.resize(ROWS * k);
  float* wide = room.data();
  F inverse[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    spread(x + r * k, k, factors, wide + r * k);
    F top = splat(0.0f), poison = splat(0.0f);
    for (i64 i = 0; i < k; i += 16) {
      const F v = load(wide + r * k + i);
      top = larger(top, absolute(v));
      poison = fma(v, splat(0.0f), poison);  // NaN where x is not finite, and then so is y
    }
    const float amax = std::max(largest(top), 1e-10f);
    inverse[r] = splat(127.0f / amax);
    const float scale = amax / 127.0f + sum(poison);
    memcpy(scales + r * sizeof(float), &scale, sizeof(float));
  }
  for (i64 i = 0; i < k; i += 16) {
    uint8_t bytes[ROWS][16];
    UNROLL for (int r = 0; r < ROWS; ++r)
      round_to_u8(fma(load(wide + r * k + i), inverse[r], splat(128.0f)), bytes[r]);
    if constexpr (ROWS == 4) turn_four(bytes, 16, q + i / 4 * stride, stride);
    else
      for (int j = 0; j < 4; ++j) memcpy(q + (i / 4 + j) * stride, bytes[0] + 4 * j, 4);
  }
}

// A tile of rows of x as u8 in columns of quadruples; their scales go to `scales`.
static void quantize_tile(const bf16* x, const float* factors, char* to, char* scales, i64 rows, i64 k) {
  const auto some = [&](i64 r, auto kernel) {
    kernel(x + r * k, k, factors, (uint8_t*)to + r * 4, rows * 4, scales + r * sizeof(float));
  };
  if (rows >= 4) return for_fours(rows, [&](i64 r) { some(r, quantize<4>); });
  for (i64 r = 0; r < rows; ++r) some(r, quantize<1>);
}

struct Weight {
  const void* packed;
  const float* bias;      // [panels * 32] or null
  const float* scales;    // of an int8 weight's columns [panels * 32]; null for bf16
  const int32_t* offset;  // of an int8 weight's columns [panels * 32]
  const float* factors;   // of an int8 weight's inputs [2 k], see `spread`; null for bf16
  i64 n, k;               // columns of y; of x
  i64 gate;  // a Gate
  i64 amx_rows;  // of x, from which on AMX computes; 0: never
  i64 is_int4;   // an int8 weight in four bits; k % 32 == 0
};

struct Scratch {
  void* rows;         // [m, k] of bf16 or uint8: x as the products read it
  float* row_scales;  // [m]
};

// Brings rows [m, k] into the tiles that Bf16 and Int8 read; k % 16 == 0. `rows_at(row, rows, room)`
// returns a tile's rows of x, for which it has room_bytes of room; `keep(row, rows, room)` commits
// what it left there, where it has not written it to its place already.
template <class RowsAt, class Keep>
static void prepare(Member& self, const float* factors, const Scratch& scratch, i64 m, i64 k,
                    i64 room_bytes, const RowsAt& rows_at, const Keep& keep) {
  const bool straight = m >= kManyRows, is_int8 = factors;
  const i64 row_bytes = is_int8 ? k : k * sizeof(bf16);
  // The scales are behind the rows.
  const i64 packed_bytes = straight ? 0 : kTileRows * (row_bytes + (i64)sizeof(float));
  const i64 tile_bytes = room_bytes + packed_bytes;
  self.share(
      num_tiles(m), tiles_together(m, k, self), tile_bytes,
      [&](i64 first, i64 last, char* room) {
        for (i64 tile = first; tile < last; ++tile, room += tile_bytes) {
          const i64 row = tile_start(m, tile), rows = tile_start(m, tile + 1) - row;
          const bf16* x = rows_at(row, rows, room);
          char* to = straight ? (char*)scratch.rows + row * row_bytes : room + room_bytes;
          char* scales = straight ? (char*)(scratch.row_scales + row) : to + rows * row_bytes;
          if (is_int8) quantize_tile(x, factors, to, scales, rows, k);
          else turn_tile((const char*)x, row_bytes, to, rows, k / 2);
        }
      },
      [&](i64 first, i64 last, const char* room) {
        for (i64 tile = first; tile < last && !straight; ++tile, room += tile_bytes) {
          const i64 row = tile_start(m, tile), rows = tile_start(m, tile + 1) - row;
          const char* packed = room + room_bytes;
          keep(row, rows, room);
          memcpy((char*)scratch.rows + row * row_bytes, packed, rows * row_bytes);
          if (is_int8)
            memcpy(scratch.row_scales + row, packed + rows * row_bytes, rows * sizeof(float));
        }
      },
      straight);
}

#if HAS_AMX
// Rows of x as u8 rows that follow each other.
static void quantize_plainly(Member& self, const Weight& w, const bf16* x, const Scratch& scratch,
                             i64 m) {
  auto* rows = (uint8_t*)scratch.rows;
  const i64 k = w.k;
  self.share(
      m, std::max<i64>(1, m / (8 * self.num_threads())), 0,
      [&](i64 first, i64 last, char*) {
        for (i64 row = first; row < last; ++row)
          quantize<1>(x + row * k, k, w.factors, rows + row * k, 4,
                      (char*)(scratch.row_scales + row));
      },
      [](i64, i64, const char*) {}, true);
}
#endif

static bool uses_amx(const Weight& w, i64 m) { return HAS_AMX && w.amx_rows && m >= w.amx_rows; }

// Whether the product of m rows reads what `prepare` makes of them. One row of bf16 is as it is.
static bool reads_tiles(const Weight& w, i64 m) { return !uses_amx(w, m) && (w.scales || m > 1); }

// y [m, n] = x [m, k] @ w.T + bias, or the gate times up of that; x is null where it is prepared.
static void product(Member& self, const Weight& w, const bf16* x, const Scratch& scratch, bf16* y,
                    i64 m) {
  const Product p{w.packed, w.bias, w.scales, w.offset, scratch.row_scales, nullptr, 0, 0, 0,
                  w.n, w.k, w.gate, 0};
  const i64 row_bytes = w.k * sizeof(bf16);
#if HAS_AMX
  if (uses_amx(w, m)) {
    if (!w.scales) return multiply<AmxBf16>(self, p, y, (const char*)x, m, row_bytes);
    quantize_plainly(self, w, x, scratch, m);
    const auto* rows = (const char*)scratch.rows;
    if (w.is_int4) return multiply<FromInt4<AmxInt8>>(self, p, y, rows, m, w.k);
    return multiply<AmxInt8>(self, p, y, rows, m, w.k);
  }
#endif
  if (!reads_tiles(w, m)) return multiply<Bf16>(self, p, y, (const char*)x, m, row_bytes);
  if (x)
    prepare(self, w.factors, scratch, m, w.k, 0,
            [&](i64 row, i64, char*) { return x + row * w.k; }, [](i64, i64, const char*) {});
  const auto* rows = (const char*)scratch.rows;
  if (w.is_int4 && (m <= kTileRows || Int4::kIsReadByTiles)) multiply<Int4>(self, p, y, rows, m, w.k);
  else if (w.is_int4) multiply<FromInt4<Int8>>(self, p, y, rows, m, w.k);
  else if (w.scales) multiply<Int8>(self, p, y, rows, m, w.k);
  else multiply<Bf16>(self, p, y, rows, m, row_bytes);
}

// Whether `amx_rows` may be set in this process.
API int amx_is_usable() { return amx_permitted(); }

// A region whose operands may be freed as soon as the call has returned.
template <class Region> static void at_once(const Region& region) {
  pool().work([&](Record& record) {
    record.begin(Record::bytes_of<Region>(1));
    return record.keep(&region, 1);
  });
  pool().settle();
}

struct LinearRegion {
  Weight w;
  const bf16* x;
  Scratch scratch;
  bf16* y;
  i64 m;

  void operator()(Member& self) const { product(self, w, x, scratch, y, m); }
};

// The weight and the scratch stay until `settle`; x may go. Of many rows nobody reads x when the
// phase that reads it is over, because nobody computes a chunk again.
API void linear(const Weight* w, const bf16* x, const Scratch* scratch, bf16* y, i64 m) {
  const i64 kept_size = m >= kManyRows ? 0 : m * w->k;
  pool().work([&](Record& record) {
    record.begin(Record::bytes_of<LinearRegion>(1) + Record::bytes_of<bf16>(kept_size));
    const bf16* rows = kept_size ? record.keep(x, kept_size) : x;
    const LinearRegion region{*w, rows, *scratch, y, m};
    return record.keep(&region, 1);
  });
}

// ---- between the products --------------------------------------------------------------------

// Rows of a chunk: fewer than 8 are not worth another thread's coming.
static i64 rows_together(i64 rows, const Member& self) {
  return std::clamp<i64>(rows / (4 * self.num_threads()), 8, 64);
}

INLINE F squares_of(const bf16* x, i64 size) {
  F squares = splat(0.0f);
  for (i64 i = 0; i < size; i += 16) {
    const F v = load(x + i);
    squares = fma(v, v, squares);
  }
  return squares;
}

struct Norm {
  bf16* x;
  const bf16* delta;         // may be null
  const bf16* delta_weight;  // null: delta is added as it is
  const bf16* weight;
  float offset;  // added to the weights
  bf16* out;
  float eps;
  i64 rows, size;

  void operator()(Member& self) const;
};

// Numbers [at, at + 16) of x / rms(x) * (weight + offset), where scale is 1 / rms(x).
INLINE F normed(const bf16* x, F scale, const bf16* weight, float offset, i64 at) {
  return mul(mul(load(x + at), scale), add(load(weight + at), splat(offset)));
}

// One row. `summed` is x + delta where there is one, else x itself.
static void add_norm_row(const Norm& n, const bf16* x, const bf16* delta, bf16* summed, bf16* out) {
  const auto scale_of = [&](F squares) {
    return splat(1.0f / std::sqrt(sum(squares) / n.size + n.eps));
  };
  F delta_scale = splat(1.0f), squares = splat(0.0f);
  if (delta && n.delta_weight) delta_scale = scale_of(squares_of(delta, n.size));
  for (i64 i = 0; i < n.size; i += 16) {
    if (delta) {
      const F before = load(x + i);
      if (n.delta_weight) {  // rounded before it is added
        store(summed + i, normed(delta, delta_scale, n.delta_weight, n.offset, i));
        store(summed + i, add(before, load(summed + i)));
      } else {
        store(summed + i, add(before, load(delta + i)));
      }
    }
    // As it was rounded: the residual stream is what later layers see.
    const F v = load((delta ? summed : x) + i);
    squares = fma(v, v, squares);
  }
  const F scale = scale_of(squares);
  if (delta) x = summed;
  for (i64 i = 0; i < n.size; i += 16) store(out + i, normed(x, scale, n.weight, n.offset, i));
}

// x += delta (where there is one); out = x / rms(x) * weight. All [rows, size]; size % 16 == 0.
void Norm::operator()(Member& self) const {
  const Norm& n = *this;
  const bool straight = rows >= kManyRows;
  const i64 row_bytes = n.size * sizeof(bf16);
  self.share(
      n.rows, rows_together(n.rows, self), 2 * row_bytes,
      [&](i64 first, i64 last, char* room) {
        for (i64 row = first; row < last; ++row, room += 2 * row_bytes) {
          const i64 at = row * n.size;
          bf16* summed = straight ? n.x + at : (bf16*)room;
          bf16* out = straight ? n.out + at : (bf16*)(room + row_bytes);
          add_norm_row(n, n.x + at, n.delta ? n.delta + at : nullptr, summed, out);
        }
      },
      [&](i64 first, i64 last, const char* room) {
        for (i64 row = first; row < last && !straight; ++row, room += 2 * row_bytes) {
          if (n.delta) memcpy(n.x + row * n.size, room, row_bytes);
          memcpy(n.out + row * n.size, room + row_bytes, row_bytes);
        }
      },
      straight);
}

// The same before a product that reads tiles: what comes of it is only there, in `scratch`.
static void norm_into_tiles(Member& self, const Norm& n, const float* factors,
                            const Scratch& scratch) {
  const bool straight = n.rows >= kManyRows;
  const i64 row_bytes = n.size * sizeof(bf16), normed_bytes = kTileRows * row_bytes;
  prepare(
      self, factors, scratch, n.rows, n.size, straight ? normed_bytes : 2 * normed_bytes,
      [&](i64 row, i64 rows, char* room) {
        auto* normed = (bf16*)room;
        bf16* summed = straight ? n.x + row * n.size : (bf16*)(room + normed_bytes);
        for (i64 r = 0; r < rows; ++r) {
          const i64 at = (row + r) * n.size, to = r * n.size;
          add_norm_row(n, n.x + at, n.delta ? n.delta + at : nullptr, summed + to, normed + to);
        }
        return normed;
      },
      [&](i64 row, i64 rows, const char* room) {
        if (n.delta) memcpy(n.x + row * n.size, room + normed_bytes, rows * row_bytes);
      });
}

API void add_rms_norm(bf16* x, const bf16* delta, const bf16* delta_weight, const bf16* weight,
                      float offset, bf16* out, float eps, i64 rows, i64 size) {
  at_once(Norm{x, delta, delta_weight, weight, offset, out, eps, rows, size});
}

constexpr i64 kMaxHeadDim = 256;

struct HeadNorms {
  const bf16 *query, *key;  // [dim] or both null
  float offset;             // added to the weights
  float eps;
};

// Rotates the heads + kv_heads first heads of one token's row of qkv, before which each is
// normalised where weights are given. cosines, sines [dim / 2]; dim % 16 == 0.
static void norm_rope_row(const bf16* qkv, bf16* out, const HeadNorms& norms, const bf16* cosines,
                          const bf16* sines, i64 heads, i64 kv_heads, i64 dim) {
  const i64 half = dim / 2;
  // One place more than dim / 2 of them: whole vectors are loaded.
  float c[kMaxHeadDim / 2 + 16], s[kMaxHeadDim / 2 + 16], a[kMaxHeadDim], b[kMaxHeadDim];
  for (i64 i = 0; i < half; ++i) {
    const uint32_t wide[2] = {(uint32_t)cosines[i] << 16, (uint32_t)sines[i] << 16};
    memcpy(c + i, wide, 4), memcpy(s + i, wide + 1, 4);
  }
  for (i64 head = 0; head < heads + kv_heads; ++head) {
    const bf16* x = qkv + head * dim;
    const bf16* weight = head < heads ? norms.query : norms.key;
    F squares = splat(0.0f);
    for (i64 i = 0; i < dim; i += 16) {
      const F v = load(x + i);
      store(a + i, v);
      squares = fma(v, v, squares);
    }
    if (weight) {
      const F scale = splat(1.0f / std::sqrt(sum(squares) / dim + norms.eps));
      for (i64 i = 0; i < dim; i += 16)
        store(a + i, mul(mul(load(a + i), scale), add(load(weight + i), splat(norms.offset))));
    }
    for (i64 i = 0; i < half; ++i) {
      b[i] = a[i] * c[i] - a[half + i] * s[i];
      b[half + i] = a[half + i] * c[i] + a[i] * s[i];
    }
    for (i64 i = 0; i < dim; i += 16) store(out + head * dim + i, load(b + i));
  }
}

// ---- paged attention -------------------------------------------------------------------------
//
// A block holds 16 tokens. Of one layer and key head it is 16 * dim elements: keys as
// [dim/2][16][2], values as [8][dim][2], so that both products read 64 bytes for 16 results. The
// heads of a block lie one after the other; blocks are block_stride apart.

constexpr int kBlock = 16;
constexpr int kRows = 8;     // query rows (token, head of the group) that share one pass over the keys
constexpr int kFewRows = 4;  // so many serve several key heads in turn
constexpr int kMaxHeads = 8;
// Keys of one pass over the values. A few rows read each key once, from memory: not far ahead. Many
// rows share what a pass costs besides its products.
constexpr int kShortSpan = 64, kLongSpan = 256;

struct Cache {
  bf16 *keys, *values;
  i64 block_stride;
};

struct Heads {
  i64 heads, kv_heads, dim;
};

// One token's keys and values [kv_heads, dim] go to a slot: block * 16 + offset, or negative for a
// token that is not kept.
static void kv_store_row(const bf16* k, const bf16* v, const Cache& cache, int32_t slot,
                         i64 kv_heads, i64 dim) {
  if (slot < 0) return;
  const i64 block = slot / kBlock, place = slot % kBlock;
  for (i64 head = 0; head < kv_heads; ++head, k += dim, v += dim) {
    const i64 at = block * cache.block_stride + head * kBlock * dim;
    bf16 *to_k = cache.keys + at + place * 2;
    bf16 *to_v = cache.values + at + (place / 2) * 2 * dim + place % 2;
    for (i64 d = 0; d < dim; d += 2) memcpy(to_k + d * kBlock, k + d, 4);
    for (i64 d = 0; d < dim; ++d) to_v[2 * d] = v[d];
  }
}

struct Turn {
  bf16* qkv;  // [tokens] rows, row_stride apart
  i64 row_stride, tokens;
  Heads heads;
  HeadNorms norms;
  const bf16 *cosines, *sines;  // [positions, dim / 2]
  const int32_t* positions;     // [tokens], or null: the token's own place
  // Where keys and values go then; slots null: nowhere.
  Cache cache;
  const int32_t* slots;  // [tokens]

  void operator()(Member& self) const;
};

// Normalises and rotates the tokens' queries and keys, and stores keys and values.
void Turn::operator()(Member& self) const {
  const Turn& t = *this;
  const bool straight = tokens >= kManyRows;
  const i64 kept_size = t.heads.kv_heads * t.heads.dim, query_size = t.heads.heads * t.heads.dim;
  const i64 row_bytes = (query_size + kept_size) * sizeof(bf16);
  self.share(
      t.tokens, rows_together(t.tokens, self), row_bytes,
      [&](i64 first, i64 last, char* room) {
        for (i64 token = first; token < last; ++token, room += row_bytes) {
          const i64 at = (t.positions ? t.positions[token] : token) * t.heads.dim / 2;
          bf16* row = t.qkv + token * t.row_stride;
          norm_rope_row(row, straight ? row : (bf16*)room, t.norms, t.cosines + at,
                        t.sines + at, t.heads.heads, t.heads.kv_heads, t.heads.dim);
        }
      },
      [&](i64 first, i64 last, const char* room) {
        for (i64 token = first; token < last; ++token, room += row_bytes) {
          bf16* row = t.qkv + token * t.row_stride;
          if (!straight) memcpy(row, room, row_bytes);
          if (t.slots)
            kv_store_row(row + query_size, row + query_size + kept_size, t.cache, t.slots[token],
                         t.heads.kv_heads, t.heads.dim);
        }
      },
      straight);
}

API void norm_rope(bf16* qkv, i64 row_stride, const bf16* q_weight, const bf16* k_weight,
                   float offset, float eps, const bf16* cosines, const bf16* sines, i64 tokens, i64 heads,
                   i64 kv_heads, i64 dim) {
  at_once(Turn{qkv, row_stride, tokens, {heads, kv_heads, dim}, {q_weight, k_weight, offset, eps},
               cosines, sines, nullptr, {}, nullptr});
}

// The same for rows [tokens] of keys and values, k_stride and v_stride apart.
API void kv_store(const bf16* k, const bf16* v, i64 k_stride, i64 v_stride, bf16* keys,
                  bf16* values, i64 block_stride, const int32_t* slots, i64 tokens, i64 kv_heads,
                  i64 dim) {
  for (i64 token = 0; token < tokens; ++token)
    kv_store_row(k + token * k_stride, v + token * v_stride, {keys, values, block_stride},
                 slots[token], kv_heads, dim);
}

struct Attention {
  const bf16 *q, *keys, *values;
  bf16* out;
  const int32_t* table;  // of the sequence
  i64 block_stride, head_offset, dim;
  i64 group_dim;  // from a key head's queries to the next one's
  i64 out_stride;  // from a key head's results to the next one's
  float scale;
};

struct Row {
  i64 query, out;  // where it begins in q and out
  int num_keys;    // it sees keys before this one
  int first_key;   // and from this one on
};

// Where one head's piece of a span's blocks lies, and what to fetch while it is read. A block's
// pieces follow each other head by head, and its values follow its keys, but blocks are anywhere:
// the hardware guesses neither the next page nor the next block.
template <int SPAN> struct Pieces {
  const char *here[SPAN / kBlock], *next[SPAN / kBlock];
};

// Scores of one span. BLOCKS blocks go together, so that there are enough independent sums to hide
// a product's latency. A block that the span lacks is its last one again: the caller masks it.
template <int ROWS, int BLOCKS, int SPAN>
static void score_span(const Attention& a, const Row* rows, i64 query, const Pieces<SPAN>& keys,
                       int blocks, float (*score)[SPAN]) {
  for (int j = 0; j < blocks; j += BLOCKS) {
    const char *here[BLOCKS], *next[BLOCKS];
    UNROLL for (int b = 0; b < BLOCKS; ++b) {
      here[b] = keys.here[std::min(j + b, blocks - 1)];
      next[b] = keys.next[std::min(j + b, blocks - 1)];
    }
    F s[ROWS][BLOCKS];
    UNROLL for (int r = 0; r < ROWS; ++r)
      UNROLL for (int b = 0; b < BLOCKS; ++b) s[r][b] = splat(0.0f);
    for (i64 d = 0; d < a.dim; d += 2) {
      const i64 line = d * kBlock * sizeof(bf16);
      W pairs[BLOCKS];
      UNROLL for (int b = 0; b < BLOCKS; ++b) {
        fetch(next[b] + line);
        pairs[b] = load_w(here[b] + line);
      }
      UNROLL for (int r = 0; r < ROWS; ++r) {
        const W pair = splat_w(a.q + rows[r].query + query + d);
        UNROLL for (int b = 0; b < BLOCKS; ++b) s[r][b] = dot2(s[r][b], pairs[b], pair);
      }
    }
    UNROLL for (int r = 0; r < ROWS; ++r)
      UNROLL for (int b = 0; b < BLOCKS; ++b)
        store(score[r] + (j + b) * kBlock, mul(s[r][b], splat(a.scale)));
  }
}

// acc += weights times values of one span. CHUNK vectors of the head stay in registers.
template <int ROWS, int CHUNK, int SPAN>
static void add_span(const Attention& a, const Pieces<SPAN>& values, int keys,
                     const bf16 (*weight)[SPAN], float (*acc)[kMaxHeadDim]) {
  for (i64 d = 0; d < a.dim; d += 16 * CHUNK) {
    F o[ROWS][CHUNK];
    UNROLL for (int r = 0; r < ROWS; ++r)
      UNROLL for (int c = 0; c < CHUNK; ++c) o[r][c] = load(acc[r] + d + 16 * c);
    for (int i = 0; i < keys; i += 2) {
      const i64 line = ((i % kBlock) * a.dim + 2 * d) * sizeof(bf16);
      const char* value = values.here[i / kBlock] + line;
      const char* next = values.next[i / kBlock] + line;
      // The last pair may be half another sequence's: 0 * NaN is NaN, so it is masked.
      const uint32_t mask = i + 1 < keys ? 0xffffffff : 0x0000ffff;
      W v[CHUNK];
      UNROLL for (int c = 0; c < CHUNK; ++c) {
        fetch(next + 64 * c);
        v[c] = both(load_w(value + 64 * c), mask);
      }
      UNROLL for (int r = 0; r < ROWS; ++r) {
        const W p = splat_w(weight[r] + i);
        UNROLL for (int c = 0; c < CHUNK; ++c) o[r][c] = dot2(o[r][c], v[c], p);
      }
    }
    UNROLL for (int r = 0; r < ROWS; ++r)
      UNROLL for (int c = 0; c < CHUNK; ++c) store(acc[r] + d + 16 * c, o[r][c]);
  }
}

// Running softmax of some rows (Milakov and Gimelshein, arXiv:1805.02867).
template <int ROWS> struct Softmax {
  float top[ROWS];
  F totals[ROWS];  // 16 parts of each row's total

  void begin() {
    for (int r = 0; r < ROWS; ++r) top[r] = -INFINITY, totals[r] = splat(0.0f);
  }

  // Keys of a span's block j that lie before the row's window.
  static int unseen(const Row& row, int begin, int j) { return row.first_key - begin - j * kBlock; }

  // Turns a span's scores into weights, and brings what was summed before to the new scale.
  template <int SPAN>
  void take(const Attention& a, const Row* rows, int begin, int blocks, const float (*score)[SPAN],
            bf16 (*weight)[SPAN], float (*acc)[kMaxHeadDim]) {
    for (int r = 0; r < ROWS; ++r) {
      F s[SPAN / kBlock], most = splat(top[r]);
      const bool sees_all =
          rows[r].num_keys - begin >= blocks * kBlock && rows[r].first_key <= begin;
      for (int j = 0; j < blocks; ++j) {
        const int seen = rows[r].num_keys - begin - j * kBlock;
        s[j] = load(score[r] + j * kBlock);
        if (!sees_all) s[j] = first(seen, s[j], -INFINITY);
        if (!sees_all) s[j] = after(unseen(rows[r], begin, j), s[j], -INFINITY);
        most = larger(most, s[j]);
      }
      const float now = largest(most);
      // Nothing to see yet is no reason for a NaN: -inf - -inf is one.
      const float base = now == -INFINITY ? 0.0f : now;
      F added = splat(0.0f);
      for (int j = 0; j < blocks; ++j) {
        const int seen = rows[r].num_keys - begin - j * kBlock;
        F p = exponential(add(s[j], splat(-base)));
        if (!sees_all) p = after(unseen(rows[r], begin, j), first(seen, p, 0.0f), 0.0f);
        added = add(added, p);
        store(weight[r] + j * kBlock, p);
      }
      const float fix = now == top[r] ? 1.0f : std::exp(top[r] - base);
      totals[r] = fma(totals[r], splat(fix), added);
      top[r] = now;
      if (fix != 1.0f)
        for (i64 d = 0; d < a.dim; d += 16)
          store(acc[r] + d, mul(load(acc[r] + d), splat(fix)));
    }
  }
};

// `heads` key heads, at most HEADS, of the rows: all keys of a span first, then all its values, so
// that each block is read from its beginning to its end.
template <int ROWS, int HEADS, int BLOCKS, int CHUNK, int SPAN>
static void attend(const Attention& a, const Row* rows, int last, int heads) {
  alignas(64) float acc[HEADS][ROWS][kMaxHeadDim];
  alignas(64) float score[ROWS][SPAN];
  alignas(64) bf16 weight[HEADS][ROWS][SPAN];
  Softmax<ROWS> softmax[HEADS];
  const i64 piece = kBlock * a.dim * sizeof(bf16);
  for (int h = 0; h < heads; ++h) {
    softmax[h].begin();
    for (int r = 0; r < ROWS; ++r)
      for (i64 d = 0; d < a.dim; d += 16) store(acc[h][r] + d, splat(0.0f));
  }
  // Rows are in order of their tokens: none sees a key before the first row's window.
  for (int begin = rows[0].first_key / kBlock * kBlock; begin < last; begin += SPAN) {
    const int keys = std::min(SPAN, last - begin), blocks = (keys + kBlock - 1) / kBlock;
    const int32_t* table = a.table + begin / kBlock;
    Pieces<SPAN> k, v;
    const char* after[SPAN / kBlock];  // the first keys of the next span
    for (int j = 0; j < blocks; ++j) {
      const i64 at = table[j] * a.block_stride + a.head_offset;
      // Behind the last span nothing follows: its own keys are at hand.
      const bool follows = begin + SPAN + j * kBlock < last;
      k.here[j] = (const char*)(a.keys + at);
      v.here[j] = (const char*)(a.values + at);
      after[j] = (const char*)(a.keys + (follows ? table[j + SPAN / kBlock] * a.block_stride +
                                                       a.head_offset
                                                 : at));
    }
    for (int h = 0; h < heads; ++h) {
      for (int j = 0; j < blocks; ++j)
        k.next[j] = h + 1 < heads ? k.here[j] + piece : v.here[j];
      score_span<ROWS, BLOCKS, SPAN>(a, rows, h * a.group_dim, k, blocks, score);
      softmax[h].take(a, rows, begin, blocks, score, weight[h], acc[h]);
      for (int j = 0; j < blocks; ++j) k.here[j] += piece;
    }
    for (int h = 0; h < heads; ++h) {
      for (int j = 0; j < blocks; ++j) v.next[j] = h + 1 < heads ? v.here[j] + piece : after[j];
      add_span<ROWS, CHUNK, SPAN>(a, v, keys, weight[h], acc[h]);
      for (int j = 0; j < blocks; ++j) v.here[j] += piece;
    }
  }
  for (int h = 0; h < heads; ++h)
    for (int r = 0; r < ROWS; ++r) {
      const F scale = splat(1.0f / sum(softmax[h].totals[r]));
      for (i64 d = 0; d < a.dim; d += 16)
        store(a.out + rows[r].out + h * a.out_stride + d, mul(load(acc[h][r] + d), scale));
    }
}

template <int ROWS>
static void attend_by_dim(const Attention& a, const Row* rows, int last, int heads) {
  constexpr int kBlocks = ROWS <= 2 ? 4 : 2, kChunk = ROWS <= 4 ? 4 : 2;
  constexpr int kHeads = ROWS <= kFewRows ? kMaxHeads : 1;
  constexpr int kSpan = ROWS <= kFewRows ? kShortSpan : kLongSpan;
  if (a.dim % (16 * kChunk) == 0)
    return attend<ROWS, kHeads, kBlocks, kChunk, kSpan>(a, rows, last, heads);
  attend<ROWS, kHeads, kBlocks, 1, kSpan>(a, rows, last, heads);
}

struct Ragged {
  i64 sequences;
  const int32_t* cu_q;      // [sequences + 1] where each one's queries begin
  const int32_t* seq_lens;  // [sequences] keys of each one, its queries' own among them
  const int32_t* table;     // [sequences, table_stride] blocks of each group of layers
  i64 table_stride;
  i64 groups, group_stride;  // from one group's table to the next one's
  const int32_t* work;  // [num_work, 2] sequence, first of the rows that one call of `attend` takes
  i64 num_work;
};

static Ragged of_group(Ragged ragged, i64 group) {
  ragged.table += group * ragged.group_stride;
  return ragged;
}

// An item of the work list: up to kRows rows, a row being a (token, head of the group).
struct Item {
  i64 sequence, start;  // the first row, among the sequence's
  i64 first_token, queries;
  int count;
};

static Item item_at(const Ragged& ragged, i64 group, i64 place) {
  const i64 sequence = ragged.work[place * 2], start = ragged.work[place * 2 + 1];
  const i64 first_token = ragged.cu_q[sequence];
  const i64 queries = ragged.cu_q[sequence + 1] - first_token;
  return {sequence, start, first_token, queries,
          (int)std::min<i64>(kRows, queries * group - start)};
}

struct AttentionRegion {
  const bf16* q;
  i64 q_stride;
  Cache cache;
  bf16* out;
  Ragged ragged;
  Heads heads;
  float scale;
  i64 window;  // a query sees so many keys, its own included; 0: all

  void operator()(Member& self) const;
};

// An item for the key heads [kv_head, kv_head + heads); out [heads, kRows, dim].
static void attend_item(const AttentionRegion& region, const Item& item, i64 kv_head, int heads,
                        bf16* out) {
  const auto& h = region.heads;
  const i64 group = h.heads / h.kv_heads;
  const Attention a{region.q, region.cache.keys, region.cache.values, out,
                    region.ragged.table + item.sequence * region.ragged.table_stride,
                    region.cache.block_stride, kv_head * kBlock * h.dim, h.dim, group * h.dim,
                    kRows * h.dim, region.scale};
  Row rows[kRows];
  for (int r = 0; r < kRows; ++r) {
    // Rows that are not there are the last one again: there are fewer kinds of calls.
    const int which = std::min(r, item.count - 1);
    const i64 at_row = item.start + which;
    const i64 token = at_row / group, head = kv_head * group + at_row % group;
    const i64 num_keys = region.ragged.seq_lens[item.sequence] - item.queries + token + 1;
    const i64 first_key = region.window ? std::max<i64>(0, num_keys - region.window) : 0;
    rows[r] = {(item.first_token + token) * region.q_stride + head * h.dim, which * h.dim,
               (int)num_keys, (int)first_key};
  }
  const int last = rows[item.count - 1].num_keys;  // rows are in order of their tokens
  switch (item.count) {
    case 1: return attend_by_dim<1>(a, rows, last, heads);
    case 2: return attend_by_dim<2>(a, rows, last, heads);
    case 3: return attend_by_dim<3>(a, rows, last, heads);
    case 4: return attend_by_dim<4>(a, rows, last, heads);
    default: return attend_by_dim<kRows>(a, rows, last, heads);
  }
}

static void commit_item(const AttentionRegion& region, const Item& item, i64 kv_head, int heads,
                        const bf16* from) {
  const auto& h = region.heads;
  const i64 group = h.heads / h.kv_heads;
  for (int head = 0; head < heads; ++head)
    for (int r = 0; r < item.count; ++r) {
      const i64 token = item.first_token + (item.start + r) / group;
      const i64 to_head = (kv_head + head) * group + (item.start + r) % group;
      memcpy(region.out + (token * h.heads + to_head) * h.dim, from + (head * kRows + r) * h.dim,
             h.dim * sizeof(bf16));
    }
}

// Causal attention of ragged queries. q, out: [tokens, heads, dim] with q_stride and contiguous.
void AttentionRegion::operator()(Member& self) const {
  const AttentionRegion& region = *this;
  const auto& ragged = region.ragged;
  const i64 kv_heads = region.heads.kv_heads, group = region.heads.heads / kv_heads;
  i64 num_short = 0;
  const auto rows_of = [&](i64 item) { return item_at(ragged, group, item).queries * group; };
  while (num_short < ragged.num_work && rows_of(num_short) <= kFewRows) ++num_short;
  const i64 num_long = ragged.num_work - num_short;
  // A sequence with few rows reads its keys once. Several heads of a block are one long piece of
  // memory, and the longer the better it is read; but every thread wants its share of the work.
  i64 together = std::min<i64>(kMaxHeads, kv_heads);
  while (together > 1 && (kv_heads % together ||
                          num_short * kv_heads / together < 2 * self.num_threads()))
    --together;
  const i64 parts = kv_heads / together, num_short_parts = num_short * parts;
  const i64 room_size = (num_short ? together : 1) * kRows * region.heads.dim;
  // One with many rows comes back to the same keys again and again: head by head, they stay in the
  // cache.
  const auto each = [&](i64 first, i64 last, const auto& visit) {
    for (i64 i = first; i < last; ++i) {
      const i64 at = i - num_short_parts;
      if (at < 0) visit(i - first, i / parts, i % parts * together, (int)together);
      else visit(i - first, num_short + at % num_long, at / num_long, 1);
    }
  };
  const i64 num_parts = num_short_parts + num_long * kv_heads;
  self.share(
      num_parts, std::max<i64>(1, num_parts / (16 * self.num_threads())), room_size * sizeof(bf16),
      [&](i64 first, i64 last, char* room) {
        each(first, last, [&](i64 nth, i64 item, i64 kv_head, int heads) {
          attend_item(region, item_at(ragged, group, item), kv_head, heads,
                      (bf16*)room + nth * room_size);
        });
      },
      [&](i64 first, i64 last, const char* room) {
        each(first, last, [&](i64 nth, i64 item, i64 kv_head, int heads) {
          commit_item(region, item_at(ragged, group, item), kv_head, heads,
                      (const bf16*)room + nth * room_size);
        });
      });
}

API void paged_attention(const bf16* q, i64 q_stride, bf16* keys, bf16* values, i64 block_stride,
                         bf16* out, const Ragged* ragged, i64 group, i64 heads, i64 kv_heads,
                         i64 dim, float scale, i64 window) {
  at_once(AttentionRegion{q, q_stride, {keys, values, block_stride}, out, of_group(*ragged, group),
                       {heads, kv_heads, dim}, scale, window});
}

// ---- a whole stack of layers -----------------------------------------------------------------

struct Layer {
  // [hidden]; the norms of what attention and feed-forward add may be null.
  const bf16 *attention_norm, *attention_output_norm, *mlp_norm, *mlp_output_norm;
  const bf16 *query_norm, *key_norm;  // [dim] or both null
  Weight qkv, output, gate_up, down;
  bf16 *keys, *values;          // of the layer, in the first block
  const bf16 *cosines, *sines;  // [positions, dim / 2]
  i64 window;                   // as AttentionRegion's
  i64 group;                    // whose table and slots are the layer's
};

struct Stack {
  const Layer* layers;
  i64 num_layers, hidden, heads, kv_heads, dim, block_stride;
  const bf16* embedding;          // [vocab, hidden]
  const bf16* final_norm;         // [hidden]
  float embedding_scale;          // of its vectors
  float norm_offset;              // added to all norms' weights
  float norm_eps, attention_scale;
};

struct Batch {
  i64 tokens;
  const int32_t *ids, *positions;  // [tokens]
  const int32_t* slots;            // [groups, tokens]
  Ragged ragged;
  const int32_t* rows;  // [num_rows] tokens whose final states are wanted, in order
  i64 num_rows;
  Ragged ragged_rows;  // the same sequences; the work list has only what `rows` needs
  // Room for [tokens] rows: of hidden, hidden, qkv.n, heads * dim, gate_up.n and hidden.
  bf16 *x, *normed, *qkv, *attended, *inner, *delta;
  Scratch scratch;
};

struct StackRegion {
  Stack stack;
  Batch batch;

  void operator()(Member& self) const;
};

// Rows move up into places of rows that are not wanted, or of themselves.
static void keep_row(bf16* x, i64 size, i64 row, i64 place) {
  memmove(x + place * size, x + row * size, size * sizeof(bf16));
}

void StackRegion::operator()(Member& self) const {
  const Stack& s = stack;
  const Batch& b = batch;
  const Heads heads{s.heads, s.kv_heads, s.dim};
  const i64 attended_size = s.heads * s.dim;
  i64 tokens = b.tokens;
  const auto norm = [&](const bf16* delta, const bf16* delta_weight, const bf16* weight) {
    return Norm{b.x,      delta,      delta_weight, weight,  s.norm_offset,
                b.normed, s.norm_eps, tokens,       s.hidden};
  };
  const auto norm_and_multiply = [&](const Norm& norm, const Weight& w, bf16* y) {
    const bool is_tiled = reads_tiles(w, tokens);
    if (is_tiled) norm_into_tiles(self, norm, w.factors, b.scratch);
    else norm(self);
    product(self, w, is_tiled ? nullptr : b.normed, b.scratch, y, tokens);
  };
  const auto nothing = [](i64, i64, char*) {};
  const auto embed = [&](i64 first, i64 last, const char*) {
    for (i64 row = first; row < last; ++row) {
      const bf16* from = s.embedding + b.ids[row] * s.hidden;
      bf16* to = b.x + row * s.hidden;
      if (s.embedding_scale == 1.0f) memcpy(to, from, s.hidden * sizeof(bf16));
      else
        for (i64 i = 0; i < s.hidden; i += 16)
          store(to + i, mul(load(from + i), splat(s.embedding_scale)));
    }
  };
  self.share(tokens, rows_together(tokens, self), 0, nothing, embed);
  for (i64 l = 0; l < s.num_layers; ++l) {
    const Layer& layer = s.layers[l];
    const Cache cache{layer.keys, layer.values, s.block_stride};
    const bf16* delta_weight = l ? s.layers[l - 1].mlp_output_norm : nullptr;
    norm_and_multiply(norm(l ? b.delta : nullptr, delta_weight, layer.attention_norm), layer.qkv,
                      b.qkv);
    Turn{b.qkv, layer.qkv.n, tokens, heads,
         {layer.query_norm, layer.key_norm, s.norm_offset, s.norm_eps},
         layer.cosines, layer.sines, b.positions, cache, b.slots + layer.group * b.tokens}(self);
    const bool is_last = l + 1 == s.num_layers;
    AttentionRegion{b.qkv, layer.qkv.n, cache, b.attended,
                    of_group(is_last ? b.ragged_rows : b.ragged, layer.group), heads,
                    s.attention_scale, layer.window}(self);
    if (is_last) {
      self.share(1, 1, 0, nothing, [&](i64, i64, const char*) {
        for (i64 i = 0; i < b.num_rows; ++i) {
          keep_row(b.x, s.hidden, b.rows[i], i);
          keep_row(b.attended, attended_size, b.rows[i], i);
        }
      });
      tokens = b.num_rows;
    }
    product(self, layer.output, b.attended, b.scratch, b.delta, tokens);
    norm_and_multiply(norm(b.delta, layer.attention_output_norm, layer.mlp_norm), layer.gate_up,
                      b.inner);
    product(self, layer.down, b.inner, b.scratch, b.delta, tokens);
  }
  norm(b.delta, s.layers[s.num_layers - 1].mlp_output_norm, s.final_norm)(self);
}

static i64 size_of_tables(const Ragged& r) {
  return (r.groups - 1) * r.group_stride + r.sequences * r.table_stride;
}

static i64 bytes_of(const Ragged& r) {
  return 2 * Record::bytes_of<int32_t>(r.sequences + 1) +
         Record::bytes_of<int32_t>(size_of_tables(r)) +
         Record::bytes_of<int32_t>(r.num_work * 2);
}

static Ragged kept(Record& record, const Ragged& r) {
  return {r.sequences, record.keep(r.cu_q, r.sequences + 1), record.keep(r.seq_lens, r.sequences),
          record.keep(r.table, size_of_tables(r)), r.table_stride, r.groups, r.group_stride,
          record.keep(r.work, r.num_work * 2), r.num_work};
}

// All layers in one region. What comes of it is in `normed`: the final hidden states of `rows`.
// Nothing comes after the last layer's keys and values of the other tokens: a prompt's layer less is
// 1/28 of Qwen3-0.6B. Parameters, cache and the batch's rooms stay until `settle`; the rest may go.
API void decoder_stack(const Stack* stack, const Batch* batch) {
  pool().work([&](Record& record) {
    const i64 tokens = batch->tokens, slots = batch->ragged.groups * tokens;
    record.begin(Record::bytes_of<StackRegion>(1) + 2 * Record::bytes_of<int32_t>(tokens) +
                 Record::bytes_of<int32_t>(slots) + Record::bytes_of<int32_t>(batch->num_rows) + bytes_of(batch->ragged) +
                 bytes_of(batch->ragged_rows));
    StackRegion region{*stack, *batch};
    region.batch.ids = record.keep(batch->ids, tokens);
    region.batch.positions = record.keep(batch->positions, tokens);
    region.batch.slots = record.keep(batch->slots, slots);
    region.batch.rows = record.keep(batch->rows, batch->num_rows);
    region.batch.ragged = kept(record, batch->ragged);
    region.batch.ragged_rows = kept(record, batch->ragged_rows);
    return record.keep(&region, 1);
  });
}

// Kernels of the native tier: a plain C ABI over bfloat16, no torch headers, loaded with ctypes.
//
// Every function has a torch twin that is its specification and its test. Sizes are counted in
// elements. Pointers need no alignment unless said. Parallel regions share the OpenMP pool of
// torch, because torch's libgomp is in the process before this library is.

#include <omp.h>

#include "vectors.h"

using i64 = int64_t;
#define API extern "C" __attribute__((visibility("default")))

// ---- matrix products -------------------------------------------------------------------------
//
// Weights lie in panels of 32 output columns, [panel][K/2][32][2] for bf16 and [panel][K/4][32][4]
// for int8, so that each panel is one sequential stream and no sum crosses lanes. Rows of x are
// repacked in tiles of at most kTileRows, [K/2][rows][2]: then one base register serves them all.
// A gated panel is 16 gate columns and the 16 up columns that belong to them.

struct Product {
  const void* w;
  const float* bias;      // [panels * 32] or null
  const float* scales;    // int8: of the columns, [panels * 32]
  const int32_t* offset;  // int8: 128 * sum of the column, what x's zero point adds
  const float* row_scales;
  bf16* y;
  i64 n, k;  // columns of y; rows of the weight
  bool gated;
};

INLINE void put(bf16* y, F x, i64 room) {
  if (room >= 16) return store(y, x);
  bf16 whole[16];
  store(whole, x);
  memcpy(y, whole, std::max<i64>(room, 0) * sizeof(bf16));
}

static void finish(const Product& p, i64 panel, i64 row, F a, F b) {
  if (p.bias) {
    a = add(a, load(p.bias + panel * 32));
    b = add(b, load(p.bias + panel * 32 + 16));
  }
  if (p.gated) {
    const i64 column = panel * 16;
    put(p.y + row * p.n + column, mul(silu(a), b), p.n - column);
  } else {
    const i64 column = panel * 32;
    bf16* y = p.y + row * p.n + column;
    put(y, a, p.n - column);
    put(y + 16, b, p.n - column - 16);
  }
}

struct Bf16 {
  template <int M> static void tile(const Product& p, i64 panel, i64 row, const void* rows) {
    const auto* x = (const bf16*)rows;
    const auto* w = (const bf16*)p.w + panel * 32 * p.k;
    F acc[M][2];
    UNROLL for (int m = 0; m < M; ++m) acc[m][0] = acc[m][1] = splat(0.0f);
    for (i64 k = 0; k < p.k; k += 2, w += 64, x += 2 * M) {
      _mm_prefetch((const char*)w + 4096, _MM_HINT_T0);
      _mm_prefetch((const char*)w + 4160, _MM_HINT_T0);
      const W w0 = load_w(w), w1 = load_w(w + 32);
      UNROLL for (int m = 0; m < M; ++m) {
        const W pair = splat_w(x + 2 * m);
        acc[m][0] = dot2(acc[m][0], w0, pair);
        acc[m][1] = dot2(acc[m][1], w1, pair);
      }
    }
    float sums[M][32];
    UNROLL for (int m = 0; m < M; ++m) store(sums[m], acc[m][0]), store(sums[m] + 16, acc[m][1]);
    for (int m = 0; m < M; ++m) finish(p, panel, row + m, load(sums[m]), load(sums[m] + 16));
  }
};

struct Int8 {
  template <int M> static void tile(const Product& p, i64 panel, i64 row, const void* rows) {
    const auto* x = (const uint8_t*)rows;
    const auto* w = (const int8_t*)p.w + panel * 32 * p.k;
    I acc[M][2];
    UNROLL for (int m = 0; m < M; ++m) acc[m][0] = acc[m][1] = zero_i();
    for (i64 k = 0; k < p.k; k += 4, w += 128, x += 4 * M) {
      _mm_prefetch((const char*)w + 4096, _MM_HINT_T0);
      _mm_prefetch((const char*)w + 4160, _MM_HINT_T0);
      const W w0 = load_w(w), w1 = load_w(w + 64);
      UNROLL for (int m = 0; m < M; ++m) {
        const W four = splat_w(x + 4 * m);
        acc[m][0] = dot4(acc[m][0], four, w0);
        acc[m][1] = dot4(acc[m][1], four, w1);
      }
    }
    const i64 at = panel * 32;
    float sums[M][32];
    UNROLL for (int m = 0; m < M; ++m) {
      store(sums[m], minus(acc[m][0], p.offset + at));
      store(sums[m] + 16, minus(acc[m][1], p.offset + at + 16));
    }
    for (int m = 0; m < M; ++m) {
      const F scale = splat(p.row_scales[row + m]);
      const F a = mul(load(sums[m]), mul(load(p.scales + at), scale));
      const F b = mul(load(sums[m] + 16), mul(load(p.scales + at + 16), scale));
      finish(p, panel, row + m, a, b);
    }
  }
};

template <class Kind, int M = kTileRows>
static void dispatch(int rows, const Product& p, i64 panel, i64 row, const void* x) {
  if (rows == M) return Kind::template tile<M>(p, panel, row, x);
  if constexpr (M > 1) dispatch<Kind, M - 1>(rows, p, panel, row, x);
}

static i64 num_tiles(i64 m) { return (m + kTileRows - 1) / kTileRows; }
static i64 tile_start(i64 m, i64 tile) { return m * tile / num_tiles(m); }

template <class Kind> static void multiply(const Product& p, const char* x, i64 m, i64 row_bytes) {
  // Inside a parallel region. Panels are handed out as threads ask for them: where a core is busy
  // with something else, the other one takes more. Neighbours go out together, because a long
  // stream is read faster than short ones. A panel stays in the cache for all its tiles.
  const i64 panels = (p.n + (p.gated ? 15 : 31)) / (p.gated ? 16 : 32);
  const i64 together = std::max<i64>(1, panels / (8 * omp_get_num_threads()));
#pragma omp for schedule(dynamic, together)
  for (i64 panel = 0; panel < panels; ++panel)
    for (i64 tile = 0; tile < num_tiles(m); ++tile) {
      const i64 row = tile_start(m, tile);
      const int rows = (int)(tile_start(m, tile + 1) - row);
      dispatch<Kind>(rows, p, panel, row, x + row * row_bytes);
    }
}

// y [m, n] = x [m, k] @ w.T + bias, or silu(gate) * up of that; packed: room for m * k elements.
API void linear_bf16(const bf16* x, const bf16* w, const float* bias, bf16* packed, bf16* y, i64 m,
                     i64 n, i64 k, int gated) {
  const Product p{w, bias, nullptr, nullptr, nullptr, y, n, k, gated != 0};
#pragma omp parallel
  {
    if (m > 1) {
#pragma omp for schedule(static)
      for (i64 tile = 0; tile < num_tiles(m); ++tile) {
        const i64 row = tile_start(m, tile), rows = tile_start(m, tile + 1) - row;
        for (i64 r = 0; r < rows; ++r)
          for (i64 i = 0; i < k / 2; ++i)
            memcpy(packed + row * k + (i * rows + r) * 2, x + (row + r) * k + i * 2, 4);
      }
    }
    multiply<Bf16>(p, (const char*)(m > 1 ? packed : x), m, k * sizeof(bf16));
  }
}

// One row of x as u8 around 128, every 4 elements `stride` bytes apart. Returns its scale.
static float quantize(const bf16* x, uint8_t* q, i64 k, i64 stride) {
  F top = splat(0.0f), poison = splat(0.0f);
  for (i64 i = 0; i < k; i += 16) {
    const F v = load(x + i);
    top = larger(top, absolute(v));
    poison = fma(v, splat(0.0f), poison);  // NaN where x is not finite, and then so is y
  }
  const float amax = std::max(largest(top), 1e-10f);
  const F inverse = splat(127.0f / amax);
  for (i64 i = 0; i < k; i += 16) {
    uint8_t bytes[16];
    round_to_u8(fma(load(x + i), inverse, splat(128.0f)), bytes);
    for (int j = 0; j < 4; ++j) memcpy(q + (i / 4 + j) * stride, bytes + 4 * j, 4);
  }
  return amax / 127.0f + sum(poison);
}

// The same with int8 weights, and x quantized row by row. packed: m * k bytes; row_scales [m].
API void linear_int8(const bf16* x, const int8_t* w, const float* scales, const int32_t* offset,
                     const float* bias, uint8_t* packed, float* row_scales, bf16* y, i64 m, i64 n,
                     i64 k, int gated) {
  const Product p{w, bias, scales, offset, row_scales, y, n, k, gated != 0};
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (i64 tile = 0; tile < num_tiles(m); ++tile) {
      const i64 row = tile_start(m, tile), rows = tile_start(m, tile + 1) - row;
      for (i64 r = 0; r < rows; ++r)
        row_scales[row + r] =
            quantize(x + (row + r) * k, packed + row * k + r * 4, k, rows * 4);
    }
    multiply<Int8>(p, (const char*)packed, m, k);
  }
}

// ---- between the products --------------------------------------------------------------------

constexpr i64 kAlone = 8;  // fewer rows are not worth waking the other threads

// x += delta (where there is one); out = x / rms(x) * weight. All [rows, size]; size % 16 == 0.
API void add_rms_norm(bf16* x, const bf16* delta, const bf16* weight, bf16* out, float eps,
                      i64 rows, i64 size) {
#pragma omp parallel for schedule(static) if (rows >= kAlone)
  for (i64 row = 0; row < rows; ++row) {
    bf16 *in = x + row * size, *to = out + row * size;
    F squares = splat(0.0f);
    for (i64 i = 0; i < size; i += 16) {
      if (delta) store(in + i, add(load(in + i), load(delta + row * size + i)));
      const F v = load(in + i);  // as it was rounded: the residual stream is what later layers see
      squares = fma(v, v, squares);
    }
    const F scale = splat(1.0f / std::sqrt(sum(squares) / size + eps));
    for (i64 i = 0; i < size; i += 16)
      store(to + i, mul(mul(load(in + i), scale), load(weight + i)));
  }
}

constexpr i64 kMaxHeadDim = 256;

// Rotates, in place, the heads + kv_heads first heads of each row [row_stride] of qkv; before that
// each is normalised where weights are given. cos, sin [tokens, dim / 2]; dim % 16 == 0.
API void norm_rope(bf16* qkv, i64 row_stride, const bf16* q_weight, const bf16* k_weight,
                   float eps, const bf16* cosines, const bf16* sines, i64 tokens, i64 heads,
                   i64 kv_heads, i64 dim) {
  const i64 half = dim / 2;
#pragma omp parallel for schedule(static) if (tokens >= kAlone)
  for (i64 token = 0; token < tokens; ++token) {
    // One place more than dim / 2 of them: whole vectors are loaded.
    float c[kMaxHeadDim / 2 + 16], s[kMaxHeadDim / 2 + 16], a[kMaxHeadDim], b[kMaxHeadDim];
    for (i64 i = 0; i < half; ++i) {
      const uint32_t wide[2] = {(uint32_t)cosines[token * half + i] << 16,
                                (uint32_t)sines[token * half + i] << 16};
      memcpy(c + i, wide, 4), memcpy(s + i, wide + 1, 4);
    }
    for (i64 head = 0; head < heads + kv_heads; ++head) {
      bf16* x = qkv + token * row_stride + head * dim;
      const bf16* weight = head < heads ? q_weight : k_weight;
      F squares = splat(0.0f);
      for (i64 i = 0; i < dim; i += 16) {
        const F v = load(x + i);
        store(a + i, v);
        squares = fma(v, v, squares);
      }
      if (weight) {
        const F scale = splat(1.0f / std::sqrt(sum(squares) / dim + eps));
        for (i64 i = 0; i < dim; i += 16)
          store(a + i, mul(mul(load(a + i), scale), load(weight + i)));
      }
      for (i64 i = 0; i < half; ++i) {
        b[i] = a[i] * c[i] - a[half + i] * s[i];
        b[half + i] = a[half + i] * c[i] + a[i] * s[i];
      }
      for (i64 i = 0; i < dim; i += 16) store(x + i, load(b + i));
    }
  }
}

// ---- paged attention -------------------------------------------------------------------------
//
// A block holds 16 tokens. Of one layer and key head it is 16 * dim elements: keys as
// [dim/2][16][2], values as [8][dim][2], so that both products read 64 bytes for 16 results. The
// heads of a block lie one after the other; blocks are block_stride apart.

constexpr int kBlock = 16;
constexpr int kRows = 8;  // query rows (token, head of the group) that share one pass over the keys
constexpr int kSpan = 64;  // keys of one pass over the values
constexpr int kSpanBlocks = kSpan / kBlock;

// slots [tokens]: block * 16 + offset, or negative for a token that is not kept.
API void kv_store(const bf16* k, const bf16* v, i64 k_stride, i64 v_stride, bf16* keys,
                  bf16* values, i64 block_stride, const int32_t* slots, i64 tokens, i64 kv_heads,
                  i64 dim) {
#pragma omp parallel for schedule(static) if (tokens >= kAlone)
  for (i64 token = 0; token < tokens; ++token) {
    if (slots[token] < 0) continue;
    const i64 block = slots[token] / kBlock, place = slots[token] % kBlock;
    for (i64 head = 0; head < kv_heads; ++head) {
      const i64 at = block * block_stride + head * kBlock * dim;
      const bf16 *from_k = k + token * k_stride + head * dim,
                 *from_v = v + token * v_stride + head * dim;
      bf16 *to_k = keys + at + place * 2, *to_v = values + at + (place / 2) * 2 * dim + place % 2;
      for (i64 d = 0; d < dim; d += 2) memcpy(to_k + d * kBlock, from_k + d, 4);
      for (i64 d = 0; d < dim; ++d) to_v[2 * d] = from_v[d];
    }
  }
}

struct Attention {
  const bf16 *q, *keys, *values;
  bf16* out;
  const int32_t* table;  // of the sequence
  i64 block_stride, head_offset, dim;
  float scale;
};

struct Row {
  i64 query, out;  // where it begins in q and out
  int num_keys;    // keys that it may see
};

// Scores of one span of at most kSpanBlocks blocks. BLOCKS of them go together, so that there are
// enough independent sums to hide a product's latency. A block that the span lacks is the last one
// again, and masked by the caller: nobody sees its keys.
template <int ROWS, int BLOCKS>
static void score_span(const Attention& a, const Row* rows, i64 first_block, int blocks,
                       float (*score)[kSpan]) {
  for (int j = 0; j < blocks; j += BLOCKS) {
    const char *key[BLOCKS], *value[BLOCKS];
    UNROLL for (int b = 0; b < BLOCKS; ++b) {
      const i64 at = a.table[first_block + std::min(j + b, blocks - 1)] * a.block_stride;
      key[b] = (const char*)(a.keys + at + a.head_offset);
      value[b] = (const char*)(a.values + at + a.head_offset);
    }
    F s[ROWS][BLOCKS];
    UNROLL for (int r = 0; r < ROWS; ++r)
      UNROLL for (int b = 0; b < BLOCKS; ++b) s[r][b] = splat(0.0f);
    for (i64 d = 0; d < a.dim; d += 2) {
      W pairs[BLOCKS];
      UNROLL for (int b = 0; b < BLOCKS; ++b) {
        // The values of these keys are wanted next, and a block's page is nobody's neighbour: the
        // hardware does not guess them.
        _mm_prefetch(value[b] + d * kBlock * sizeof(bf16), _MM_HINT_T0);
        pairs[b] = load_w(key[b] + d * kBlock * sizeof(bf16));
      }
      UNROLL for (int r = 0; r < ROWS; ++r) {
        const W query = splat_w(a.q + rows[r].query + d);
        UNROLL for (int b = 0; b < BLOCKS; ++b) s[r][b] = dot2(s[r][b], pairs[b], query);
      }
    }
    UNROLL for (int r = 0; r < ROWS; ++r)
      UNROLL for (int b = 0; b < BLOCKS; ++b)
        store(score[r] + (j + b) * kBlock, mul(s[r][b], splat(a.scale)));
  }
}

// CHUNK: vectors of the head that stay in registers during one pass over the values.
template <int ROWS, int BLOCKS, int CHUNK>
static void attend(const Attention& a, const Row* rows, int last) {
  alignas(64) float acc[ROWS][kMaxHeadDim];
  alignas(64) float score[ROWS][kSpan];
  alignas(64) bf16 weight[ROWS][kSpan];
  float top[ROWS], total[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    top[r] = -INFINITY, total[r] = 0;
    for (i64 d = 0; d < a.dim; d += 16) store(acc[r] + d, splat(0.0f));
  }
  for (int begin = 0; begin < last; begin += kSpan) {
    const int blocks = (std::min(kSpan, last - begin) + kBlock - 1) / kBlock;
    const i64 first_block = begin / kBlock;
    score_span<ROWS, BLOCKS>(a, rows, first_block, blocks, score);
    const char* next[kSpanBlocks];  // the keys of the next span, fetched while values are summed
    int num_next = std::max(0, std::min(kSpan, last - begin - kSpan) + kBlock - 1) / kBlock;
    for (int j = 0; j < num_next; ++j)
      next[j] = (const char*)(a.keys + a.table[first_block + kSpanBlocks + j] * a.block_stride +
                              a.head_offset);
    for (int r = 0; r < ROWS; ++r) {
      F s[kSpanBlocks], most = splat(top[r]);
      for (int j = 0; j < blocks; ++j) {
        const int seen = rows[r].num_keys - begin - j * kBlock;
        s[j] = first(seen, load(score[r] + j * kBlock), -INFINITY);
        most = larger(most, s[j]);
      }
      const float now = largest(most);
      // Nothing to see yet is no reason for a NaN: -inf - -inf is one.
      const float base = now == -INFINITY ? 0.0f : now;
      F added = splat(0.0f);
      for (int j = 0; j < blocks; ++j) {
        const int seen = rows[r].num_keys - begin - j * kBlock;
        const F p = first(seen, exponential(add(s[j], splat(-base))), 0.0f);
        added = add(added, p);
        store(weight[r] + j * kBlock, p);
      }
      const float fix = std::exp(top[r] - base);
      total[r] = total[r] * fix + sum(added);
      top[r] = now;
      if (fix != 1.0f)
        for (i64 d = 0; d < a.dim; d += 16)
          store(acc[r] + d, mul(load(acc[r] + d), splat(fix)));
    }
    const int keys = std::min(kSpan, last - begin);
    for (i64 d = 0; d < a.dim; d += 16 * CHUNK) {
      F o[ROWS][CHUNK];
      UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int c = 0; c < CHUNK; ++c) o[r][c] = load(acc[r] + d + 16 * c);
      for (int i = 0; i < keys; i += 2) {
        const int j = i / kBlock;
        const bf16* value = a.values + a.table[first_block + j] * a.block_stride + a.head_offset +
                            (i % kBlock) * a.dim + 2 * d;
        if (j < num_next)
          UNROLL for (int c = 0; c < CHUNK; ++c)
            _mm_prefetch(next[j] + ((i % kBlock) * a.dim + 2 * d + 32 * c) * sizeof(bf16),
                         _MM_HINT_T0);
        // The last pair may be half another sequence's: 0 * NaN is NaN, so it is masked.
        const uint32_t mask = i + 1 < keys ? 0xffffffff : 0x0000ffff;
        W v[CHUNK];
        UNROLL for (int c = 0; c < CHUNK; ++c) v[c] = both(load_w(value + 32 * c), mask);
        UNROLL for (int r = 0; r < ROWS; ++r) {
          const W p = splat_w(weight[r] + i);
          UNROLL for (int c = 0; c < CHUNK; ++c) o[r][c] = dot2(o[r][c], v[c], p);
        }
      }
      UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int c = 0; c < CHUNK; ++c) store(acc[r] + d + 16 * c, o[r][c]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (i64 d = 0; d < a.dim; d += 16)
      store(a.out + rows[r].out + d, mul(load(acc[r] + d), splat(1.0f / total[r])));
}

template <int ROWS> static void attend_by_dim(const Attention& a, const Row* rows, int last) {
  constexpr int kBlocks = ROWS <= 2 ? 4 : 2, kChunk = ROWS <= 4 ? 4 : 2;
  if (a.dim % (16 * kChunk) == 0) return attend<ROWS, kBlocks, kChunk>(a, rows, last);
  attend<ROWS, kBlocks, 1>(a, rows, last);
}

// Causal attention of ragged queries. q, out: [tokens, heads, dim] with q_stride and contiguous;
// cu_q [sequences + 1], seq_lens [sequences], table [sequences, table_stride]; work [num_work, 2]:
// sequence and the first of the (token, head of the group) rows that one call of `attend` takes.
API void paged_attention(const bf16* q, i64 q_stride, const bf16* keys, const bf16* values,
                         i64 block_stride, bf16* out, const int32_t* cu_q,
                         const int32_t* seq_lens, const int32_t* table, i64 table_stride,
                         const int32_t* work, i64 num_work, i64 heads, i64 kv_heads, i64 dim,
                         float scale) {
  const i64 group = heads / kv_heads;
  // The heads of a block are neighbours in memory: one thread reads them, where that is even enough.
  const i64 together = num_work >= 4 * omp_get_max_threads() ? kv_heads : 1;
#pragma omp parallel for schedule(dynamic, together)
  for (i64 item = 0; item < num_work * kv_heads; ++item) {
    const i64 head = item % kv_heads, sequence = work[item / kv_heads * 2];
    const i64 start = work[item / kv_heads * 2 + 1];
    const i64 queries = cu_q[sequence + 1] - cu_q[sequence];
    const int count = (int)std::min<i64>(kRows, queries * group - start);
    const Attention a{q, keys, values, out, table + sequence * table_stride, block_stride,
                      head * kBlock * dim, dim, scale};
    Row rows[kRows];
    for (int r = 0; r < kRows; ++r) {
      // Rows that are not there are the last one again, so that there are fewer kinds of calls.
      const i64 at_row = start + std::min(r, count - 1);
      const i64 token = at_row / group, h = head * group + at_row % group;
      const i64 at = cu_q[sequence] + token;
      rows[r] = {at * q_stride + h * dim, (at * heads + h) * dim,
                 (int)(seq_lens[sequence] - queries + token + 1)};
    }
    const int last = rows[count - 1].num_keys;  // rows are in order of their tokens
    switch (count) {
      case 1: attend_by_dim<1>(a, rows, last); break;
      case 2: attend_by_dim<2>(a, rows, last); break;
      case 3: attend_by_dim<3>(a, rows, last); break;
      case 4: attend_by_dim<4>(a, rows, last); break;
      default: attend_by_dim<kRows>(a, rows, last);
    }
  }
}

// The AMX instructions that amx.h uses, in plain code, as Intel's manual describes them: for machines
// without them. What the manual forbids (a tile that is not configured, too many rows) aborts.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

struct Tile {
  int rows = 0, row_bytes = 0;
  unsigned char data[16][64] = {};
};

inline thread_local Tile tiles[8];

inline void require(bool holds) {
  if (!holds) abort();
}

inline void load_config(const void* from) {
  const auto* config = (const uint8_t*)from;
  require(config[0] == 1 && config[1] == 0);
  for (int i = 2; i < 16; ++i) require(config[i] == 0);
  for (int tile = 0; tile < 16; ++tile) {
    uint16_t row_bytes;
    memcpy(&row_bytes, config + 16 + 2 * tile, 2);
    const int rows = config[48 + tile];
    require(rows <= 16 && row_bytes <= 64 && (rows == 0) == (row_bytes == 0));
    require(tile < 8 || rows == 0);
    if (tile < 8) tiles[tile] = Tile{rows, row_bytes};
  }
}

inline void release() {
  for (Tile& tile : tiles) tile = Tile{};
}

inline void zero(int t) {
  require(tiles[t].rows > 0);
  memset(tiles[t].data, 0, sizeof tiles[t].data);
}

inline void load(int t, const void* from, int64_t stride) {
  require(tiles[t].rows > 0);
  memset(tiles[t].data, 0, sizeof tiles[t].data);
  for (int r = 0; r < tiles[t].rows; ++r)
    memcpy(tiles[t].data[r], (const char*)from + r * stride, tiles[t].row_bytes);
}

inline void store(int t, void* to, int64_t stride) {
  require(tiles[t].rows > 0);
  for (int r = 0; r < tiles[t].rows; ++r)
    memcpy((char*)to + r * stride, tiles[t].data[r], tiles[t].row_bytes);
}

template <class Sum, class Step> inline void dot(int c, int a, int b, const Step& step) {
  require(c != a && c != b && a != b && tiles[a].rows > 0 && tiles[b].rows > 0);
  require(tiles[c].rows == tiles[a].rows && tiles[c].row_bytes == tiles[b].row_bytes);
  require(tiles[a].row_bytes / 4 == tiles[b].rows);
  for (int m = 0; m < tiles[c].rows; ++m)
    for (int n = 0; n < tiles[c].row_bytes / 4; ++n) {
      Sum sum;
      memcpy(&sum, tiles[c].data[m] + 4 * n, 4);
      for (int k = 0; k < tiles[b].rows; ++k)
        step(sum, tiles[a].data[m] + 4 * k, tiles[b].data[k] + 4 * n);
      memcpy(tiles[c].data[m] + 4 * n, &sum, 4);
    }
}

inline float widen(const unsigned char* p) {
  const uint32_t bits = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline void dot_bf16(int c, int a, int b) {
  dot<float>(c, a, b, [](float& sum, const unsigned char* x, const unsigned char* w) {
    sum += widen(x) * widen(w);
    sum += widen(x + 2) * widen(w + 2);
  });
}

inline void dot_u8_s8(int c, int a, int b) {
  dot<int32_t>(c, a, b, [](int32_t& sum, const unsigned char* x, const unsigned char* w) {
    for (int i = 0; i < 4; ++i) sum += (int)x[i] * (int)(signed char)w[i];
  });
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbf16ps emulated::dot_bf16
#define _tile_dpbusd emulated::dot_u8_s8

// Products in AMX tiles: a panel's 32 columns by up to 32 rows of x, sums of 32 bits.
//
// A panel needs no second layout: 16 of its rows, 128 bytes apart, are two B tiles, for pairs of bf16
// as for quadruples of int8. Rows of x lie one after the other, as they come.
//
// AMX_INTRINSICS names a header that stands in for the instructions where a test has none.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#if defined(AMX_INTRINSICS)
#include AMX_INTRINSICS
#define HAS_AMX 1
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <immintrin.h>
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

constexpr int kAmxRows = 32;  // two A tiles; with two B tiles and their four sums all eight are used

#if HAS_AMX

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Asks the system for the tiles' state, once for all threads of the process; whether it was granted.
static bool amx_permitted() {
#if defined(AMX_INTRINSICS)
  return true;
#else
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#endif
}

// The compiler does not know what the tiles read: everything is in memory from here on.
static inline void is_in_memory(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

// sums [rows][32] = rows of x, row_bytes apart and long, times the panel `w`. 1 <= rows <= kAmxRows;
// row_bytes % 4 == 0. The configuration is loaded at every call: other libraries use the tiles too.
template <bool INT8>
static void amx_tile(const char* w, const char* x, int rows, int64_t row_bytes, int32_t* sums) {
  const int upper = rows < 16 ? rows : 16, lower = rows - upper;
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    // 0 to 3: sums of upper and lower rows, left and right columns; 4, 5: rows of x; 6, 7: columns.
    config.rows[tile] = tile >= 6 ? 16 : tile < 2 || tile == 4 ? upper : lower;
    config.row_bytes[tile] = config.rows[tile] ? 64 : 0;
  }
  is_in_memory(&config);
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  if (lower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const auto step = [&](const char* left, const char* from, int64_t stride) {
    _tile_loadd(6, left, 128);
    _tile_loadd(7, left + 64, 128);
    _tile_loadd(4, from, stride);
    if (lower) _tile_loadd(5, from + 16 * stride, stride);
    if constexpr (INT8) {
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 4, 7);
      if (lower) {
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
      }
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (lower) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  };
  const int64_t whole = row_bytes / 64, rest = row_bytes % 64;
  for (int64_t i = 0; i < whole; ++i) step(w + i * 2048, x + i * 64, row_bytes);
  if (rest) {  // behind it lies another panel, and another row: zeros instead
    alignas(64) char w_rest[2048] = {}, x_rest[kAmxRows * 64] = {};
    memcpy(w_rest, w + whole * 2048, rest * 32);
    for (int r = 0; r < rows; ++r) memcpy(x_rest + r * 64, x + r * row_bytes + whole * 64, rest);
    is_in_memory(w_rest);
    is_in_memory(x_rest);
    step(w_rest, x_rest, 64);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (lower) {
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
  }
  _tile_release();
}

#else

static bool amx_permitted() { return false; }

#endif

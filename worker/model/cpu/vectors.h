// Vectors of 16 floats, and of 16 small dot products, in AVX2, AVX-512 or NEON.
//
// Which instructions may be used is said by the compiler's flags (see compiler.py). bf16 is the
// upper half of a float32; products of pairs and quadruples add to 32-bit lanes.

#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = uint16_t;
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// Brings a line of 64 bytes into the second cache. `p` may lie outside of any memory.
INLINE void fetch(const char* p) { __builtin_prefetch(p, 0, 2); }

#if !defined(__aarch64__)
// Four rows of four items of 4 bytes, `stride` bytes apart, become the rows of `to`.
INLINE void turn_four(const void* from, int64_t stride, void* to, int64_t to_stride) {
  const auto row = [=](int i) {
    return _mm_loadu_si128((const __m128i*)((const char*)from + i * stride));
  };
  const auto put_row = [=](int i, __m128i x) {
    _mm_storeu_si128((__m128i*)((char*)to + i * to_stride), x);
  };
  const __m128i a = _mm_unpacklo_epi32(row(0), row(1)), b = _mm_unpackhi_epi32(row(0), row(1));
  const __m128i c = _mm_unpacklo_epi32(row(2), row(3)), d = _mm_unpackhi_epi32(row(2), row(3));
  put_row(0, _mm_unpacklo_epi64(a, c)), put_row(1, _mm_unpackhi_epi64(a, c));
  put_row(2, _mm_unpacklo_epi64(b, d)), put_row(3, _mm_unpackhi_epi64(b, d));
}
#endif

#if defined(__aarch64__)
#include "neon.h"

#elif defined(__AVX512F__)

struct F { __m512 v; };    // 16 floats
struct I { __m512i v; };   // 16 int32
struct W { __m512i v; };   // 64 bytes: 16 pairs of bf16, or 16 quadruples of int8
constexpr int kTileRows = 12;  // 24 accumulators, 2 weights: 26 of the 32 registers
constexpr int kCombined = 8;   // vectors of a Hadamard transform in registers

INLINE F splat(float x) { return {_mm512_set1_ps(x)}; }
INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
INLINE F load(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE F larger(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE F smaller(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE F absolute(F a) { return {_mm512_abs_ps(a.v)}; }
INLINE F nearest(F a) { return {_mm512_roundscale_ps(a.v, 0)}; }
INLINE F times_two_to(F a, F n) { return {_mm512_scalef_ps(a.v, n.v)}; }
INLINE float sum(F a) { return _mm512_reduce_add_ps(a.v); }
INLINE float largest(F a) { return _mm512_reduce_max_ps(a.v); }
INLINE F first(int n, F a, float other) {  // the first n lanes of a, `other` in the rest
  const __mmask16 mask = n >= 16 ? 0xffff : (__mmask16)((1 << std::max(n, 0)) - 1);
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), mask, a.v)};
}
INLINE F after(int n, F a, float other) {  // `other` in the first n lanes, the rest of a
  const __mmask16 mask = n >= 16 ? 0xffff : (__mmask16)((1 << std::max(n, 0)) - 1);
  return {_mm512_mask_mov_ps(a.v, mask, _mm512_set1_ps(other))};
}
template <int STRIDE> INLINE F swapped(F a) {  // lane i is lane i ^ STRIDE of a
  if constexpr (STRIDE == 1) return {_mm512_permute_ps(a.v, 0xb1)};
  if constexpr (STRIDE == 2) return {_mm512_permute_ps(a.v, 0x4e)};
  if constexpr (STRIDE == 4) return {_mm512_shuffle_f32x4(a.v, a.v, 0xb1)};
  if constexpr (STRIDE == 8) return {_mm512_shuffle_f32x4(a.v, a.v, 0x4e)};
}
INLINE void round_to_u8(F a, uint8_t* p) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
INLINE W load_w(const void* p) { return {_mm512_loadu_si512(p)}; }
INLINE W splat_w(const void* p) {  // the same 4 bytes, 16 times
  int x;
  memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
INLINE void store_w(void* p, W x) { _mm512_storeu_si512(p, x.v); }
INLINE W both(W a, uint32_t mask) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(mask))}; }
INLINE W high_nibbles(W a) { return both({_mm512_srli_epi16(a.v, 4)}, 0x0f0f0f0f); }
INLINE W two_of_each(const uint8_t* p) {  // 16 numbers, each in the two halves of its 32 bits
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return {_mm512_or_si512(wide, _mm512_slli_epi32(wide, 16))};
}
INLINE W mul_16(W a, W b) { return {_mm512_mullo_epi16(a.v, b.v)}; }
INLINE W less_8(W a, W b) { return {_mm512_sub_epi8(a.v, b.v)}; }
INLINE F low(W a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
INLINE F high(W a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(0xffff0000)))};
}
INLINE I zero_i() { return {_mm512_setzero_si512()}; }
INLINE I load_i(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE F minus(I a, const int32_t* b) {  // as floats
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(a.v, _mm512_loadu_si512(b)))};
}
#if defined(__AVX512VNNI__)
INLINE I dot4(I sum, W x, W w) {
  // Not the intrinsic: GCC 12 copies every accumulator around it, and spills for want of registers.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(x.v), "v"(w.v));
  return sum;
}
#else
INLINE I dot4(I sum, W x, W w) {  // 16-bit products: the 8-bit instruction saturates
  const __m512i byte = _mm512_set1_epi32(0x00ff00ff);
  const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(w.v, 8), 8);
  const __m512i odd = _mm512_srai_epi16(w.v, 8);
  const __m512i a = _mm512_madd_epi16(even, _mm512_and_si512(x.v, byte));
  const __m512i b = _mm512_madd_epi16(odd, _mm512_srli_epi16(x.v, 8));
  return {_mm512_add_epi32(sum.v, _mm512_add_epi32(a, b))};
}
#endif

#elif defined(__AVX2__) && defined(__FMA__)

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct W { __m256i a, b; };
constexpr int kTileRows = 2;  // 8 accumulators of the 16 registers
constexpr int kCombined = 4;  // vectors of a Hadamard transform in registers

INLINE F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE __m256 widen(const bf16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE F load(const bf16* p) { return {widen(p), widen(p + 8)}; }
INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F larger(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F smaller(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F absolute(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE F nearest(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
INLINE __m256 power(__m256 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
INLINE F times_two_to(F x, F n) { return mul(x, {power(n.a), power(n.b)}); }
INLINE float sum(F x) {
  float lanes[8], total = 0;
  _mm256_storeu_ps(lanes, _mm256_add_ps(x.a, x.b));
  for (float lane : lanes) total += lane;
  return total;
}
INLINE float largest(F x) {
  float lanes[8];
  _mm256_storeu_ps(lanes, _mm256_max_ps(x.a, x.b));
  return *std::max_element(lanes, lanes + 8);
}
INLINE F first(int n, F x, float other) {
  const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 rest = _mm256_set1_ps(other);
  const __m256i a = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), place);
  const __m256i b = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), place);
  return {_mm256_blendv_ps(rest, x.a, _mm256_castsi256_ps(a)),
          _mm256_blendv_ps(rest, x.b, _mm256_castsi256_ps(b))};
}
INLINE F after(int n, F x, float other) {
  const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 begin = _mm256_set1_ps(other);
  const __m256i a = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), place);
  const __m256i b = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), place);
  return {_mm256_blendv_ps(x.a, begin, _mm256_castsi256_ps(a)),
          _mm256_blendv_ps(x.b, begin, _mm256_castsi256_ps(b))};
}
template <int STRIDE> INLINE F swapped(F x) {  // lane i is lane i ^ STRIDE of x
  if constexpr (STRIDE == 8) return {x.b, x.a};
  const auto half = [](__m256 y) {
    if constexpr (STRIDE == 1) return _mm256_permute_ps(y, 0xb1);
    if constexpr (STRIDE == 2) return _mm256_permute_ps(y, 0x4e);
    return _mm256_permute2f128_ps(y, y, 1);
  };
  return {half(x.a), half(x.b)};
}
INLINE void round_to_u8(F x, uint8_t* p) {
  int32_t lanes[16];
  _mm256_storeu_si256((__m256i*)lanes, _mm256_cvtps_epi32(x.a));
  _mm256_storeu_si256((__m256i*)(lanes + 8), _mm256_cvtps_epi32(x.b));
  for (int i = 0; i < 16; ++i) p[i] = (uint8_t)lanes[i];
}
INLINE W load_w(const void* p) {
  const auto* half = (const __m256i*)p;
  return {_mm256_loadu_si256(half), _mm256_loadu_si256(half + 1)};
}
INLINE W splat_w(const void* p) {
  int x;
  memcpy(&x, p, 4);
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
INLINE void store_w(void* p, W x) {
  _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
INLINE W both(W x, uint32_t mask) {
  const __m256i m = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
INLINE W high_nibbles(W x) {
  return both({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}, 0x0f0f0f0f);
}
INLINE W two_of_each(const uint8_t* p) {
  const auto half = [](const uint8_t* from) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
    return _mm256_or_si256(wide, _mm256_slli_epi32(wide, 16));
  };
  return {half(p), half(p + 8)};
}
INLINE W mul_16(W x, W y) {
  return {_mm256_mullo_epi16(x.a, y.a), _mm256_mullo_epi16(x.b, y.b)};
}
INLINE W less_8(W x, W y) { return {_mm256_sub_epi8(x.a, y.a), _mm256_sub_epi8(x.b, y.b)}; }
// Products of nibbles stay below 16 bits for a whole group, which saves most of `dot4`.
#define HAS_PAIRS 1
INLINE __m256i splat_signed(const void* p) {  // 4 bytes around 128, as around 0
  int x;
  memcpy(&x, p, 4);
  return _mm256_xor_si256(_mm256_set1_epi32(x), _mm256_set1_epi8((char)128));
}
INLINE __m256i add_pairs(__m256i sums, __m256i nibbles, __m256i x) {  // 16 products of 15 * 127 fit
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(nibbles, x));
}
INLINE __m256i add_group(__m256i sum, __m256i pairs, __m256i factors, __m256i inputs, __m256i offsets) {
  const __m256i less = _mm256_madd_epi16(inputs, offsets);
  return _mm256_add_epi32(sum, _mm256_sub_epi32(_mm256_madd_epi16(pairs, factors), less));
}
INLINE F low(W x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
INLINE F high(W x) {
  const W top = both(x, 0xffff0000);
  return {_mm256_castsi256_ps(top.a), _mm256_castsi256_ps(top.b)};
}
INLINE I zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE F minus(I x, const int32_t* b) {
  const auto* half = (const __m256i*)b;
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(x.a, _mm256_loadu_si256(half))),
          _mm256_cvtepi32_ps(_mm256_sub_epi32(x.b, _mm256_loadu_si256(half + 1)))};
}
INLINE __m256i dot4(__m256i sum, __m256i x, __m256i w) {  // 16-bit products: 8-bit ones saturate
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8);
  const __m256i a = _mm256_madd_epi16(even, _mm256_and_si256(x, _mm256_set1_epi32(0x00ff00ff)));
  const __m256i b = _mm256_madd_epi16(_mm256_srai_epi16(w, 8), _mm256_srli_epi16(x, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
}
INLINE I dot4(I sum, W x, W w) { return {dot4(sum.a, x.a, w.a), dot4(sum.b, x.b, w.b)}; }

#else
#error "needs AVX2 with FMA, AVX-512, or NEON on 64 bits"
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// In neon.h.
#elif defined(__AVX512BF16__)
INLINE F dot2(F sum, W w, W x) {
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)w.v, (__m512bh)x.v)};
}
INLINE void store(bf16* p, F x) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x.v));
}
#else
INLINE F dot2(F sum, W w, W x) { return fma(high(w), high(x), fma(low(w), low(x), sum)); }
INLINE void store(bf16* p, F x) {
  uint32_t bits[16];
  store((float*)bits, x);
  for (int i = 0; i < 16; ++i) {
    // Rounding may carry a NaN's mantissa over into the sign: it stays a NaN by decree.
    const bool is_nan = (bits[i] & 0x7fffffff) > 0x7f800000;
    p[i] = is_nan ? 0x7fc0 : (bf16)((bits[i] + 0x7fff + ((bits[i] >> 16) & 1)) >> 16);
  }
}
#endif

INLINE F exponential(F x) {  // relative error below 3e-6 for x <= 0; 0 below -87
  const F t = mul(larger(x, splat(-87.0f)), splat(1.44269504f));
  const F n = nearest(t);
  const F f = add(t, mul(n, splat(-1.0f)));
  F p = splat(1.8775767e-3f);
  for (float c : {8.9893397e-3f, 5.5826318e-2f, 2.4015361e-1f, 6.9315308e-1f, 9.9999994e-1f})
    p = fma(p, f, splat(c));
  return times_two_to(p, n);
}

INLINE F silu(F x) {  // x / (1 + exp(-x)); exp's argument is bounded so that it cannot overflow
  const F e = exponential(smaller(mul(x, splat(-1.0f)), splat(87.0f)));
  return div(x, add(e, splat(1.0f)));
}

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3)
INLINE F gelu_tanh(F x) {
  const F u = mul(x, fma(mul(x, x), splat(0.0356774081f), splat(0.797884561f)));
  const F e = exponential(smaller(mul(u, splat(-2.0f)), splat(87.0f)));
  return div(x, add(e, splat(1.0f)));
}

// 16 bytes of at most 127, each four times.
INLINE W four_of_each(const uint8_t* p) { return mul_16(two_of_each(p), splat_w("\1\1\1\1")); }

// 64 int8 weights out of nibbles, 0 to 15: times their columns' factors of at most 15, which
// `two_of_each` gave, less the offsets of `four_of_each`. No product of a nibble reaches the next byte.
INLINE W widened(W nibbles, W factors, W offsets) {
  return less_8(mul_16(nibbles, factors), offsets);
}

INLINE F less(F a, F b) { return fma(b, splat(-1.0f), a); }

// 16 numbers times the Hadamard matrix of 16.
INLINE F hadamard(F x) {
  alignas(64) static constexpr float kSigns[4][16] = {
      {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
      {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
      {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
      {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1}};
  x = fma(x, load(kSigns[0]), swapped<1>(x));
  x = fma(x, load(kSigns[1]), swapped<2>(x));
  x = fma(x, load(kSigns[2]), swapped<4>(x));
  return fma(x, load(kSigns[3]), swapped<8>(x));
}

// The steps of a Hadamard transform of x [p] that combine numbers `step`, 2 * step, ... apart, N vectors
// at once in registers: as many as are left, at most N. `read(i)` gives numbers [i, i + 16) of what is
// transformed. Returns the step that is next.
template <int N, class Read>
INLINE int64_t combine(float* x, int64_t p, int64_t step, const Read& read) {
  if constexpr (N > 1)
    if (step * N > p) return combine<N / 2>(x, p, step, read);
  for (int64_t begin = 0; begin < p; begin += N * step)
    for (int64_t i = begin; i < begin + step; i += 16) {
      F v[N];
      UNROLL for (int j = 0; j < N; ++j) v[j] = read(i + j * step);
      UNROLL for (int apart = 1; apart < N; apart *= 2)
        UNROLL for (int j = 0; j < N; ++j)
          if (!(j & apart)) {
            const F a = v[j], b = v[j + apart];
            v[j] = add(a, b), v[j + apart] = less(a, b);
          }
      UNROLL for (int j = 0; j < N; ++j) store(x + i + j * step, v[j]);
    }
  return step * N;
}

// x [p], p / 16 vectors that `read` gives, times the Hadamard matrix of p / 16, a power of two. `read` may
// read x.
template <class Read> static inline void mix_vectors(float* x, int64_t p, const Read& read) {
  int64_t step = combine<kCombined>(x, p, 16, read);
  while (step < p) step = combine<kCombined>(x, p, step, [&](int64_t i) { return load(x + i); });
}

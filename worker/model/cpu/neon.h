// The vectors of vectors.h in NEON, four registers each. bf16 and 8-bit dot products are the
// instructions' own where the flags allow them (+bf16, +i8mm).

#pragma once

struct F { float32x4_t v[4]; };  // 16 floats
struct I { int32x4_t v[4]; };    // 16 int32
struct W { uint8x16_t v[4]; };   // 64 bytes: 16 pairs of bf16, or 16 quadruples of int8
constexpr int kTileRows = 2;     // 16 accumulators, 8 registers of weights: 24 of the 32
constexpr int kCombined = 4;  // vectors of a Hadamard transform in registers

#define EACH(result, expression)                 \
  do {                                           \
    UNROLL for (int i = 0; i < 4; ++i) (result).v[i] = (expression); \
  } while (0)

// Four rows of four items of 4 bytes, `stride` bytes apart, become the rows of `to`.
INLINE void turn_four(const void* from, int64_t stride, void* to, int64_t to_stride) {
  uint32x4_t row[4];
  for (int i = 0; i < 4; ++i)
    row[i] = vreinterpretq_u32_u8(vld1q_u8((const uint8_t*)from + i * stride));
  const auto put_row = [=](int i, uint64x2_t x) {
    vst1q_u8((uint8_t*)to + i * to_stride, vreinterpretq_u8_u64(x));
  };
  const uint64x2_t a = vreinterpretq_u64_u32(vzip1q_u32(row[0], row[1]));
  const uint64x2_t b = vreinterpretq_u64_u32(vzip2q_u32(row[0], row[1]));
  const uint64x2_t c = vreinterpretq_u64_u32(vzip1q_u32(row[2], row[3]));
  const uint64x2_t d = vreinterpretq_u64_u32(vzip2q_u32(row[2], row[3]));
  put_row(0, vzip1q_u64(a, c)), put_row(1, vzip2q_u64(a, c));
  put_row(2, vzip1q_u64(b, d)), put_row(3, vzip2q_u64(b, d));
}

INLINE F splat(float x) {
  F r;
  EACH(r, vdupq_n_f32(x));
  return r;
}
INLINE F load(const float* p) {
  F r;
  EACH(r, vld1q_f32(p + 4 * i));
  return r;
}
INLINE void store(float* p, F x) {
  UNROLL for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
INLINE F load(const bf16* p) {
  F r;
  EACH(r, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
  return r;
}
INLINE F add(F a, F b) {
  EACH(a, vaddq_f32(a.v[i], b.v[i]));
  return a;
}
INLINE F mul(F a, F b) {
  EACH(a, vmulq_f32(a.v[i], b.v[i]));
  return a;
}
INLINE F fma(F a, F b, F c) {
  EACH(c, vfmaq_f32(c.v[i], a.v[i], b.v[i]));
  return c;
}
INLINE F div(F a, F b) {
  EACH(a, vdivq_f32(a.v[i], b.v[i]));
  return a;
}
// Of a NaN and a number the number: as on x86 where the number comes second.
INLINE F larger(F a, F b) {
  EACH(a, vmaxnmq_f32(a.v[i], b.v[i]));
  return a;
}
INLINE F smaller(F a, F b) {
  EACH(a, vminnmq_f32(a.v[i], b.v[i]));
  return a;
}
INLINE F absolute(F a) {
  EACH(a, vabsq_f32(a.v[i]));
  return a;
}
INLINE F nearest(F a) {
  EACH(a, vrndnq_f32(a.v[i]));
  return a;
}
INLINE F times_two_to(F a, F n) {
  EACH(a, vmulq_f32(a.v[i], vreinterpretq_f32_s32(vshlq_n_s32(
                                vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23))));
  return a;
}
INLINE float sum(F a) {
  return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3])));
}
INLINE float largest(F a) {
  return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a.v[0], a.v[1]), vmaxnmq_f32(a.v[2], a.v[3])));
}
INLINE F first(int n, F a, float other) {  // the first n lanes of a, `other` in the rest
  const int32_t places[4] = {0, 1, 2, 3};
  const int32x4_t place = vld1q_s32(places);
  EACH(a, vbslq_f32(vcltq_s32(place, vdupq_n_s32(n - 4 * i)), a.v[i], vdupq_n_f32(other)));
  return a;
}
INLINE F after(int n, F a, float other) {  // `other` in the first n lanes, the rest of a
  const int32_t places[4] = {0, 1, 2, 3};
  const int32x4_t place = vld1q_s32(places);
  EACH(a, vbslq_f32(vcltq_s32(place, vdupq_n_s32(n - 4 * i)), vdupq_n_f32(other), a.v[i]));
  return a;
}
template <int STRIDE> INLINE F swapped(F a) {  // lane i is lane i ^ STRIDE of a
  F r;
  if constexpr (STRIDE == 1) EACH(r, vrev64q_f32(a.v[i]));
  else if constexpr (STRIDE == 2) EACH(r, vextq_f32(a.v[i], a.v[i], 2));
  else EACH(r, a.v[i ^ STRIDE / 4]);
  return r;
}
INLINE void round_to_u8(F a, uint8_t* p) {
  UNROLL for (int i = 0; i < 4; ++i) {
    int32_t lanes[4];
    vst1q_s32(lanes, vcvtnq_s32_f32(a.v[i]));
    for (int j = 0; j < 4; ++j) p[4 * i + j] = (uint8_t)lanes[j];
  }
}
INLINE W load_w(const void* p) {
  W r;
  EACH(r, vld1q_u8((const uint8_t*)p + 16 * i));
  return r;
}
INLINE W splat_w(const void* p) {  // the same 4 bytes, 16 times
  uint32_t x;
  memcpy(&x, p, 4);
  W r;
  EACH(r, vreinterpretq_u8_u32(vdupq_n_u32(x)));
  return r;
}
INLINE W both(W a, uint32_t mask) {
  EACH(a, vandq_u8(a.v[i], vreinterpretq_u8_u32(vdupq_n_u32(mask))));
  return a;
}
INLINE void store_w(void* p, W x) {
  UNROLL for (int i = 0; i < 4; ++i) vst1q_u8((uint8_t*)p + 16 * i, x.v[i]);
}
INLINE W high_nibbles(W a) {
  EACH(a, vshrq_n_u8(a.v[i], 4));
  return a;
}
INLINE W two_of_each(const uint8_t* p) {  // 16 numbers, each in the two halves of its 32 bits
  const uint8x16_t all = vld1q_u8(p);
  const uint16x8_t half[2] = {vmovl_u8(vget_low_u8(all)), vmovl_u8(vget_high_u8(all))};
  W r;
  EACH(r, vreinterpretq_u8_u16(i % 2 ? vzip2q_u16(half[i / 2], half[i / 2])
                                     : vzip1q_u16(half[i / 2], half[i / 2])));
  return r;
}
INLINE W mul_16(W a, W b) {
  EACH(a, vreinterpretq_u8_u16(vmulq_u16(vreinterpretq_u16_u8(a.v[i]), vreinterpretq_u16_u8(b.v[i]))));
  return a;
}
INLINE W less_8(W a, W b) {
  EACH(a, vsubq_u8(a.v[i], b.v[i]));
  return a;
}
INLINE F low(W a) {
  F r;
  EACH(r, vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(a.v[i]), 16)));
  return r;
}
INLINE F high(W a) {
  const W top = both(a, 0xffff0000);
  F r;
  EACH(r, vreinterpretq_f32_u8(top.v[i]));
  return r;
}
INLINE I zero_i() {
  I r;
  EACH(r, vdupq_n_s32(0));
  return r;
}
INLINE F minus(I a, const int32_t* b) {  // as floats
  F r;
  EACH(r, vcvtq_f32_s32(vsubq_s32(a.v[i], vld1q_s32(b + 4 * i))));
  return r;
}
INLINE I dot4(I sum, W x, W w) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  EACH(sum, vusdotq_s32(sum.v[i], x.v[i], vreinterpretq_s8_u8(w.v[i])));
#else
  UNROLL for (int i = 0; i < 4; ++i) {  // 255 * 128 still fits 16 bits
    const int8x16_t signs = vreinterpretq_s8_u8(w.v[i]);
    const int16x8_t a = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x.v[i]))),
                                  vmovl_s8(vget_low_s8(signs)));
    const int16x8_t b = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(x.v[i]))),
                                  vmovl_s8(vget_high_s8(signs)));
    sum.v[i] = vaddq_s32(sum.v[i], vpaddq_s32(vpaddlq_s16(a), vpaddlq_s16(b)));
  }
#endif
  return sum;
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
INLINE F dot2(F sum, W w, W x) {
  EACH(sum, vbfdotq_f32(sum.v[i], vreinterpretq_bf16_u8(w.v[i]), vreinterpretq_bf16_u8(x.v[i])));
  return sum;
}
INLINE void store(bf16* p, F x) {
  UNROLL for (int i = 0; i < 4; ++i)
    vst1_bf16((bfloat16_t*)(p + 4 * i), vcvt_bf16_f32(x.v[i]));
}
#endif

#undef EACH

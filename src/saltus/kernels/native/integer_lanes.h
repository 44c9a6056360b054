// Vectors for products of interleaved integers with 8-bit activations: VECTOR_OUTPUTS outputs at a time, four inputs each.
// Without them integer_tile.inc goes one by one. MAX_HEIGHT is the number of rows whose sums fit into the registers.
#pragma once
#include "integer_weights.h"

#if defined __AVX512VNNI__ && defined __AVX512BW__
#define VECTOR_OUTPUTS 16
#ifdef AMX_INT8
#define MAX_HEIGHT 8  // more rows are faster by the matrix unit, which takes as long for one row as for sixteen
#else
#define MAX_HEIGHT 12
#endif
typedef __m512 some_floats;
typedef __m512i some_integers;
#define VECTOR(operation) _mm512_##operation
#define WHOLE(operation) _mm512_##operation##_si512
CONSTANT some_floats load_halves(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
CONSTANT some_integers widen_bytes(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
CONSTANT some_integers widen_signed_bytes(const uint8_t *p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}
CONSTANT some_integers load_table(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }
CONSTANT some_integers dot(some_integers sum, some_integers w, some_integers x) { return _mm512_dpbusd_epi32(sum, w, x); }
#elif defined __AVX2__ && defined __FMA__ && defined __F16C__
#define VECTOR_OUTPUTS 8
typedef __m256 some_floats;
typedef __m256i some_integers;
#define VECTOR(operation) _mm256_##operation
#define WHOLE(operation) _mm256_##operation##_si256
CONSTANT some_floats load_halves(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
CONSTANT some_integers widen_bytes(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
CONSTANT some_integers widen_signed_bytes(const uint8_t *p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
CONSTANT some_integers load_table(const uint8_t *p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}
#ifdef __AVXVNNI__
#define MAX_HEIGHT 6
CONSTANT some_integers dot(some_integers sum, some_integers w, some_integers x) {
  return _mm256_dpbusd_avx_epi32(sum, w, x);
}
#else
#define MAX_HEIGHT 6
#define AT_ONCE 2  // vectors of outputs, at most, that share what is loaded of a row
#define PAIRS_OF_PRODUCTS  // sums of two products in 16 bits, of which a few are added there
#endif
#elif defined __SSE4_1__
#define VECTOR_OUTPUTS 4
typedef __m128 some_floats;
typedef __m128i some_integers;
#define VECTOR(operation) _mm_##operation
#define WHOLE(operation) _mm_##operation##_si128
CONSTANT some_floats load_halves(const uint8_t *p) {
  const __m128i bits = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)p)), size = _mm_and_si128(bits, _mm_set1_epi32(0x7fff));
  const __m128 number = _mm_mul_ps(_mm_castsi128_ps(_mm_slli_epi32(size, 13)), _mm_set1_ps(0x1p112f));
  const __m128i special = _mm_and_si128(_mm_cmpgt_epi32(size, _mm_set1_epi32(0x7bff)), _mm_set1_epi32(0x7f800000));
  const __m128i sign = _mm_slli_epi32(_mm_xor_si128(bits, size), 16);
  return _mm_or_ps(number, _mm_castsi128_ps(_mm_or_si128(special, sign)));
}
CONSTANT some_integers widen_bytes(const uint8_t *p) { return _mm_cvtepu8_epi32(_mm_loadu_si32(p)); }
CONSTANT some_integers widen_signed_bytes(const uint8_t *p) { return _mm_cvtepi8_epi32(_mm_loadu_si32(p)); }
CONSTANT some_integers load_table(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }
#define MAX_HEIGHT 4
#define AT_ONCE 2
#define PAIRS_OF_PRODUCTS  // as above
#elif defined __ARM_FEATURE_DOTPROD && defined __FLT16_MAX__
#include <arm_neon.h>
#define VECTOR_OUTPUTS 4
#define MAX_HEIGHT 8
#define SIGNED_WEIGHTS  // products of signed integers only; those of fewer than 8 bits are signed as well
typedef float32x4_t some_floats;
typedef int32x4_t some_integers;
CONSTANT some_floats load_halves(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
CONSTANT some_integers widen_bytes(const uint8_t *p) { return (some_integers){p[0], p[1], p[2], p[3]}; }
CONSTANT some_integers widen_signed_bytes(const uint8_t *p) {
  return (some_integers){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]};
}
CONSTANT some_integers load_table(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
CONSTANT some_integers dot(some_integers sum, some_integers w, some_integers x) {
  return vdotq_s32(sum, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
}
#else
#define MAX_HEIGHT 8
#endif

#ifndef AT_ONCE
#define AT_ONCE 1
#endif

#ifdef VECTOR  // of x86
CONSTANT some_integers load_bytes(const uint8_t *p) { return WHOLE(loadu)((const void *)p); }
CONSTANT some_integers all_bytes(int x) { return VECTOR(set1_epi8)(x); }
CONSTANT some_integers all_integers(int32_t x) { return VECTOR(set1_epi32)(x); }
CONSTANT some_integers add_integers(some_integers a, some_integers b) { return VECTOR(add_epi32)(a, b); }
CONSTANT some_integers bits_of_both(some_integers a, some_integers b) { return WHOLE(and)(a, b); }
CONSTANT some_integers bits_of_either(some_integers a, some_integers b) { return WHOLE(or)(a, b); }
CONSTANT some_integers less(some_integers bytes, int x) { return x ? VECTOR(sub_epi8)(bytes, all_bytes(x)) : bytes; }
// What a table of 16 bytes has at each of these indices.
CONSTANT some_integers looked_up(some_integers table, some_integers indices) { return VECTOR(shuffle_epi8)(table, indices); }
// By n bits to the left, or −n to the right, across the bytes of a word of 16 bits.
CONSTANT some_integers shifted(some_integers a, const int n) {
  return n < 0 ? VECTOR(srli_epi16)(a, -n) : n ? VECTOR(slli_epi16)(a, n) : a;
}
CONSTANT some_floats all_floats(float x) { return VECTOR(set1_ps)(x); }
CONSTANT some_floats to_floats(some_integers a) { return VECTOR(cvtepi32_ps)(a); }
CONSTANT some_floats multiply(some_floats a, some_floats b) { return VECTOR(mul_ps)(a, b); }
CONSTANT some_floats subtract(some_floats a, some_floats b) { return VECTOR(sub_ps)(a, b); }
#ifdef __FMA__
CONSTANT some_floats fuse(some_floats a, some_floats b, some_floats c) { return VECTOR(fmadd_ps)(a, b, c); }
#else
CONSTANT some_floats fuse(some_floats a, some_floats b, some_floats c) { return fused_four(a, b, c); }
#endif
CONSTANT some_floats load_floats(const float *p) { return VECTOR(loadu_ps)(p); }
CONSTANT void store_floats(float *p, some_floats a) { VECTOR(storeu_ps)(p, a); }
CONSTANT some_integers times_power(some_integers a, const int power) { return VECTOR(slli_epi32)(a, __builtin_ctz(power)); }
#elif defined VECTOR_OUTPUTS  // of Arm
CONSTANT some_integers load_bytes(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
CONSTANT some_integers all_bytes(int x) { return vreinterpretq_s32_s8(vdupq_n_s8(x)); }
CONSTANT some_integers all_integers(int32_t x) { return vdupq_n_s32(x); }
CONSTANT some_integers add_integers(some_integers a, some_integers b) { return vaddq_s32(a, b); }
CONSTANT some_integers bits_of_both(some_integers a, some_integers b) { return vandq_s32(a, b); }
CONSTANT some_integers bits_of_either(some_integers a, some_integers b) { return vorrq_s32(a, b); }
CONSTANT some_integers less(some_integers bytes, int x) {
  return x ? vreinterpretq_s32_u8(vsubq_u8(vreinterpretq_u8_s32(bytes), vdupq_n_u8(x))) : bytes;
}
CONSTANT some_integers looked_up(some_integers table, some_integers indices) {
  return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(table), vreinterpretq_u8_s32(indices)));
}
CONSTANT some_integers shifted(some_integers a, const int n) {
  return vreinterpretq_s32_u16(vshlq_u16(vreinterpretq_u16_s32(a), vdupq_n_s16(n)));
}
CONSTANT some_floats all_floats(float x) { return vdupq_n_f32(x); }
CONSTANT some_floats to_floats(some_integers a) { return vcvtq_f32_s32(a); }
CONSTANT some_floats multiply(some_floats a, some_floats b) { return vmulq_f32(a, b); }
CONSTANT some_floats subtract(some_floats a, some_floats b) { return vsubq_f32(a, b); }
CONSTANT some_floats fuse(some_floats a, some_floats b, some_floats c) { return vfmaq_f32(c, a, b); }
CONSTANT some_floats load_floats(const float *p) { return vld1q_f32(p); }
CONSTANT void store_floats(float *p, some_floats a) { vst1q_f32(p, a); }
CONSTANT some_integers times_power(some_integers a, const int power) { return vmulq_n_s32(a, power); }
#endif

#ifdef VECTOR_OUTPUTS
// 2^(exponent − 128), as a product of two numbers that are not subnormal; exponents are 0 to 255.
typedef int32_t numbers_of_32_bits __attribute__((vector_size(4 * VECTOR_OUTPUTS)));
CONSTANT some_floats half_powers(some_integers exponents) {
  const numbers_of_32_bits x = (numbers_of_32_bits)exponents;
  return multiply((some_floats)((x / 2 + 63) << 23), (some_floats)(((x + 1) / 2 + 63) << 23));
}
// 8-bit floats as `widen_e4m3` has them.
CONSTANT some_floats e4m3_floats(some_integers bits) {
  const numbers_of_32_bits x = (numbers_of_32_bits)bits, is_least = x < 8;
  const some_floats moved = (some_floats)((x << 20) + (120 << 23) + (is_least & 1 << 23));
  return subtract(moved, (some_floats)(is_least & 121 << 23));
}
#endif

// Vectors of floats, as wide as the processor's registers, and the number formats that weights come in.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE__
#include <immintrin.h>
#endif

#if defined AMX_PERMITTED && defined __AMX_BF16__ && !defined EMULATE_TILES
#define AMX  // the processor's matrix unit is used
#endif
#if ((defined AMX_PERMITTED && defined __AMX_INT8__) || defined EMULATE_TILES) && defined __AVX512VNNI__
#define AMX_INT8  // the same for integers of 8 bits
#endif

#ifdef __AVX512F__
#define LANES 16
#define FITS 24  // sums of a register tile, beside what they are made of
#else
#define LANES 8  // compilers split wider vectors badly: four times slower
#define FITS 8
#endif
// A compiler barrier: the vector is in a register here.
#ifdef __AVX512F__
#define IN_REGISTER(vector) __asm__("" : "+v"(vector))
#elif defined __SSE__
#define IN_REGISTER(vector) __asm__("" : "+x"(vector))
#endif
// A vector that several products share is loaded once: left to itself, gcc loads it again for each of them.
#ifdef __AVX__
#define KEEP(vector) IN_REGISTER(vector)
#else
#define KEEP(vector) (void)(vector)
#endif
typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef float four __attribute__((vector_size(4 * sizeof(float))));
typedef int32_t ifour __attribute__((vector_size(4 * sizeof(int32_t))));
typedef uint16_t hfour __attribute__((vector_size(4 * sizeof(uint16_t))));
typedef int32_t ilanes __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint16_t hlanes __attribute__((vector_size(LANES * sizeof(uint16_t))));

// Take subnormal numbers for zeros, and make none, from here on; returns what restores the thread's former way.
static inline unsigned flush_subnormals(void) {
#ifdef __SSE__
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  return before;
#elif defined __aarch64__
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(before | 1 << 24));
  return before;
#else
  return 0;
#endif
}
static inline void restore_subnormals(unsigned before) {
#ifdef __SSE__
  _mm_setcsr(before);
#elif defined __aarch64__
  __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)before));
#endif
}

// Ask for weights that are needed in a while: for the second-level cache, which can have more lines on their way than the
// first-level one (Zen 3 and 4: 24, or 10 GB/s a core).
#define FETCH(address) __builtin_prefetch(address, 0, 2)
// The same for packed weights. With the matrix unit, the first-level cache's few requests are left to its tiles. Elsewhere
// expansion takes longer than memory, and reads from the first-level cache.
#ifdef AMX
#define FETCH_PACKED(address) FETCH(address)
#else
#define FETCH_PACKED(address) __builtin_prefetch(address)
#endif

#if defined __SSE2__ && !defined __FMA__
// a · b + c of two numbers, rounded once, by a processor that cannot: the product is exact in float64, and so is the error of
// the sum there. Of the two numbers around it the sum becomes the odd one, so that rounding to float32 afterwards rounds as if
// it had been exact (Boldo & Melquiond 2008).
static inline __m128 fused_two(__m128 a, __m128 b, __m128 c) {
  const __m128d product = _mm_mul_pd(_mm_cvtps_pd(a), _mm_cvtps_pd(b)), added = _mm_cvtps_pd(c), none = _mm_setzero_pd();
  const __m128d sum = _mm_add_pd(product, added), part = _mm_sub_pd(sum, product);
  const __m128d error = _mm_add_pd(_mm_sub_pd(product, _mm_sub_pd(sum, part)), _mm_sub_pd(added, part));
  const __m128i one = _mm_set1_epi64x(1), is_even = _mm_sub_epi64(_mm_and_si128(_mm_castpd_si128(sum), one), one);
  const __m128i is_rounded = _mm_castpd_si128(_mm_or_pd(_mm_cmplt_pd(error, none), _mm_cmpgt_pd(error, none)));
  const __m128i signs = _mm_srai_epi32(_mm_castpd_si128(_mm_xor_pd(error, sum)), 31);
  const __m128i step = _mm_or_si128(_mm_shuffle_epi32(signs, 0xf5), one);  // away from 0 by an error of the same sign: 1, else −1
  const __m128i odd = _mm_add_epi64(_mm_castpd_si128(sum), _mm_and_si128(step, _mm_and_si128(is_even, is_rounded)));
  return _mm_cvtpd_ps(_mm_castsi128_pd(odd));
}
static inline __m128 fused_four(__m128 a, __m128 b, __m128 c) {
  return _mm_movelh_ps(fused_two(a, b, c), fused_two(_mm_movehl_ps(a, a), _mm_movehl_ps(b, b), _mm_movehl_ps(c, c)));
}
#endif

// a · b + c, rounded once: the same on every processor.
static inline lanes fused(lanes a, lanes b, lanes c) {
#ifdef __AVX512F__
  return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined __FMA__
  return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined __SSE2__
  union { lanes all; __m128 parts[LANES / 4]; } x = {a}, y = {b}, z = {c};
  for (int i = 0; i < LANES / 4; i++) z.parts[i] = fused_four(x.parts[i], y.parts[i], z.parts[i]);
  return z.all;
#else
  for (int l = 0; l < LANES; l++) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
  return c;
#endif
}
static inline lanes all_lanes(float x) { return x - (lanes){}; }  // −0 stays −0
// The same in long sums, rounded twice where the processor cannot fuse.
static inline lanes multiply_add(lanes a, lanes b, lanes c) {
#if defined __FMA__ || defined __ARM_FEATURE_FMA || defined __AVX512F__
  return fused(a, b, c);
#else
  return a * b + c;
#endif
}

#define PAD(n, to) (((n) + (to) - 1) / (to) * (to))

static inline lanes load_f32(const float *p) {
  lanes v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline float from_f32(float x) { return x; }
static inline float to_f32(float x) { return x; }
static inline void store_f32(float *p, lanes v) { memcpy(p, &v, sizeof v); }
static inline void to_four_f32(four x, float *y) { memcpy(y, &x, sizeof x); }

static inline lanes load_bf16(const uint16_t *p) {
#ifdef __AVX512F__
  return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);  // gcc: two halves
#elif defined __AVX2__
  return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
  hlanes h;
  memcpy(&h, p, sizeof h);
  return (lanes)(__builtin_convertvector(h, ilanes) << 16);
#endif
}
static inline float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
// Rounded to the nearest, the even one of two; subnormal numbers become zeros, as the processors' own conversion has it.
static inline uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  if (!(bits & 0x7f800000)) return bits >> 16 & 0x8000;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#ifndef __AVX512BF16__
// The same in the upper halves of lanes whose lower halves are zero.
static inline ilanes bf16_bits(lanes v) {
  ilanes bits = (ilanes)v;
  const ilanes normal = (bits & 0x7f800000) != 0, odd = v != v;
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & (int32_t)0xffff0000 & (normal | (int32_t)0x80000000);
  return (bits & ~odd) | (0x7fc00000 & odd);
}
#endif
static inline void store_bf16(uint16_t *p, lanes v) {
#ifdef __AVX512BF16__
  __m256bh small = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &small, sizeof small);
#elif defined __AVX2__ && LANES == 8
  const __m256i bits = _mm256_srli_epi32((__m256i)bf16_bits(v), 16);
  const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0xd8);
  _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(pairs));  // the compiler would go one by one
#else
  hlanes small = __builtin_convertvector(bf16_bits(v) >> 16, hlanes);
  memcpy(p, &small, sizeof small);
#endif
}
static inline void store_two_bf16(uint16_t *p, lanes first, lanes second) {
#if defined __AVX2__ && LANES == 8
  const __m256i low = _mm256_srli_epi32((__m256i)bf16_bits(first), 16), high = _mm256_srli_epi32((__m256i)bf16_bits(second), 16);
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
#else
  store_bf16(p, first);
  store_bf16(p + LANES, second);
#endif
}
static inline void to_four_bf16(four x, uint16_t *y) {
#if defined __AVX512BF16__ && defined __AVX512VL__
  __m128bh four = _mm_cvtneps_pbh((__m128)x);
  memcpy(y, &four, 4 * sizeof *y);
#else
  const ifour bits = (ifour)x, odd = x != x, normal = (bits & 0x7f800000) != 0;
  const ifour rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 & 0xffff & (normal | 0x8000);
  const ifour small = (rounded & ~odd) | (0x7fc0 & odd);
  const hfour four = __builtin_convertvector(small, hfour);
  memcpy(y, &four, sizeof four);
#endif
}

#ifdef __FLT16_MAX__
typedef _Float16 flanes __attribute__((vector_size(LANES * sizeof(_Float16))));
static inline lanes load_f16(const _Float16 *p) {
#ifdef __AVX512F__
  return (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));  // the compiler would go one by one
#elif defined __F16C__
  return (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
  flanes h;
  memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, lanes);
#endif
}
static inline float from_f16(_Float16 x) { return (float)x; }
static inline _Float16 to_f16(float x) { return (_Float16)x; }
static inline void store_f16(_Float16 *p, lanes v) {
#ifdef __AVX512F__
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined __F16C__
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  flanes h = __builtin_convertvector(v, flanes);
  memcpy(p, &h, sizeof h);
#endif
}
static inline void to_four_f16(four x, _Float16 *y) {
  for (int i = 0; i < 4; i++) y[i] = (_Float16)x[i];
}
#endif

// Of each format: lanes rounded to it, and the last lanes of a row, zeros after its end.
#define ROUNDED(format, T)                                                     \
  static inline lanes rounded_##format(lanes x) {                              \
    T small[LANES];                                                            \
    store_##format(small, x);                                                  \
    return load_##format(small);                                               \
  }
ROUNDED(f32, float)
#ifdef __AVX512BF16__
ROUNDED(bf16, uint16_t)
#else
static inline lanes rounded_bf16(lanes x) { return (lanes)bf16_bits(x); }
#endif
#ifdef __FLT16_MAX__
ROUNDED(f16, _Float16)
#endif
#undef ROUNDED
#define OF_FORMAT(format, T)                                                   \
  static inline lanes load_some_##format(const T *p, int64_t have) {           \
    if (have >= LANES) return load_##format(p);                                \
    T some[LANES] = {};                                                        \
    memcpy(some, p, have * sizeof(T));                                         \
    return load_##format(some);                                                \
  }                                                                            \
  static inline void store_some_##format(T *p, lanes x, int64_t have) {        \
    T some[LANES];                                                             \
    if (have >= LANES) {                                                       \
      store_##format(p, x);                                                    \
      return;                                                                  \
    }                                                                          \
    store_##format(some, x);                                                   \
    memcpy(p, some, have * sizeof(T));                                         \
  }
OF_FORMAT(f32, float)
OF_FORMAT(bf16, uint16_t)
#ifdef __FLT16_MAX__
OF_FORMAT(f16, _Float16)
#endif
#undef OF_FORMAT

// The sums of four vectors of lanes, always by the same tree.
static inline four sum_four(lanes a, lanes b, lanes c, lanes d) {
#ifdef __AVX512F__
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  __m512 s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(s), (__m256)_mm512_extractf64x4_pd((__m512d)s, 1));
  return (four)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined __AVX__
  __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps((__m256)a, (__m256)b), _mm256_unpackhi_ps((__m256)a, (__m256)b));
  __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps((__m256)c, (__m256)d), _mm256_unpackhi_ps((__m256)c, (__m256)d));
  __m256 s = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return (four)_mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
#else
  float x[4][LANES];
  memcpy(x[0], &a, sizeof a), memcpy(x[1], &b, sizeof b), memcpy(x[2], &c, sizeof c), memcpy(x[3], &d, sizeof d);
  for (int v = 0; v < 4; v++)
    for (int half = LANES / 2; half; half /= 2)
      for (int i = 0; i < half; i++) x[v][i] += x[v][i + half];
  return (four){x[0][0], x[1][0], x[2][0], x[3][0]};
#endif
}

// Turn a square of vectors around its diagonal, by exchanges at distance 1, 2, 4 and, of 16, 8.
#define EXCHANGE(half)                                                                                               \
  for (int i = 0; i < LANES; i++)                                                                                    \
    if (!(i & half)) {                                                                                               \
      const lanes a = x[i], b = x[i + half];                                                                         \
      ilanes low, high;                                                                                              \
      for (int l = 0; l < LANES; l++) low[l] = l & half ? LANES + l - half : l, high[l] = l & half ? LANES + l : l + half; \
      x[i] = __builtin_shuffle(a, b, low), x[i + half] = __builtin_shuffle(a, b, high);                              \
    }
static inline void turn(lanes *x) {
#ifdef __clang__
  float y[LANES][LANES];
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) y[j][i] = x[i][j];
  memcpy(x, y, sizeof y);
#else
  EXCHANGE(1) EXCHANGE(2) EXCHANGE(4)
#if LANES == 16
  EXCHANGE(8)
#endif
#endif
}

// A bit for each lane that is greater than the limit, or at least the limit.
#ifdef __AVX512F__
#define COMPARED(x, limit, predicate, operator) _mm512_cmp_ps_mask((__m512)(x), _mm512_set1_ps(limit), predicate)
#elif defined __AVX__
#define COMPARED(x, limit, predicate, operator) \
  _mm256_movemask_ps(_mm256_cmp_ps((__m256)(x), _mm256_set1_ps(limit), predicate))
#else
#define COMPARED(x, limit, predicate, operator) bits_of_lanes((x) operator (lanes){} + (limit))
static inline uint32_t bits_of_lanes(ilanes x) {
  uint32_t bits = 0;
  for (int l = 0; l < LANES; l++) bits |= (uint32_t)(x[l] & 1) << l;
  return bits;
}
#endif
static inline uint32_t lanes_above(lanes x, float limit) { return COMPARED(x, limit, _CMP_GT_OQ, >); }
static inline uint32_t lanes_from(lanes x, float limit) { return COMPARED(x, limit, _CMP_GE_OQ, >=); }

// `count` floats, a multiple of LANES.
static inline int all_finite(const float *x, int64_t count) {
  lanes zeros = {};
  for (int64_t i = 0; i < count; i += LANES) zeros = zeros + load_f32(x + i) * 0.0f;
  float sum = 0;
  for (int l = 0; l < LANES; l++) sum += zeros[l];
  return sum == 0;
}

// The sum of 16 numbers in one order.
static inline float sum_of_16(const float *s) {
  float quarter[4];
  for (int q = 0; q < 4; q++) quarter[q] = (s[4 * q] + s[4 * q + 2]) + (s[4 * q + 1] + s[4 * q + 3]);
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}
static inline lanes load_some_floats(const float *p, int64_t have) {
  float some[LANES] = {};
  if (have >= LANES) return load_f32(p);
  memcpy(some, p, have * sizeof(float));
  return load_f32(some);
}

// exp, lane by lane the same operations: 2^n · polynomial (Cephes); exact zero up to −87, e^88 above 88.
static inline lanes exp_lanes(lanes x) {
  const lanes low = (lanes){} - 87.0f, high = (lanes){} + 88.0f;
  ilanes above = x > high;
  x = (lanes)(((ilanes)high & above) | ((ilanes)x & ~above));
  ilanes dead = x <= low;  // not so what is not a number, which stays so
  x = (lanes)(((ilanes)low & dead) | ((ilanes)x & ~dead));
  lanes n = fused(x, all_lanes(1.44269504088896f), all_lanes(12582912.0f));  // rounds to nearest: 1.5 · 2^23
  n = n - 12582912.0f;
  lanes r = fused(n, all_lanes(-0.693359375f), x);
  r = fused(n, all_lanes(2.12194440e-4f), r);
  lanes p = all_lanes(1.9875691500e-4f);
  p = fused(p, r, all_lanes(1.3981999507e-3f));
  p = fused(p, r, all_lanes(8.3334519073e-3f));
  p = fused(p, r, all_lanes(4.1665795894e-2f));
  p = fused(p, r, all_lanes(1.6666665459e-1f));
  p = fused(p, r, all_lanes(5.0000001201e-1f));
  p = fused(p * r, r, r) + 1.0f;
  ilanes bits = (__builtin_convertvector(n, ilanes) + 127) << 23;
  return (lanes)((ilanes)(p * (lanes)bits) & ~dead);
}

// tanh, lane by lane the same operations: near 0 a polynomial (Cephes), else by exp.
static inline lanes tanh_lanes(lanes x) {
  const lanes size = (lanes)((ilanes)x & 0x7fffffff), square = x * x;
  lanes p = all_lanes(-5.70498872745e-3f);
  p = fused(p, square, all_lanes(2.06390887954e-2f));
  p = fused(p, square, all_lanes(-5.37397155531e-2f));
  p = fused(p, square, all_lanes(1.33314422036e-1f));
  p = fused(p, square, all_lanes(-3.33332819422e-1f));
  const lanes near = fused(p * square, x, x), far = 1.0f - 2.0f / (exp_lanes(2.0f * size) + 1.0f);
  const ilanes is_near = size < 0.625f, sign = (ilanes)x & ~0x7fffffff;
  return (lanes)(((ilanes)near & is_near) | (((ilanes)far | sign) & ~is_near));
}

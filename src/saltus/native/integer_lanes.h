// Vectors for products of interleaved integers with 8-bit activations: VECTOR_OUTPUTS outputs at a time, four inputs each.
// Without them, integer_tile.inc goes one by one.
#pragma once
#include "integer_weights.h"

#if defined __AVX512VNNI__ && defined __AVX512BW__
#define VECTOR_OUTPUTS 16
typedef __m512 some_floats;
typedef __m512i some_integers;
#define VECTOR(operation) _mm512_##operation
#define WHOLE(operation) _mm512_##operation##_si512
CONSTANT some_floats load_halves(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
CONSTANT some_integers widen_bytes(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
CONSTANT some_integers widen_signed_bytes(const uint8_t *p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}
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
#ifdef __AVXVNNI__
CONSTANT some_integers dot(some_integers sum, some_integers w, some_integers x) {
  return _mm256_dpbusd_avx_epi32(sum, w, x);
}
#else
#define PAIRS_OF_PRODUCTS  // sums of two products in 16 bits, of which a few are added there
#endif
#endif

// Expand rows of packed weights, see packed_weights.h.
#include "integer_weights.h"

typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef uint8_t bytes32 __attribute__((vector_size(32)));

static inline bytes16 load_16(const uint8_t *p) {
  bytes16 v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline bytes32 load_32(const uint8_t *p) {
  bytes32 v;
  memcpy(&v, p, sizeof v);
  return v;
}

#define CHUNK 64  // blocks whose scales are widened together

static inline void widen_halves(const uint8_t *p, int64_t count, float *out) {
  int64_t i = 0;
#if defined __AVX512BW__ && defined __AVX512VL__
  for (; i < count; i += 16) {
    const int64_t left = count - i;
    const __mmask16 some = left < 16 ? (1u << left) - 1 : 0xffff;
    _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, p + 2 * i)));
  }
#elif defined __F16C__
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 2 * i))));
#endif
  for (; i < count; i++) out[i] = load_half(p + 2 * i);
}
static inline void widen_exponents(const uint8_t *p, int64_t count, float *out) {
  for (int64_t i = 0; i < count; i++) out[i] = half_power(p[i]);
}

#if defined __AVX2__ && LANES == 8
// 16 numbers in bfloat16.
static inline __m256i small_16(lanes a, lanes b) {
  const ilanes x = (ilanes)a, y = (ilanes)b;
  const __m256i low = (__m256i)((x + 0x7fff + ((x >> 16) & 1)) >> 16 & 0xffff);
  const __m256i high = (__m256i)((y + 0x7fff + ((y >> 16) & 1)) >> 16 & 0xffff);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}
#endif

// 16 weights: scale · q + offset, of signed bytes q.
static inline void expand_16(bytes16 q, lanes scale, lanes offset, uint16_t *out) {
#ifdef __AVX512F__
  store_bf16(out, multiply_add((lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)q)), scale, offset));
#elif defined __AVX2__
  const __m256i first = _mm256_cvtepi8_epi32((__m128i)q), second = _mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)q, 8));
  _mm256_storeu_si256((__m256i *)out, small_16(multiply_add((lanes)_mm256_cvtepi32_ps(first), scale, offset),
                                               multiply_add((lanes)_mm256_cvtepi32_ps(second), scale, offset)));
#else
  for (int i = 0; i < 16; i += LANES) {
    signed_lanes some;
    memcpy(&some, (const char *)&q + i, sizeof some);
    store_bf16(out + i, __builtin_convertvector(__builtin_convertvector(some, ilanes), lanes) * scale + offset);
  }
#endif
}
static inline void expand_32(bytes32 q, lanes scale, lanes offset, uint16_t *out) {
  bytes16 half[2];
  memcpy(half, &q, sizeof q);
#ifdef __AVX512BF16__
  const lanes low = multiply_add((lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)half[0])), scale, offset);
  const lanes high = multiply_add((lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)half[1])), scale, offset);
  _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
  expand_16(half[0], scale, offset, out);
  expand_16(half[1], scale, offset, out + 16);
#endif
}

// The low halves of 16 bytes, then the high ones.
static inline bytes32 nibbles(const uint8_t *p) {
  const bytes16 all = load_16(p);
#ifdef __AVX2__
  const __m256i low = _mm256_castsi128_si256((__m128i)(all & 15));
  return (bytes32)_mm256_inserti128_si256(low, (__m128i)(all >> 4), 1);
#else
  const bytes16 halves[2] = {all & 15, all >> 4};
  return load_32((const uint8_t *)halves);
#endif
}

// The whole numbers that 4 bits stand for.
static const float from_0[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const float from_minus_8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
static const float of_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const float of_mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Of the 16 possible weights so many as fit a vector: scale · number + offset. Subnormal ones, which only MXFP4 has, are
// zeros, as wherever numbers are rounded to bfloat16.
static inline lanes possible_weights(lanes scale, const float *numbers, lanes offset) {
  const lanes weights = multiply_add(load_f32(numbers), scale, offset);
#ifdef __AVX512BF16__  // rounding does so
  return weights;
#else
  const ilanes bits = (ilanes)weights, normal = (bits & 0x7f800000) != 0;
  return (lanes)(bits & (normal | INT32_MIN));
#endif
}
#ifdef __AVX512BW__

// 32 weights, looked up among the possible ones. Of an index 4 bits count.
static inline void look_up(__m512i index, lanes possible, uint16_t *out) {
#ifdef __AVX512BF16__
  const __m256i small = (__m256i)_mm512_cvtneps_pbh((__m512)possible);
#else
  const ilanes bits = (ilanes)possible;
  const __m256i small = _mm512_cvtepi32_epi16((__m512i)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16));
#endif
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(index, _mm512_broadcast_i64x4(small)));
}
#else
// 32 weights: scale · numbers[q] + offset, of 4-bit q.
static inline void expand_4_bits(bytes32 q, lanes scale, const float *numbers, lanes offset, uint16_t *out) {
  const lanes some = possible_weights(scale, numbers, offset), more = possible_weights(scale, numbers + 8, offset);
#ifdef __AVX2__
  const __m256i words = small_16(some, more);
  const __m256i low = _mm256_and_si256(words, _mm256_set1_epi16(255));
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, _mm256_srli_epi16(words, 8)), 0xd8);
  const __m256i lower = _mm256_shuffle_epi8(_mm256_permute2x128_si256(bytes, bytes, 0x00), (__m256i)q);
  const __m256i upper = _mm256_shuffle_epi8(_mm256_permute2x128_si256(bytes, bytes, 0x11), (__m256i)q);
  const __m256i even = _mm256_unpacklo_epi8(lower, upper), odd = _mm256_unpackhi_epi8(lower, upper);
  _mm256_storeu_si256((__m256i *)out, _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256((__m256i *)(out + 16), _mm256_permute2x128_si256(even, odd, 0x31));
#else
  uint16_t possible[16];
  store_bf16(possible, some);
  store_bf16(possible + 8, more);
  for (int i = 0; i < 32; i++) out[i] = possible[q[i]];
#endif
}
#endif

// 64 weights: scale · numbers[q] + offset. The first 32 are the low halves of 32 bytes, the others the high ones; each
// 32 have a scale and an offset.
static inline void expand_pair(const uint8_t *p, const lanes *scale, const float *numbers, const lanes *offset,
                               uint16_t *out) {
#ifdef __AVX512BW__
  const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
  const lanes low = possible_weights(scale[0], numbers, offset[0]);
  const lanes high = possible_weights(scale[1], numbers, offset[1]);
#ifdef __AVX512BF16__  // looked up among the 32 possible weights of both
  const __m512i small = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  const __m512i in_low = _mm512_and_si512(both, _mm512_set1_epi16(15));
  const __m512i in_high = _mm512_or_si512(_mm512_srli_epi16(both, 4), _mm512_set1_epi16(16));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(in_low, small));
  _mm512_storeu_si512(out + 32, _mm512_permutexvar_epi16(in_high, small));
#else
  look_up(both, low, out);
  look_up(_mm512_srli_epi16(both, 4), high, out + 32);
#endif
#else
  const bytes32 both = load_32(p);
  expand_4_bits(both & 15, scale[0], numbers, offset[0], out);
  expand_4_bits(both >> 4, scale[1], numbers, offset[1], out + 32);
#endif
}

// 32 weights: scale · numbers[q] + offset, of the low halves of 16 bytes and then of the high ones.
static inline void expand_nibbles(const uint8_t *p, lanes scale, const float *numbers, lanes offset, uint16_t *out) {
#ifdef __AVX512BW__
  const __m512i twice = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)));
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  look_up(_mm512_srlv_epi16(twice, shifts), possible_weights(scale, numbers, offset), out);
#else
  expand_4_bits(nibbles(p), scale, numbers, offset, out);
#endif
}

// 32 fifth bits, as 16 or 0 in each byte.
static inline bytes32 fifth_bits(const uint8_t *p) {
  const bytes32 bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128,
                       1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
#ifdef __AVX2__
  uint32_t bits;
  memcpy(&bits, p, sizeof bits);
  const bytes32 byte = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3};
  const bytes32 of = (bytes32)_mm256_shuffle_epi8(_mm256_set1_epi32(bits), (__m256i)byte);
#else
  uint8_t copies[32];
  for (int i = 0; i < 32; i++) copies[i] = p[i / 8];
  const bytes32 of = load_32(copies);
#endif
  return (bytes32)((of & bit) == bit) & 16;
}

static inline void scales_and_minimums(const uint8_t *block, float *scales, float *offsets) {
  uint8_t bytes[16];
  six_bit_scales(block, bytes);
  const float scale = load_half(block), minimum = load_half(block + 2);
  for (int i = 0; i < 8; i++) scales[i] = scale * bytes[i];
  for (int i = 0; i < 8; i++) offsets[i] = -(minimum * bytes[8 + i]);
}

// Each function expands one block; the names are those of the formats in GGUF. A block of 32 begins after its scale and
// minimum.
static inline void expand_q5_0(const uint8_t *b, lanes scale, lanes minimum, uint16_t *out) {
  expand_32((nibbles(b + 4) | fifth_bits(b)) - 16, scale, minimum, out);
}
static inline void expand_q5_1(const uint8_t *b, lanes scale, lanes minimum, uint16_t *out) {
  expand_32(nibbles(b + 4) | fifth_bits(b), scale, minimum, out);
}
static inline void expand_q8_0(const uint8_t *b, lanes scale, lanes minimum, uint16_t *out) {
  expand_32(load_32(b), scale, minimum, out);
}
static inline void expand_q4_k(const uint8_t *b, uint16_t *out) {
  float scales[8], offsets[8];
  scales_and_minimums(b, scales, offsets);
  for (int part = 0; part < 8; part += 2) {
    const lanes scale[] = {all_lanes(scales[part]), all_lanes(scales[part + 1])};
    const lanes offset[] = {all_lanes(offsets[part]), all_lanes(offsets[part + 1])};
    expand_pair(b + 16 + part * 16, scale, from_0, offset, out + part * 32);
  }
}
static inline void expand_q5_k(const uint8_t *b, uint16_t *out) {
  const bytes32 high = load_32(b + 16);
  float scales[8], offsets[8];
  scales_and_minimums(b, scales, offsets);
  for (int part = 0; part < 8; part++) {
    const bytes32 all = load_32(b + 48 + part / 2 * 32);
    const bytes32 q = (part % 2 ? all >> 4 : all & 15) | (high >> part & 1) << 4;
    expand_32(q, all_lanes(scales[part]), all_lanes(offsets[part]), out + part * 32);
  }
}
// 32 weights with a scale and an offset of 16 each.
static inline void expand_halves(bytes32 q, const float *scales, const float *offsets, uint16_t *out) {
  bytes16 half[2];
  memcpy(half, &q, sizeof q);
  for (int i = 0; i < 2; i++) expand_16(half[i], all_lanes(scales[i]), all_lanes(offsets[i]), out + i * 16);
}
static inline void expand_q6_k(const uint8_t *b, uint16_t *out) {
  const float scale = load_half(b + 208), offsets[2] = {-0.0f, -0.0f};
  float scales[16];
  for (int i = 0; i < 16; i++) scales[i] = scale * (int8_t)b[192 + i];
  for (int part = 0; part < 8; part++) {  // of 32 weights; 4 parts share 64 bytes of low bits and 32 of high ones
    const bytes32 low = load_32(b + part / 4 * 64 + part % 2 * 32), high = load_32(b + 128 + part / 4 * 32);
    const bytes32 q = (part % 4 / 2 ? low >> 4 : low & 15) | (high >> part % 4 * 2 & 3) << 4;
    expand_halves(q - 32, scales + part * 2, offsets, out + part * 32);
  }
}
static inline void expand_iq4_xs(const uint8_t *b, uint16_t *out) {
  const float scale = load_half(b);
  int8_t own[8];
  scales_of_iq4_xs(b, own);
  for (int part = 0; part < 8; part++)
    expand_nibbles(b + 8 + part * 16, all_lanes(scale * own[part]), of_iq4, all_lanes(-0.0f), out + part * 32);
}
static inline void expand_q2_k(const uint8_t *b, uint16_t *out) {
  const float scale = load_half(b + 80), minimum = load_half(b + 82);
  float scales[16], offsets[16];
  for (int i = 0; i < 16; i++) scales[i] = scale * (b[i] & 15);
  for (int i = 0; i < 16; i++) offsets[i] = -(minimum * (b[i] >> 4));
  for (int part = 0; part < 8; part++)  // of 32 weights; 4 parts share 32 bytes
    expand_halves(load_32(b + 16 + part / 4 * 32) >> part % 4 * 2 & 3, scales + part * 2, offsets + part * 2,
                  out + part * 32);
}
static inline void expand_q3_k(const uint8_t *b, uint16_t *out) {
  const float scale = load_half(b + 108), offsets[2] = {-0.0f, -0.0f};
  const bytes32 high = load_32(b);
  int8_t own[16];
  float scales[16];
  scales_of_q3_k(b, own);
  for (int i = 0; i < 16; i++) scales[i] = scale * own[i];
  for (int part = 0; part < 8; part++) {
    const bytes32 q = (load_32(b + 32 + part / 4 * 32) >> part % 4 * 2 & 3) | (high >> part & 1) << 2;
    expand_halves(q - 4, scales + part * 2, offsets, out + part * 32);
  }
}
// The numbers, not yet scaled, of 32 places in a table.
static inline bytes32 looked_up_32(const uint8_t *table, bytes32 places) {
#ifdef __AVX2__
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
  return (bytes32)_mm256_shuffle_epi8(both, (__m256i)places) ^ 128;
#else
  bytes32 found;
  for (int i = 0; i < 32; i++) found[i] = table[places[i]] ^ 128;
  return found;
#endif
}
static inline void expand_recoded(const int format, const uint8_t *b, uint16_t *out) {
  const float scale = (format == NVFP4 ? load_float(b) : load_half(b)) * unit_of(format), offsets[2] = {-0.0f, -0.0f};
  const int own = own_bytes(format);
  const uint8_t *of_part = b + whole_bytes(format), *places = of_part + 8 * own;
  for (int part = 0; part < 8; part++, of_part += own) {
    float scales[2];
    for (int h = 0; h < 2; h++) {
      const uint8_t here = of_part[h * (own - 1)];
      scales[h] = scale * (format == NVFP4 ? widen_e4m3(here) : (int8_t)here);
    }
    expand_halves(looked_up_32(table_of(format), nibbles(places + part * 16)), scales, offsets, out + part * 32);
  }
}
// `some` weights from `start` on, a multiple of 64 and of the block, of a row of `in`. What lies `ahead` bytes further is
// asked for meanwhile.
#define ROW_OF_32(format, WIDEN, width, has_minimums, size, EXPAND)                                               \
  static void expand_row_##format(const uint8_t *row, int64_t in, int64_t start, int64_t some, int64_t ahead,     \
                                  uint16_t *out) {                                                                \
    const int64_t blocks = in / 32, end = (start + some) / 32;                                                    \
    const uint8_t *p = row + (has_minimums ? 2 : 1) * width * blocks + start / 32 * size;                         \
    for (int64_t first = start / 32; first < end; first += CHUNK) {                                               \
      const int64_t count = end - first < CHUNK ? end - first : CHUNK;                                            \
      float scales[CHUNK], minimums[CHUNK];                                                                       \
      FETCH_PACKED(row + ahead + width * first);                                                                  \
      WIDEN(row + width * first, count, scales);                                                                  \
      if (has_minimums) WIDEN(row + width * (blocks + first), count, minimums);                                   \
      else for (int64_t i = 0; i < count; i++) minimums[i] = -0.0f;                                               \
      EXPAND                                                                                                      \
    }                                                                                                             \
  }
// Block by block, of `size` bytes.
#define EACH_BLOCK(expand, size)                                   \
  for (int64_t i = 0; i < count; i++, p += size, out += 32) {      \
    FETCH_PACKED(p + ahead);                                       \
    expand(p, all_lanes(scales[i]), all_lanes(minimums[i]), out);  \
  }
// Pairs of blocks of 4 bits, and what is left.
#define EACH_PAIR(numbers)                                                                 \
  int64_t i = 0;                                                                           \
  for (; i + 2 <= count; i += 2, p += 32, out += 64) {                                     \
    const lanes scale[] = {all_lanes(scales[i]), all_lanes(scales[i + 1])};                \
    const lanes minimum[] = {all_lanes(minimums[i]), all_lanes(minimums[i + 1])};          \
    FETCH_PACKED(p + ahead);                                                               \
    expand_pair(p, scale, numbers, minimum, out);                                          \
  }                                                                                        \
  if (i < count) expand_nibbles(p, all_lanes(scales[i]), numbers, all_lanes(minimums[i]), out);
#define ROW_OF_256(format, size) ROW_OF(256, format, size)
#define ROW_OF(weights, format, size)                                                                            \
  static void expand_row_##format(const uint8_t *row, int64_t in, int64_t start, int64_t some, int64_t ahead,    \
                                  uint16_t *out) {                                                               \
    for (row += start / weights * size; some > 0; some -= weights, row += size, out += weights) {                \
      for (int64_t at = 0; at < size; at += 64) FETCH_PACKED(row + ahead + at);                                  \
      expand_##format(row, out);                                                                                 \
    }                                                                                                            \
  }
ROW_OF_32(q4_0, widen_halves, 2, 0, 16, EACH_PAIR(from_minus_8))
ROW_OF_32(q4_1, widen_halves, 2, 1, 16, EACH_PAIR(from_0))
ROW_OF_32(q5_0, widen_halves, 2, 0, 20, EACH_BLOCK(expand_q5_0, 20))
ROW_OF_32(q5_1, widen_halves, 2, 1, 20, EACH_BLOCK(expand_q5_1, 20))
ROW_OF_32(q8_0, widen_halves, 2, 0, 32, EACH_BLOCK(expand_q8_0, 32))
ROW_OF_32(iq4_nl, widen_halves, 2, 0, 16, EACH_PAIR(of_iq4))
ROW_OF_32(mxfp4, widen_exponents, 1, 0, 16, EACH_PAIR(of_mxfp4))
ROW_OF_256(q2_k, 84)
ROW_OF_256(q3_k, 110)
ROW_OF_256(q4_k, 144)
ROW_OF_256(q5_k, 176)
ROW_OF_256(q6_k, 210)
ROW_OF_256(iq4_xs, 136)
#define ROW_OF_RECODED(name, format, size)                                                                      \
  static inline void expand_##name(const uint8_t *b, uint16_t *out) { expand_recoded(format, b, out); }         \
  ROW_OF_256(name, size)
#define RECODED 138  // bytes of a block with a scale of each 32 weights (recoding.c)
#define RECODED_IN_HALVES 146  // and of each 16
ROW_OF_RECODED(iq2_xxs, IQ2_XXS, RECODED)
ROW_OF_RECODED(iq2_xs, IQ2_XS, RECODED_IN_HALVES)
ROW_OF_RECODED(iq3_xxs, IQ3_XXS, RECODED)
ROW_OF_RECODED(iq3_s, IQ3_S, RECODED)
#define RECODED_NVFP4 148  // the same with a scale in float32
ROW_OF_RECODED(nvfp4, NVFP4, RECODED_NVFP4)

// 8-bit floats, whose bits are moved to where a float16 has them: so they are too small by 2^8, which their scale makes up for.
// Some are subnormal then, but in float16, where no processor takes these for zeros.
#define E4M3_SHIFT 0x1p8f
#if defined __F16C__ && defined __AVX2__
static inline __m256i moved_e4m3(const uint8_t *p) {  // 16 of them
  const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
  return _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16((short)0xbf80));
}
#endif
static inline void expand_e4m3(const uint8_t *b, uint16_t *out) {
  const lanes scale = all_lanes(load_float(b) * E4M3_SHIFT);
  b += sizeof(float);
#if defined __F16C__ && defined __AVX2__
  for (int i = 0; i < 128; i += 32) {
    const __m256i first = moved_e4m3(b + i), second = moved_e4m3(b + i + 16);
#ifdef __AVX512F__
    store_two_bf16(out + i, (lanes)_mm512_cvtph_ps(first) * scale, (lanes)_mm512_cvtph_ps(second) * scale);
#else
    const __m256i both[2] = {first, second};
    for (int h = 0; h < 2; h++) {
      const lanes low = (lanes)_mm256_cvtph_ps(_mm256_castsi256_si128(both[h])) * scale;
      const lanes high = (lanes)_mm256_cvtph_ps(_mm256_extracti128_si256(both[h], 1)) * scale;
      _mm256_storeu_si256((__m256i *)(out + i + 16 * h), small_16(low, high));
    }
#endif
  }
#else
  for (int i = 0; i < 128; i++) out[i] = to_bf16(widen_half((b[i] & 128) << 8 | (b[i] & 127) << 7) * scale[0]);
#endif
}
ROW_OF(128, e4m3, 132)
static void expand_row_f16(const uint8_t *row, int64_t in, int64_t start, int64_t some, int64_t ahead, uint16_t *out) {
  int64_t k = 0;
  row += 2 * start;
#ifdef __FLT16_MAX__
  for (; k + LANES <= some; k += LANES) {
    FETCH_PACKED(row + ahead + 2 * k);
    store_bf16(out + k, load_f16((const _Float16 *)(row + 2 * k)));
  }
#endif
  for (uint16_t bits; k < some; k++) {
    memcpy(&bits, row + 2 * k, sizeof bits);
    out[k] = to_bf16(widen_half(bits));
  }
}

const Format formats[] = {  // by GGUF's numbers
    [1] = {1, 2, expand_row_f16},       [2] = {32, 18, expand_row_q4_0},     [3] = {32, 20, expand_row_q4_1},
    [6] = {32, 22, expand_row_q5_0},    [7] = {32, 24, expand_row_q5_1},     [8] = {32, 34, expand_row_q8_0},
    [10] = {256, 84, expand_row_q2_k},  [11] = {256, 110, expand_row_q3_k},  [12] = {256, 144, expand_row_q4_k},
    [13] = {256, 176, expand_row_q5_k}, [14] = {256, 210, expand_row_q6_k},  [20] = {32, 18, expand_row_iq4_nl},
    [23] = {256, 136, expand_row_iq4_xs}, [39] = {32, 17, expand_row_mxfp4},
    [IQ3_XXS] = {256, RECODED, expand_row_iq3_xxs},          [IQ3_S] = {256, RECODED, expand_row_iq3_s},
    [IQ2_XXS] = {256, RECODED, expand_row_iq2_xxs},          [IQ1_S] = {256, RECODED, expand_row_iq2_xxs},
    [TQ1_0] = {256, RECODED, expand_row_iq2_xxs},            [TQ2_0] = {256, RECODED, expand_row_iq2_xxs},
    [IQ2_XS] = {256, RECODED_IN_HALVES, expand_row_iq2_xs},  [IQ2_S] = {256, RECODED_IN_HALVES, expand_row_iq2_xs},
    [IQ1_M] = {256, RECODED_IN_HALVES, expand_row_iq2_xs},   [NVFP4] = {256, RECODED_NVFP4, expand_row_nvfp4},
    [E4M3] = {128, 132, expand_row_e4m3},
};

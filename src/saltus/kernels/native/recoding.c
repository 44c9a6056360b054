// Blocks of 256 weights whose weights are no integers of their own: those of the IQ formats below 4 bits are looked up four or
// eight at a time in a codebook, and those of TQ1_0 are packed by five, of TQ2_0 by four. They are recoded when they are read: a float16 scale,
// then a scale of one byte for each 32 weights, or 16 where these have their own, then indices of 4 bits into the table of the
// format (`table_of`), of each 32 weights the first 16 in the low halves of 16 bytes. The numbers stay the same; memory takes
// 4.3 or 4.6 bits a weight. Blocks of NVFP4, which begin with a float32 and have 8-bit floats as scales, are made in Python.
#include "integer_weights.h"

// An index into a table: of IQ2 and IQ3 the entry of a codebook, and 8 more if the weight is negative; of IQ1 one of three, and 8
// more if an eighth is taken off.
#define NEGATIVE 8
#define FIRST_OF_IQ1 3

static inline uint32_t load_word(const uint8_t *p) {
  uint32_t word;
  memcpy(&word, p, sizeof word);
  return word;
}
static inline uint32_t load_short(const uint8_t *p) { return p[0] | p[1] << 8; }

// Eight signs, of which seven are stored: the number of negative ones is even.
static inline uint32_t eight_signs(uint32_t seven) { return seven | (uint32_t)__builtin_parity(seven) << 7; }
static inline void put_signed(const uint8_t *entry, uint32_t signs, int count, uint8_t *indices) {
  for (int i = 0; i < count; i++) indices[i] = entry[i] + (signs >> i & 1) * NEGATIVE;
}
static inline void put_shifted(const uint8_t *entry, int is_less, uint8_t *indices) {
  for (int i = 0; i < 8; i++) indices[i] = FIRST_OF_IQ1 + entry[i] + is_less * NEGATIVE;
}
static inline uint8_t odd_scale(uint32_t bits) { return 2 * bits + 1; }
static inline uint32_t nibble(const uint8_t *p, int i) { return p[i / 2] >> i % 2 * 4 & 15; }

// Each function finds the indices of a block's weights and the scales of each 16 or 32 of them, and returns the float16 scale.
// A codebook has `size` indices an entry.
static uint16_t recode_iq2_xxs(const uint8_t *b, const uint8_t *codebook, uint8_t *indices, uint8_t *scales) {
  for (int part = 0; part < 8; part++) {
    const uint8_t *entries = b + 2 + part * 8;
    const uint32_t rest = load_word(entries + 4);
    for (int i = 0; i < 4; i++)
      put_signed(codebook + entries[i] * 8, eight_signs(rest >> 7 * i & 127), 8, indices + part * 32 + i * 8);
    scales[part] = odd_scale(rest >> 28);
  }
  return load_short(b);
}
static uint16_t recode_iq2_xs(const uint8_t *b, const uint8_t *codebook, uint8_t *indices, uint8_t *scales) {
  for (int eight = 0; eight < 32; eight++) {
    const uint32_t both = load_short(b + 2 + eight * 2);
    put_signed(codebook + (both & 511) * 8, eight_signs(both >> 9), 8, indices + eight * 8);
  }
  for (int i = 0; i < 16; i++) scales[i] = odd_scale(nibble(b + 66, i));
  return load_short(b);
}
static uint16_t recode_iq2_s(const uint8_t *b, const uint8_t *codebook, uint8_t *indices, uint8_t *scales) {
  for (int eight = 0; eight < 32; eight++) {
    const uint32_t entry = b[2 + eight] | (b[66 + eight / 4] >> eight % 4 * 2 & 3) << 8;
    put_signed(codebook + entry * 8, b[34 + eight], 8, indices + eight * 8);
  }
  for (int i = 0; i < 16; i++) scales[i] = odd_scale(nibble(b + 74, i));
  return load_short(b);
}
static uint16_t recode_iq3_xxs(const uint8_t *b, const uint8_t *codebook, uint8_t *indices, uint8_t *scales) {
  for (int part = 0; part < 8; part++) {
    const uint32_t rest = load_word(b + 66 + part * 4);
    for (int i = 0; i < 8; i++) {
      const uint32_t signs = eight_signs(rest >> i / 2 * 7 & 127) >> i % 2 * 4;
      put_signed(codebook + b[2 + part * 8 + i] * 4, signs, 4, indices + part * 32 + i * 4);
    }
    scales[part] = odd_scale(rest >> 28);
  }
  return load_short(b);
}
static uint16_t recode_iq3_s(const uint8_t *b, const uint8_t *codebook, uint8_t *indices, uint8_t *scales) {
  for (int four = 0; four < 64; four++) {
    const uint32_t entry = b[2 + four] | (b[66 + four / 8] >> four % 8 & 1) << 8;
    put_signed(codebook + entry * 4, b[74 + four / 2] >> four % 2 * 4, 4, indices + four * 4);
  }
  for (int i = 0; i < 8; i++) scales[i] = odd_scale(nibble(b + 106, i));
  return load_short(b);
}
static uint16_t recode_iq1_s(const uint8_t *b, const uint8_t *codebook, uint8_t *indices, uint8_t *scales) {
  for (int part = 0; part < 8; part++) {
    const uint32_t rest = load_short(b + 34 + part * 2);
    for (int i = 0; i < 4; i++) {
      const uint32_t entry = b[2 + part * 4 + i] | (rest >> 3 * i & 7) << 8;
      put_shifted(codebook + entry * 8, rest >> 15, indices + part * 32 + i * 8);
    }
    scales[part] = odd_scale(rest >> 12 & 7);
  }
  return load_short(b);
}
static uint16_t recode_iq1_m(const uint8_t *b, const uint8_t *codebook, uint8_t *indices, uint8_t *scales) {
  uint16_t whole = 0;
  for (int eight = 0; eight < 32; eight++) {
    const uint32_t high = nibble(b + 32, eight), entry = b[eight] | (high & 7) << 8;
    put_shifted(codebook + entry * 8, high >> 3, indices + eight * 8);
  }
  for (int i = 0; i < 16; i++) scales[i] = odd_scale(load_short(b + 48 + i / 4 * 2) >> i % 4 * 3 & 7);
  for (int i = 0; i < 4; i++) whole |= load_short(b + 48 + i * 2) >> 12 << 4 * i;
  return whole;
}
// Of TQ1_0 a byte has five numbers of three values, as the first digits of a fraction in base 3.
static const uint8_t of_three[4] = {15, 6, 7, 14};  // the indices of −1, 0, 1 and 2
static void put_digits(const uint8_t *bytes, int count, int digits, uint8_t *indices) {
  uint8_t power = 1;
  for (int digit = 0; digit < digits; digit++, power *= 3)
    for (int i = 0; i < count; i++) *indices++ = of_three[(uint8_t)(bytes[i] * power) * 3 >> 8];
}
static uint16_t recode_tq1_0(const uint8_t *b, const uint8_t *codebook, uint8_t *indices, uint8_t *scales) {
  (void)codebook;
  put_digits(b, 32, 5, indices);
  put_digits(b + 32, 16, 5, indices + 160);
  put_digits(b + 48, 4, 4, indices + 240);
  memset(scales, 8, 8);  // times the unit of the table
  return load_short(b + 52);
}
static uint16_t recode_tq2_0(const uint8_t *b, const uint8_t *codebook, uint8_t *indices, uint8_t *scales) {
  (void)codebook;
  for (int i = 0; i < 256; i++) indices[i] = of_three[b[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3];
  memset(scales, 8, 8);
  return load_short(b + 64);
}

typedef struct {
  int64_t bytes;  // of a block in a file
  uint16_t (*recode)(const uint8_t *b, const uint8_t *codebook, uint8_t *indices, uint8_t *scales);
} Codes;
static const Codes codes[] = {
    [IQ2_XXS] = {66, recode_iq2_xxs}, [IQ2_XS] = {74, recode_iq2_xs}, [IQ3_XXS] = {98, recode_iq3_xxs},
    [IQ1_S] = {50, recode_iq1_s},     [IQ3_S] = {110, recode_iq3_s},  [IQ2_S] = {82, recode_iq2_s},
    [IQ1_M] = {56, recode_iq1_m},     [TQ1_0] = {54, recode_tq1_0},   [TQ2_0] = {66, recode_tq2_0},
};

typedef struct {
  const uint8_t *blocks;    // [count], as in a GGUF file
  const uint8_t *codebook;  // [entries, 4 or 8]: of IQ2 and IQ3 which number of the table, of IQ1 the number plus 1
  uint8_t *out;             // [count], recoded
  int64_t format, count;
} Recoding;

#define BLOCKS_AT_ONCE 1024  // that a thread recodes

static void recode_some(const void *of, int64_t piece) {
  const Recoding *a = of;
  const int64_t size = formats[a->format].bytes, own = 8 * own_bytes(a->format);
  const int64_t end = (piece + 1) * BLOCKS_AT_ONCE < a->count ? (piece + 1) * BLOCKS_AT_ONCE : a->count;
  for (int64_t number = piece * BLOCKS_AT_ONCE; number < end; number++) {
    uint8_t indices[256], *out = a->out + number * size, *low = out + 2 + own;
    const uint16_t whole = codes[a->format].recode(a->blocks + number * codes[a->format].bytes, a->codebook, indices, out + 2);
    memcpy(out, &whole, sizeof whole);
    for (int i = 0; i < 128; i++) low[i] = indices[i / 16 * 32 + i % 16] | indices[i / 16 * 32 + 16 + i % 16] << 4;
  }
}
int saltus_recode(const Recoding *a) {
  share(recode_some, a, (a->count + BLOCKS_AT_ONCE - 1) / BLOCKS_AT_ONCE);
  return 0;
}

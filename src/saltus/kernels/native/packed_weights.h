// Weights that stay in the blocks of a GGUF file: a block of 32 or 256 weights holds small integers, or indices into a table of
// 16, and the scales and minimums that turn them into numbers. A row of blocks of 32 is rearranged (`rearrange_blocks` in
// packed_blocks.py): first the scales of all its blocks, then the minimums if there are any, then the integers; those of 4
// bits pair by pair of blocks, the first block in the low halves of 32 bytes, the second in the high ones. Rows are expanded
// to the bfloat16 numbers that dequantising in float32 and rounding gives, so that products are those of the expanded
// weights, bit for bit. 8-bit floats (E4M3), which GGUF does not have, are in blocks of 128, each after its scale in float32.
// A scale times a small integer is exact in float32, so it does not matter whether the compiler fuses
// it with the addition; −0 added changes nothing.
#pragma once
#include "lanes.h"
#include "thread_pool.h"

typedef int8_t signed_lanes __attribute__((vector_size(LANES)));

static inline float widen_half(uint16_t bits) {
#ifdef __F16C__
  return _cvtsh_ss(bits);
#else
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? ldexpf(1024 + fraction, exponent - 25)
                                    : ldexpf(fraction, -24);
  return bits >> 15 ? -size : size;
#endif
}

static inline float load_half(const uint8_t *p) {
  uint16_t bits;
  memcpy(&bits, p, sizeof bits);
  return widen_half(bits);
}

// 2^(exponent − 128), half of what the exponent stands for in MXFP4, whose table holds the doubled numbers.
static inline float half_power(uint8_t exponent) {
  const uint32_t bits = exponent > 1 ? (exponent - 1u) << 23 : 0x200000u << exponent;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// The 8 scales, then the 8 minimums, of a block of 256 weights (Q4_K, Q5_K): 6 bits each, in 12 bytes.
static inline void six_bit_scales(const uint8_t *block, uint8_t *bytes) {
  uint32_t low[3];
  memcpy(low, block + 4, sizeof low);
  const uint32_t packed[4] = {
      low[0] & 0x3f3f3f3f, (low[2] & 0x0f0f0f0f) | (low[0] >> 6 & 0x03030303) << 4,
      low[1] & 0x3f3f3f3f, (low[2] >> 4 & 0x0f0f0f0f) | (low[1] >> 6 & 0x03030303) << 4,
  };
  memcpy(bytes, packed, sizeof packed);
}
// The signed scales of a block of 256 weights: 16 of Q3_K, 8 of IQ4_XS, of 6 bits each.
static inline void scales_of_q3_k(const uint8_t *block, int8_t *scales) {
  const uint8_t *p = block + 96;
  for (int i = 0; i < 16; i++) scales[i] = (p[i % 8] >> i / 8 * 4 & 15) + ((p[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32;
}
static inline void scales_of_iq4_xs(const uint8_t *block, int8_t *scales) {
  for (int i = 0; i < 8; i++)
    scales[i] = (block[4 + i / 2] >> i % 2 * 4 & 15) + ((block[2 + i / 4] >> i % 4 * 2 & 3) << 4) - 32;
}

#define E4M3 60  // the number of a format that is none of GGUF's
typedef struct {
  int64_t weights, bytes;  // of a block
  void (*expand_row)(const uint8_t *row, int64_t in, int64_t start, int64_t some, int64_t ahead, uint16_t *out);
} Format;
INTERNAL extern const Format formats[];  // by GGUF's numbers, and E4M3
static inline int64_t packed_row_bytes(int64_t format, int64_t in) {
  return in / formats[format].weights * formats[format].bytes;
}

typedef struct {
  const uint8_t *weight;  // [.., in], packed
  uint16_t *out;          // [count, in]
  const int64_t *rows;    // [count]: which rows; NULL: the first ones
  int64_t format, in, count;
} Expansion;
int saltus_expand(const Expansion *a);

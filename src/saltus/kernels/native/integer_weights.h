// Weights of GGUF blocks, interleaved for products with 8-bit activations: 16 outputs are a group, and four inputs of an
// output stand side by side, as one instruction takes them. A group holds the scales of all its blocks first, then, for
// every 32 inputs, the integers in planes of bits, the lowest first (`put_plane`). Integers are unsigned, or indices into a
// table of 16; `zero_of` says which of them stands for 0. Sums of integers are exact, so no instruction set, number of rows
// or threads changes a bit; docs/exactness.md defines the float operations.
#pragma once
#include "packed_weights.h"

#define INTERLEAVED 64  // added to the number of a format
#define OUTPUTS 16      // of a group
enum {
  Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ2_XXS = 16,
  IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19, IQ4_NL = 20, IQ3_S = 21, IQ2_S = 22, IQ4_XS = 23, IQ1_M = 29, TQ1_0 = 34, TQ2_0 = 35,
  MXFP4 = 39, NVFP4 = 40
};

#define CONSTANT static inline __attribute__((always_inline))  // of a format that the compiler knows
CONSTANT int bits_of(int format) {
  switch (format) {
    case Q2_K: return 2;
    case Q3_K: return 3;
    case Q5_0: case Q5_1: case Q5_K: return 5;
    case Q6_K: return 6;
    case Q8_0: return 8;
    default: return 4;
  }
}
// Of the formats whose weights are indices into a table after recoding (recoding.c): those that share IQ2's table, and all.
CONSTANT int is_below_3_bits(int format) {
  return format == IQ2_XXS || format == IQ2_XS || format == IQ2_S || format == IQ1_S || format == IQ1_M || format == TQ1_0 ||
         format == TQ2_0;
}
CONSTANT int is_recoded(int format) {
  return is_below_3_bits(format) || format == IQ3_XXS || format == IQ3_S || format == NVFP4;
}
CONSTANT int zero_of(int format) {
  if (is_recoded(format)) return 128;
  switch (format) {
    case Q8_0: case IQ4_NL: case IQ4_XS: case MXFP4: return 128;
    case Q6_K: return 32;
    case Q5_0: return 16;
    case Q4_0: return 8;
    case Q3_K: return 4;
    default: return 0;
  }
}
CONSTANT int is_wide(int format) { return zero_of(format) == 128; }  // integers have 8 bits where they are multiplied
CONSTANT int has_minimums(int format) {
  return format == Q4_1 || format == Q5_1 || format == Q2_K || format == Q4_K || format == Q5_K;
}
CONSTANT int is_of_256(int format) { return (format >= Q2_K && format <= Q6_K) || format == IQ4_XS || is_recoded(format); }
CONSTANT int halves_of(int format) {  // with own scales
  switch (format) {
    case Q2_K: case Q3_K: case Q6_K: case IQ2_XS: case IQ2_S: case IQ1_M: case NVFP4: return 2;
    default: return 1;
  }
}
// What the whole numbers of a table are multiplied by, beside the scales: a power of two.
CONSTANT float unit_of(int format) {
  return is_below_3_bits(format) ? 0.125f : format == IQ3_XXS || format == NVFP4 ? 0.5f : 1;
}

// What the 16 indices stand for, plus 128, in formats that have a table. That of the formats below 3 bits has the numbers of
// IQ2 (8, 25, 43), IQ1 (1, 7, 9) and TQ (0, 1, 2), so that all of them have one kernel.
CONSTANT const uint8_t *table_of(int format) {
  static const uint8_t iq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
  static const uint8_t mxfp4[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
  static const uint8_t below_3_bits[16] = {136, 153, 171, 121, 129, 137, 128, 129, 120, 103, 85, 119, 127, 135, 130, 127};
  static const uint8_t iq3_xxs[16] = {130, 134, 138, 142, 146, 150, 154, 159, 126, 122, 118, 114, 110, 106, 102, 97};
  static const uint8_t iq3_s[16] = {129, 131, 133, 135, 137, 139, 141, 143, 127, 125, 123, 121, 119, 117, 115, 113};
  if (is_below_3_bits(format)) return below_3_bits;
  switch (format) {
    case IQ4_NL: case IQ4_XS: return iq4;
    case MXFP4: case NVFP4: return mxfp4;
    case IQ3_XXS: return iq3_xxs;
    case IQ3_S: return iq3_s;
    default: return NULL;
  }
}

// Bytes of the scales of a block of a group. Of 32 inputs: a scale, and a minimum if there is one, in float16 for each
// output, or of MXFP4 a byte. Of 256: these (of NVFP4 a scale in float32), then for every 32 inputs `own_bytes` for each
// output: a scale and a minimum (Q4_K, Q5_K), two scales (Q3_K, Q6_K, IQ2_XS, IQ2_S, IQ1_M; of NVFP4 8-bit floats), two bytes
// of a scale and a minimum (Q2_K), or a scale.
CONSTANT int64_t own_bytes(int format) { return halves_of(format) == 1 && !has_minimums(format) ? 1 : 2; }
CONSTANT int64_t whole_bytes(int format) { return format == MXFP4 ? 1 : format == NVFP4 || has_minimums(format) ? 4 : 2; }
CONSTANT int64_t scale_bytes(int format) {
  return (whole_bytes(format) + (is_of_256(format) ? 8 * own_bytes(format) : 0)) * OUTPUTS;
}
CONSTANT int64_t integer_bytes(int format) { return bits_of(format) * 4 * OUTPUTS; }  // of 32 inputs of a group
CONSTANT int64_t all_scale_bytes(int format, int64_t in) {
  return PAD(in / (is_of_256(format) ? 256 : 32) * scale_bytes(format), 64);
}
CONSTANT int64_t group_bytes(int format, int64_t in) {
  return all_scale_bytes(format, in) + in / 32 * integer_bytes(format);
}

// Bytes of `rows` rows of a packed weight, of a format with or without INTERLEAVED: where the rows after them begin, if
// `rows` is a multiple of OUTPUTS or the format is not interleaved.
static inline int64_t packed_bytes(int64_t format, int64_t rows, int64_t in) {
  return format < INTERLEAVED ? rows * packed_row_bytes(format, in)
                              : (rows + OUTPUTS - 1) / OUTPUTS * group_bytes(format - INTERLEAVED, in);
}

// Integers of 32 inputs have a plane of 4 bits, of 2 or of all 8, and above it one of the rest. In a plane of `width` bits
// the inputs 4 j to 4 j + 3 of an output are 4 bytes: those at plane_place, moved by plane_shift.
CONSTANT int low_width(int bits) { return bits == 8 ? 8 : bits < 4 ? 2 : 4; }
CONSTANT int plane_bytes(int width) { return width * 4 * OUTPUTS; }
CONSTANT int plane_place(int width, int j) {
  return (width == 8 ? j : width == 4 ? j % 4 : width == 2 ? j / 4 : 0) * 4 * OUTPUTS;
}
CONSTANT int plane_shift(int width, int j) { return width == 8 ? 0 : width == 4 ? j / 4 * 4 : width == 2 ? j % 4 * 2 : j; }

CONSTANT int get_bits(int width, const uint8_t *plane, int64_t output, int i) {
  return plane[plane_place(width, i / 4) + output * 4 + i % 4] >> plane_shift(width, i / 4) & ((1 << width) - 1);
}
CONSTANT void get_planes(int bits, const uint8_t *from, int64_t output, uint8_t *q) {
  const int low = low_width(bits);
  for (int i = 0; i < 32; i++) {
    q[i] = get_bits(low, from, output, i);
    if (bits > low) q[i] |= get_bits(bits - low, from + plane_bytes(low), output, i) << low;
  }
}
// The integers of 32 inputs of an output, less their zero.
static void get_integers(int format, const uint8_t *from, int64_t output, int *w) {
  uint8_t q[32];
  switch (bits_of(format)) {
    case 2: get_planes(2, from, output, q); break;
    case 3: get_planes(3, from, output, q); break;
    case 4: get_planes(4, from, output, q); break;
    case 5: get_planes(5, from, output, q); break;
    case 6: get_planes(6, from, output, q); break;
    case 8: get_planes(8, from, output, q); break;
  }
  const uint8_t *table = table_of(format);
  for (int i = 0; i < 32; i++) w[i] = (table ? table[q[i]] : q[i]) - zero_of(format);
}

static inline float load_float(const uint8_t *p) {
  float x;
  memcpy(&x, p, sizeof x);
  return x;
}
// An 8-bit float (E4M3) that is not negative. One with the exponent 0 is m / 8 times 2^-6, and made as (1 + m / 8) 2^-6 − 2^-6.
static inline float widen_e4m3(uint8_t bits) {
  const uint32_t is_least = bits < 8, moved = ((uint32_t)bits << 20) + ((120 + is_least) << 23);
  float x;
  memcpy(&x, &moved, sizeof x);
  return is_least ? x - 0x1p-6f : x;
}

// The scales and minimums of 16 inputs each, of 32 inputs of one output; `number` counts these 32 in the row.
static void get_scales(int format, const uint8_t *group, int64_t number, int64_t output, float *scale, float *minimum) {
  const uint8_t *at = group + (is_of_256(format) ? number / 8 : number) * scale_bytes(format);
  if (format == NVFP4) scale[0] = load_float(at + 4 * output);
  else scale[0] = format == MXFP4 ? half_power(at[output]) : load_half(at + 2 * output);
  scale[0] *= unit_of(format);
  minimum[0] = has_minimums(format) ? load_half(at + 2 * (OUTPUTS + output)) : -0.0f;
  scale[1] = scale[0], minimum[1] = minimum[0];
  if (!is_of_256(format)) return;
  const uint8_t *own = at + whole_bytes(format) * OUTPUTS + number % 8 * own_bytes(format) * OUTPUTS + output;
  for (int i = 0; i < 2; i++) {
    const uint8_t here = own[halves_of(format) == 2 ? i * OUTPUTS : 0];
    if (format == Q2_K) scale[i] *= here & 15, minimum[i] = -(minimum[i] * (here >> 4));
    else if (has_minimums(format)) scale[i] *= here, minimum[i] = -(minimum[i] * own[OUTPUTS]);
    else scale[i] *= format == NVFP4 ? widen_e4m3(here) : (int8_t)here;
  }
}

// Weights of GGUF blocks, interleaved for products with 8-bit activations: 16 outputs are a group, and four inputs of an
// output stand side by side, as one instruction takes them. A group holds the scales of all its blocks first, then, for
// every 32 inputs, the integers in planes of bits, the lowest first (`put_plane`). Integers are unsigned, or places in a
// table of 16; `zero_of` says which of them stands for 0. Sums of integers are exact, so no instruction set, number of rows
// or threads changes a bit; docs/exactness.md defines the float operations.
#pragma once
#include "packed_weights.h"

#define INTERLEAVED 64  // added to the number of a format
#define OUTPUTS 16      // of a group
enum {
  Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20,
  IQ4_XS = 23, MXFP4 = 39
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
CONSTANT int zero_of(int format) {
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
CONSTANT int is_of_256(int format) { return (format >= Q2_K && format <= Q6_K) || format == IQ4_XS; }
CONSTANT int halves_of(int format) { return format == Q2_K || format == Q3_K || format == Q6_K ? 2 : 1; }  // with own scales

// What the 16 places stand for, plus 128, in formats that have a table.
CONSTANT const uint8_t *table_of(int format) {
  static const uint8_t iq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
  static const uint8_t mxfp4[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
  return format == IQ4_NL || format == IQ4_XS ? iq4 : format == MXFP4 ? mxfp4 : NULL;
}

// Bytes of the scales of a block of a group. Of 32 inputs: a scale, and a minimum if there is one, in float16 for each
// output, or of MXFP4 a byte. Of 256: these, then for every 32 inputs `own_bytes` for each output: a scale and a minimum
// (Q4_K, Q5_K), two scales (Q3_K, Q6_K), two bytes of a scale and a minimum (Q2_K), or a scale (IQ4_XS).
CONSTANT int64_t own_bytes(int format) { return format == IQ4_XS ? 1 : 2; }
CONSTANT int64_t scale_bytes(int format) {
  const int64_t wholes = (format == MXFP4 ? 1 : has_minimums(format) ? 4 : 2) * OUTPUTS;
  return is_of_256(format) ? wholes + 8 * own_bytes(format) * OUTPUTS : wholes;
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

// The integers of 32 inputs, part `part` of a block of 256 weights or of Q8_0.
static void unpack_block(int format, const uint8_t *b, int part, uint8_t *q) {
  if (format == Q8_0) {
    for (int i = 0; i < 32; i++) q[i] = b[2 + i] ^ 128;
  } else if (format == Q6_K) {
    const uint8_t *low = b + part / 4 * 64 + part % 2 * 32, *high = b + 128 + part / 4 * 32;
    for (int i = 0; i < 32; i++) q[i] = (part % 4 / 2 ? low[i] >> 4 : low[i] & 15) | (high[i] >> part % 4 * 2 & 3) << 4;
  } else if (format == Q2_K || format == Q3_K) {
    const uint8_t *low = b + (format == Q3_K ? 32 : 16) + part / 4 * 32;
    for (int i = 0; i < 32; i++) q[i] = low[i] >> part % 4 * 2 & 3;
    if (format == Q3_K)
      for (int i = 0; i < 32; i++) q[i] |= (b[i] >> part & 1) << 2;
  } else {
    const uint8_t *low = b + (format == Q5_K ? 48 : 16) + part / 2 * 32;
    for (int i = 0; i < 32; i++) q[i] = part % 2 ? low[i] >> 4 : low[i] & 15;
    if (format == Q5_K)
      for (int i = 0; i < 32; i++) q[i] |= (b[16 + i] >> part & 1) << 4;
  }
}

// Integers of 32 inputs have a plane of 4 bits, of 2 or of all 8, and above it one of the rest. In a plane of `width` bits
// the inputs 4 j to 4 j + 3 of an output are 4 bytes: those at plane_place, moved by plane_shift.
CONSTANT int low_width(int bits) { return bits == 8 ? 8 : bits < 4 ? 2 : 4; }
CONSTANT int plane_bytes(int width) { return width * 4 * OUTPUTS; }
CONSTANT int plane_place(int width, int j) {
  return (width == 8 ? j : width == 4 ? j % 4 : width == 2 ? j / 4 : 0) * 4 * OUTPUTS;
}
CONSTANT int plane_shift(int width, int j) { return width == 8 ? 0 : width == 4 ? j / 4 * 4 : width == 2 ? j % 4 * 2 : j; }

// Write bits `from` to `from` + width − 1 of an output's integers to a plane that is zero; `four` are four inputs each.
CONSTANT void put_plane(int width, int from, const uint32_t *four, uint8_t *plane, int64_t output) {
  const uint32_t mask = 0x01010101u * ((1 << width) - 1);
  for (int j = 0; j < 8; j++) {
    uint32_t *to = (uint32_t *)(plane + plane_place(width, j)) + output;
    *to |= (four[j] >> from & mask) << plane_shift(width, j);
  }
}
CONSTANT void put_integers(int bits, const uint8_t *q, int64_t output, uint8_t *to) {
  const int low = low_width(bits);
  uint32_t four[8];
  memcpy(four, q, sizeof four);
  put_plane(low, 0, four, to, output);
  if (bits > low) put_plane(bits - low, low, four, to + plane_bytes(low), output);
}
// The same from a block of 32 weights, or from those of IQ4_XS, whose low bits already stand as they do in a group.
static void put_nibbles(int format, const uint8_t *low, int64_t output, uint8_t *to) {
  uint32_t four[4], *out = (uint32_t *)to + output, bits, all = 0;
  memcpy(four, low, sizeof four);
  for (int j = 0; j < 4; j++) out[j * OUTPUTS] = four[j];
  if (bits_of(format) == 4) return;
  memcpy(&bits, low - 4, sizeof bits);
  for (int i = 0; i < 4; i++) {  // byte i: the bits of inputs i, i + 4, …
    uint32_t x = bits >> i & 0x11111111;
    x = (x | x >> 3) & 0x03030303, x = (x | x >> 6) & 0x000f000f, x = (x | x >> 12) & 0xff;
    all |= x << 8 * i;
  }
  out[4 * OUTPUTS] = all;
}
static void put_block(int format, const uint8_t *b, int part, int64_t output, uint8_t *to) {
  uint8_t q[32];
  if (format == IQ4_XS) return put_nibbles(format, b + 8 + part * 16, output, to);
  if (!is_of_256(format) && format != Q8_0) return put_nibbles(format, b + formats[format].bytes - 16, output, to);
  unpack_block(format, b, part, q);
  switch (bits_of(format)) {
    case 2: put_integers(2, q, output, to); break;
    case 3: put_integers(3, q, output, to); break;
    case 4: put_integers(4, q, output, to); break;
    case 5: put_integers(5, q, output, to); break;
    case 6: put_integers(6, q, output, to); break;
    case 8: put_integers(8, q, output, to); break;
  }
}

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

// The scales of a block of a GGUF file, for one output of a group.
static void put_scales(int format, const uint8_t *b, int64_t output, uint8_t *to) {
  if (format == MXFP4) {
    to[output] = b[0];
    return;
  }
  const uint8_t *wholes = b + (format == Q6_K ? 208 : format == Q3_K ? 108 : format == Q2_K ? 80 : 0);
  memcpy(to + 2 * output, wholes, 2);
  if (has_minimums(format)) memcpy(to + 2 * (OUTPUTS + output), wholes + 2, 2);
  if (!is_of_256(format)) return;
  uint8_t own[16], six[16];
  if (format == Q2_K) memcpy(own, b, sizeof own);
  else if (format == Q3_K) scales_of_q3_k(b, (int8_t *)own);
  else if (format == Q6_K) memcpy(own, b + 192, sizeof own);
  else if (format == IQ4_XS) scales_of_iq4_xs(b, (int8_t *)own);
  else {
    six_bit_scales(b, six);
    for (int i = 0; i < 8; i++) own[2 * i] = six[i], own[2 * i + 1] = six[8 + i];
  }
  to += (has_minimums(format) ? 4 : 2) * OUTPUTS + output;
  for (int i = 0; i < 8 * own_bytes(format); i++) to[i * OUTPUTS] = own[i];
}

// The scales and minimums of 16 inputs each, of 32 inputs of one output; `number` counts these 32 in the row.
static void get_scales(int format, const uint8_t *group, int64_t number, int64_t output, float *scale, float *minimum) {
  const uint8_t *at = group + (is_of_256(format) ? number / 8 : number) * scale_bytes(format);
  scale[0] = format == MXFP4 ? half_power(at[output]) : load_half(at + 2 * output);
  minimum[0] = has_minimums(format) ? load_half(at + 2 * (OUTPUTS + output)) : -0.0f;
  scale[1] = scale[0], minimum[1] = minimum[0];
  if (!is_of_256(format)) return;
  const uint8_t *own = at + (has_minimums(format) ? 4 : 2) * OUTPUTS + number % 8 * own_bytes(format) * OUTPUTS + output;
  for (int i = 0; i < 2; i++) {
    const uint8_t here = own[halves_of(format) == 2 ? i * OUTPUTS : 0];
    if (format == Q2_K) scale[i] *= here & 15, minimum[i] = -(minimum[i] * (here >> 4));
    else if (has_minimums(format)) scale[i] *= here, minimum[i] = -(minimum[i] * own[OUTPUTS]);
    else scale[i] *= (int8_t)here;
  }
}

// The bfloat16 numbers of a row, those that `expand_row` makes of the file's blocks.
static void expand_interleaved(int format, const uint8_t *weight, int64_t row, int64_t in, uint16_t *out) {
  const uint8_t *group = weight + row / OUTPUTS * group_bytes(format, in);
  const uint8_t *integers = group + all_scale_bytes(format, in);
  for (int64_t number = 0; number < in / 32; number++) {
    int w[32];
    float scale[2], minimum[2];
    get_integers(format, integers + number * integer_bytes(format), row % OUTPUTS, w);
    get_scales(format, group, number, row % OUTPUTS, scale, minimum);
    for (int i = 0; i < 32; i++) {
      const float product = w[i] * scale[i / 16];  // exact
      out[number * 32 + i] = to_bf16(product + minimum[i / 16]);
    }
  }
}

int64_t saltus_packed_bytes(int64_t format, int64_t rows, int64_t in) { return packed_bytes(format, rows, in); }

typedef struct {
  const uint8_t *blocks;  // [outs, bytes of a row], as in a GGUF file
  uint8_t *out;           // [groups, group_bytes], zeros
  int64_t format, outs, in;
} Interleaving;

static void interleave_group(const void *of, int64_t group) {
  const Interleaving *a = of;
  const int format = a->format, parts = formats[format].weights / 32;
  uint8_t *to = a->out + group * group_bytes(format, a->in), *integers = to + all_scale_bytes(format, a->in);
  for (int64_t output = 0; output < OUTPUTS && group * OUTPUTS + output < a->outs; output++) {
    const uint8_t *block = a->blocks + (group * OUTPUTS + output) * packed_row_bytes(format, a->in);
    for (int64_t number = 0; number < a->in / 32; number++) {
      if (number % parts == 0) put_scales(format, block, output, to + number / parts * scale_bytes(format));
      put_block(format, block, number % parts, output, integers + number * integer_bytes(format));
      if (number % parts == parts - 1) block += formats[format].bytes;
    }
  }
}
int saltus_interleave(const Interleaving *a) {
  share(interleave_group, a, (a->outs + OUTPUTS - 1) / OUTPUTS);
  return 0;
}

typedef struct {
  const uint8_t *weight;  // [.., in], packed
  uint16_t *out;          // [count, in]
  const int64_t *rows;    // [count]: which rows; NULL: the first ones
  int64_t format, in, count;
} Expansion;
#define ROWS_AT_ONCE 16  // that a thread expands

static void expand_some(const void *of, int64_t piece) {
  const Expansion *a = of;
  const int64_t size = packed_row_bytes(a->format % INTERLEAVED, a->in);
  for (int64_t i = piece * ROWS_AT_ONCE; i < a->count && i < (piece + 1) * ROWS_AT_ONCE; i++) {
    const int64_t row = a->rows ? a->rows[i] : i;
    uint16_t *out = a->out + i * a->in;
    if (a->format >= INTERLEAVED) expand_interleaved(a->format - INTERLEAVED, a->weight, row, a->in, out);
    else formats[a->format].expand_row(a->weight + row * size, a->in, 0, a->in, size, out);
  }
}
int saltus_expand(const Expansion *a) {
  share(expand_some, a, (a->count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE);
  return 0;
}

// Weights of GGUF blocks, interleaved for products with 8-bit activations: 16 outputs are a group, and four inputs of an
// output stand side by side, as one instruction takes them. A group holds the scales of all its blocks first, then, for
// every 32 inputs, the integers: the low four bits of inputs 0–15 and 16–31 in the halves of 16 bytes, then what a format
// has above them. Integers are unsigned; `zero_of` says which of them stands for 0. Sums of integers are exact, so no
// instruction set, number of rows or threads changes a bit; docs/exactness.md defines the float operations.
#pragma once
#include "packed_weights.h"

#define INTERLEAVED 64  // added to the number of a format
#define OUTPUTS 16      // of a group
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

#define CONSTANT static inline __attribute__((always_inline))  // of a format that the compiler knows
CONSTANT int bits_of(int format) {
  return format == Q8_0 ? 8 : format == Q6_K ? 6 : format == Q5_0 || format == Q5_1 || format == Q5_K ? 5 : 4;
}
CONSTANT int zero_of(int format) {
  return format == Q8_0 ? 128 : format == Q6_K ? 32 : format == Q5_0 ? 16 : format == Q4_0 ? 8 : 0;
}
CONSTANT int has_minimums(int format) { return format == Q4_1 || format == Q5_1 || format == Q4_K || format == Q5_K; }
CONSTANT int is_of_256(int format) { return format >= Q4_K; }

// Bytes of the scales of a block of a group. Of 32 inputs: a scale, and a minimum if there is one, in float16 for each
// output. Of 256: these, then for every 32 inputs 2 bytes for each output: a scale and a minimum, or two scales.
CONSTANT int64_t scale_bytes(int format) {
  const int64_t halves = (has_minimums(format) ? 2 : 1) * 2 * OUTPUTS;
  return is_of_256(format) ? halves + 8 * 2 * OUTPUTS : halves;
}
CONSTANT int64_t integer_bytes(int format) { return bits_of(format) * 4 * OUTPUTS; }  // of 32 inputs of a group
CONSTANT int64_t all_scale_bytes(int format, int64_t in) {
  return PAD(in / (is_of_256(format) ? 256 : 32) * scale_bytes(format), 64);
}
CONSTANT int64_t group_bytes(int format, int64_t in) {
  return all_scale_bytes(format, in) + in / 32 * integer_bytes(format);
}

// The integers of 32 inputs, part `part` of a block of 256 weights or of Q8_0.
static void unpack_block(int format, const uint8_t *b, int part, uint8_t *q) {
  if (format == Q8_0) {
    for (int i = 0; i < 32; i++) q[i] = b[2 + i] ^ 128;
  } else if (format == Q6_K) {
    const uint8_t *low = b + part / 4 * 64 + part % 2 * 32, *high = b + 128 + part / 4 * 32;
    for (int i = 0; i < 32; i++) q[i] = (part % 4 / 2 ? low[i] >> 4 : low[i] & 15) | (high[i] >> part % 4 * 2 & 3) << 4;
  } else {
    const uint8_t *low = b + (format == Q5_K ? 48 : 16) + part / 2 * 32;
    for (int i = 0; i < 32; i++) q[i] = part % 2 ? low[i] >> 4 : low[i] & 15;
    if (format == Q5_K)
      for (int i = 0; i < 32; i++) q[i] |= (b[16 + i] >> part & 1) << 4;
  }
}

// Where the low bits of input i of an output stand among the integers of 32 inputs of a group.
CONSTANT int64_t low_place(int64_t output, int i) { return i % 16 / 4 * 64 + output * 4 + i % 4; }
// The same of the bits above four: of five bits, inputs of one place share a byte, by i / 4; of six, by i / 4 % 4.
CONSTANT int64_t high_place(int bits, int64_t output, int i) {
  return 256 + (bits == 6 ? i / 16 * 64 : 0) + output * 4 + i % 4;
}

// Four inputs of an output at a time.
static void put_integers(int bits, const uint8_t *q, int64_t output, uint8_t *to) {
  uint32_t four[8], *out = (uint32_t *)to + output, *above = out + 4 * OUTPUTS;
  memcpy(four, q, sizeof four);
  for (int j = 0; j < 8 && bits == 8; j++) out[j * OUTPUTS] = four[j];
  for (int j = 0; j < 4 && bits < 8; j++) out[j * OUTPUTS] = (four[j] & 0x0f0f0f0f) | (four[j + 4] & 0x0f0f0f0f) << 4;
  if (bits == 5) {
    *above = 0;
    for (int j = 0; j < 8; j++) *above |= (four[j] >> 4 & 0x01010101) << j;
  } else if (bits == 6) {
    above[0] = above[OUTPUTS] = 0;
    for (int j = 0; j < 8; j++) above[j / 4 * OUTPUTS] |= (four[j] >> 4 & 0x03030303) << j % 4 * 2;
  }
}
// The same from a block of 32 weights, whose low bits already stand as they do in a group.
static void put_block_of_32(int format, const uint8_t *b, int64_t output, uint8_t *to) {
  const uint8_t *high = b + (has_minimums(format) ? 4 : 2), *low = high + (bits_of(format) == 5 ? 4 : 0);
  uint32_t four[4], *out = (uint32_t *)to + output, bits, all = 0;
  memcpy(four, low, sizeof four);
  for (int j = 0; j < 4; j++) out[j * OUTPUTS] = four[j];
  if (bits_of(format) == 4) return;
  memcpy(&bits, high, sizeof bits);
  for (int i = 0; i < 4; i++) {  // byte i: the bits of inputs i, i + 4, …
    uint32_t x = bits >> i & 0x11111111;
    x = (x | x >> 3) & 0x03030303, x = (x | x >> 6) & 0x000f000f, x = (x | x >> 12) & 0xff;
    all |= x << 8 * i;
  }
  out[4 * OUTPUTS] = all;
}
static void get_integers(int bits, const uint8_t *from, int64_t output, uint8_t *q) {
  for (int i = 0; i < 32; i++)
    if (bits == 8) q[i] = from[i / 4 * 64 + output * 4 + i % 4];
    else {
      q[i] = from[low_place(output, i)] >> (i < 16 ? 0 : 4) & 15;
      if (bits == 5) q[i] |= (from[high_place(5, output, i)] >> i / 4 & 1) << 4;
      if (bits == 6) q[i] |= (from[high_place(6, output, i)] >> i / 4 % 4 * 2 & 3) << 4;
    }
}

// The scales of a block of a GGUF file, for one output of a group.
static void put_scales(int format, const uint8_t *b, int64_t output, uint8_t *to) {
  const int64_t after = (has_minimums(format) ? 4 : 2) * OUTPUTS;
  memcpy(to + 2 * output, b + (format == Q6_K ? 208 : 0), 2);
  if (has_minimums(format)) memcpy(to + 2 * (OUTPUTS + output), b + 2, 2);
  if (format == Q6_K)
    for (int i = 0; i < 16; i++) to[after + i * OUTPUTS + output] = b[192 + i];
  else if (is_of_256(format)) {
    uint8_t six[16];
    six_bit_scales(b, six);
    for (int i = 0; i < 8; i++) {
      to[after + 2 * i * OUTPUTS + output] = six[i];
      to[after + (2 * i + 1) * OUTPUTS + output] = six[8 + i];
    }
  }
}

// The scales of 16 inputs each, and the minimum, of 32 inputs of one output; `number` counts these 32 in the row.
static void get_scales(int format, const uint8_t *group, int64_t number, int64_t output, float *scale, float *minimum) {
  if (!is_of_256(format)) {
    const uint8_t *at = group + number * scale_bytes(format);
    scale[0] = scale[1] = load_half(at + 2 * output);
    *minimum = has_minimums(format) ? load_half(at + 2 * (OUTPUTS + output)) : -0.0f;
    return;
  }
  const uint8_t *at = group + number / 8 * scale_bytes(format), *own = at + (has_minimums(format) ? 4 : 2) * OUTPUTS;
  const float whole = load_half(at + 2 * output);
  const uint8_t first = own[number % 8 * 2 * OUTPUTS + output], second = own[(number % 8 * 2 + 1) * OUTPUTS + output];
  if (format == Q6_K) scale[0] = whole * (int8_t)first, scale[1] = whole * (int8_t)second, *minimum = -0.0f;
  else scale[0] = scale[1] = whole * first, *minimum = -(load_half(at + 2 * (OUTPUTS + output)) * second);
}

// The bfloat16 numbers of a row, those that `expand_row` makes of the file's blocks.
static void expand_interleaved(int format, const uint8_t *weight, int64_t row, int64_t in, uint16_t *out) {
  const uint8_t *group = weight + row / OUTPUTS * group_bytes(format, in);
  const uint8_t *integers = group + all_scale_bytes(format, in);
  for (int64_t number = 0; number < in / 32; number++) {
    uint8_t q[32];
    float scale[2], minimum;
    get_integers(bits_of(format), integers + number * integer_bytes(format), row % OUTPUTS, q);
    get_scales(format, group, number, row % OUTPUTS, scale, &minimum);
    for (int i = 0; i < 32; i++) {
      const float product = (q[i] - zero_of(format)) * scale[i / 16];  // exact
      out[number * 32 + i] = to_bf16(product + minimum);
    }
  }
}

int64_t saltus_group_bytes(int64_t format, int64_t in) { return group_bytes(format, in); }

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
      uint8_t q[32];
      if (number % parts == 0) put_scales(format, block, output, to + number / parts * scale_bytes(format));
      if (is_of_256(format) || format == Q8_0) {
        unpack_block(format, block, number % parts, q);
        put_integers(bits_of(format), q, output, integers + number * integer_bytes(format));
      } else put_block_of_32(format, block, output, integers + number * integer_bytes(format));
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

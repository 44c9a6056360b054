// Interleave the blocks of a GGUF file as integer_weights.h describes, and expand rows of either.
#include "integer_weights.h"

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
// The same from a block of 32 weights, or from those of IQ4_XS and of recoded blocks, whose low bits already stand as they
// do in a group.
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
  if (is_recoded(format)) return put_nibbles(format, b + whole_bytes(format) + 8 * own_bytes(format) + part * 16, output, to);
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

// The scales of a block of a GGUF file, for one output of a group.
static void put_scales(int format, const uint8_t *b, int64_t output, uint8_t *to) {
  if (format == MXFP4) {
    to[output] = b[0];
    return;
  }
  const uint8_t *wholes = b + (format == Q6_K ? 208 : format == Q3_K ? 108 : format == Q2_K ? 80 : 0);
  memcpy(to + (format == NVFP4 ? 4 : 2) * output, wholes, format == NVFP4 ? 4 : 2);
  if (has_minimums(format)) memcpy(to + 2 * (OUTPUTS + output), wholes + 2, 2);
  if (!is_of_256(format)) return;
  uint8_t own[16], six[16];
  if (format == Q2_K) memcpy(own, b, sizeof own);
  else if (format == Q3_K) scales_of_q3_k(b, (int8_t *)own);
  else if (format == Q6_K) memcpy(own, b + 192, sizeof own);
  else if (format == IQ4_XS) scales_of_iq4_xs(b, (int8_t *)own);
  else if (is_recoded(format)) memcpy(own, b + whole_bytes(format), 8 * own_bytes(format));
  else {
    six_bit_scales(b, six);
    for (int i = 0; i < 8; i++) own[2 * i] = six[i], own[2 * i + 1] = six[8 + i];
  }
  to += whole_bytes(format) * OUTPUTS + output;
  for (int i = 0; i < 8 * own_bytes(format); i++) to[i * OUTPUTS] = own[i];
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
  const uint8_t *blocks;  // [outs, bytes of a row], as in a GGUF file, or recoded
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

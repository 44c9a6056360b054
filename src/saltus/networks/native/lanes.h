// Vectors of 16 floats, and the number formats that weights come in.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t ilanes __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint16_t hlanes __attribute__((vector_size(LANES * sizeof(uint16_t))));

#define PAD(n, to) (((n) + (to) - 1) / (to) * (to))

static inline lanes load_f32(const float *p) {
  lanes v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline float from_f32(float x) { return x; }
static inline float to_f32(float x) { return x; }

static inline lanes load_bf16(const uint16_t *p) {
  hlanes h;
  memcpy(&h, p, sizeof h);
  return (lanes)(__builtin_convertvector(h, ilanes) << 16);
}
static inline float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
static inline uint16_t to_bf16(float x) {  // round to nearest even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#ifdef __FLT16_MAX__
typedef _Float16 flanes __attribute__((vector_size(LANES * sizeof(_Float16))));
static inline lanes load_f16(const _Float16 *p) {
  flanes h;
  memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, lanes);
}
static inline float from_f16(_Float16 x) { return (float)x; }
static inline _Float16 to_f16(float x) { return (_Float16)x; }
#endif

// The sum of 16 lanes, always by the same tree.
static inline float sum_lanes(lanes v) {
  float x[LANES];
  memcpy(x, &v, sizeof x);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}

// exp, lane by lane the same operations: 2^n · polynomial (Cephes), exact zero below −87.
static inline lanes exp_lanes(lanes x) {
  const lanes low = (lanes){} - 87.0f;
  ilanes alive = x > low;
  x = (lanes)(((ilanes)x & alive) | ((ilanes)low & ~alive));
  lanes n = x * 1.44269504088896f + 12582912.0f;  // rounds to nearest: 1.5 · 2^23
  n = n - 12582912.0f;
  lanes r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  lanes p = (lanes){} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ilanes bits = (__builtin_convertvector(n, ilanes) + 127) << 23;
  return (lanes)((ilanes)(p * (lanes)bits) & alive);
}

// The streams of hidden states of a token (AltUp, Baykal et al. 2023), of which a layer computes one: what is done around the
// layers and to their gates. Sums are in float32, in one order, whatever the width of vectors.
#pragma once
#include "lanes.h"

#define MOST_STREAMS 8
#define MODALITIES PAD(MOST_STREAMS, LANES)

typedef struct {
  void *streams[MOST_STREAMS];     // [rows, size] each, dense, changed in place
  void *predicted;                 // [rows, size]: what was predicted of the active stream, before a layer changes it
  const float *norm, *router;      // [size]: of an RMS norm; [count, size]: the router, which includes 1 / size
  const float *predict, *correct;  // [count, count, count]: of stream i by stream j and modality; [count, count]
  int64_t size, count, active;
  float epsilon;                   // of the norm
} AltUp;

typedef struct {
  void *x;           // [rows, size], dense, changed in place: scaled to the root mean square of `like`
  const void *like;  // [rows, size], dense
  int64_t size;
  float least;       // of the mean square of x
} Magnitude;

typedef struct {
  const void *x[MOST_STREAMS];  // [rows, size] each, dense
  void *out;                    // [rows, size], dense: the mean of all, which may be one of them
  int64_t size, count;
} Average;

typedef struct {
  void *x;           // [rows, size], dense, changed in place: less mean + deviations · standard deviation, or 0
  int64_t size;
  float deviations;
} Cutoff;

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

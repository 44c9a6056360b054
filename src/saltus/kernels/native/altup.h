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

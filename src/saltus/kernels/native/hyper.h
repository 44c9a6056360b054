// Hyper-connections (Zhu et al. 2024; Xie et al. 2026): a token has several streams of hidden states. A layer reads a mean of
// them, weighted by the token, and what it gives is added to all of them. Sums are in float32, in one order.
#pragma once
#include "lanes.h"
#include "altup.h"

typedef struct {
  void *streams;             // [rows, count, size], dense
  void *x;                   // [rows, size], dense: what a layer reads, and then what it gave
  float *gates;              // [rows, gates]: weights for reading, for writing, and of stream i in stream j [count, count]
  const float *mix;          // [gates, count · size], or NULL: a layer reads the plain mean
  const float *base, *scale; // [gates]; [3], of the three kinds of gates
  int64_t size, count;
  int64_t outs;              // how many gates `mix` has: of the first kind, of two or of all
  int64_t rounds;            // how often rows and columns of the third kind are divided by their sums
  float epsilon;             // of the norm of all streams
  float least, written_least, magnitude;  // added to gates for reading, and for writing; what the latter are times
} HyperConnection;
